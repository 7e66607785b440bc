"""What it costs in bytes to cut tensors into boxes, for readers that hold columns of them, on recorded RL steps.

    python benchmarks/boxes.py [TRACE …] [--parts 1 2 4 8 16]

Each step is coded with `banded`, every tensor of two dimensions cut along its last one (what a tensor-parallel engine
holds of the layers that it splits by input) or along its first. Every object is decoded again, to the same patch.
Prints JSON: bytes of all steps, and the share that cutting adds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from codec_sizes import SHIPPED, after_step, load_trace

import weightcast as wc
from weightcast.format.boxes import Box, Place, place_of
from weightcast.format.cut import columns, encode_cut
from weightcast.format.spec import TensorSpec


def rows(spec: TensorSpec, parts: int) -> list[Place]:
    if len(spec.shape) < 2:
        return columns(spec, 1)
    first, *rest = spec.shape
    edges = [first * i // parts for i in range(parts + 1)]
    found = [(begin, edges[i + 1] - begin) for i, begin in enumerate(edges[:-1]) if edges[i + 1] > begin]
    return [place_of(spec, Box.of([begin, *[0] * len(rest)], [size, *rest])) for begin, size in found]


def measure(trace: Path, parts: list[int]) -> dict[str, object]:
    weights, steps = load_trace(trace)
    kinds = {"columns": columns, "rows": rows}
    totals = {kind: dict.fromkeys(parts, 0) for kind in kinds}
    for step in steps:
        after = after_step(weights, step)
        patch = wc.diff(weights, after)
        for kind, cut in kinds.items():
            for number in parts:
                data = encode_cut(patch, {spec.name: cut(spec, number) for spec in weights.table}, old=weights)
                assert wc.decode(data, weights) == patch
                totals[kind][number] += len(data)
        weights = after
    whole = totals["columns"][parts[0]]
    added = {
        kind: {number: round(size / whole - 1, 4) for number, size in sizes.items()} for kind, sizes in totals.items()
    }
    return {"trace": trace.name, "bytes": totals, "added": added}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    given = parser.parse_args()
    print(json.dumps([measure(trace, given.parts) for trace in given.traces or sorted(SHIPPED.iterdir())], indent=1))


if __name__ == "__main__":
    main()
