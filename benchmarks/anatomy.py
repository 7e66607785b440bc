"""How well one number explains the flips of recorded traces, how many return, and how their union grows.

python benchmarks/anatomy.py [TRACE ...]      the traces in benchmarks/data, or those named (see codec_sizes.py)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from codec_sizes import SHIPPED, after_step, load_trace

from weightcast.analysis.anatomy import anatomy_of
from weightcast.analysis.rounding import verdict
from weightcast.analysis.steps import Patched
from weightcast.format.diff import diff
from weightcast.format.patchfile import PatchReader, encode
from weightcast.format.safetensors import BytesSource
from weightcast.format.tensors import Arrays, Weights


def recorded(trace: Path) -> list[Arrays]:
    """The states of a recorded training."""
    weights, steps = load_trace(trace)
    states = [weights]
    for step in steps:
        states.append(after_step(states[-1], step))
    return states


def steps_of(states: Sequence[Weights]) -> Patched:
    """Successive states as a base and the `plain` patches that lead on."""
    data = [encode(diff(old, new), "plain") for old, new in pairwise(states)]
    return Patched(states[0], [PatchReader(BytesSource(one)) for one in data])


def facts(trace: Path) -> dict[str, Any]:
    found = anatomy_of(steps_of(recorded(trace)))
    (one,) = found.dtypes
    return {
        "trace": trace.name,
        "steps": found.steps,
        "elements": found.table.elements,
        "density": found.density,
        "looks_like": verdict(one.fits),
        "fits": [{"kind": fit.kind, "largest": fit.largest, "misplaced": fit.misplaced} for fit in one.fits],
        "returned": one.flips.returned / max(sum(one.flips.changed[1:]), 1),
        "changed_by_interval": {
            each: union.changed / union.windows / found.table.elements for each, union in one.flips.unions.items()
        },
        "bytes_by_interval": {each: sum(sizes) / len(sizes) for each, sizes in found.sizes.windows.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    traces = parser.parse_args().traces or sorted(path for path in SHIPPED.iterdir() if path.is_dir())
    print(json.dumps({"traces": [facts(trace) for trace in traces]}, indent=1))


if __name__ == "__main__":
    main()
