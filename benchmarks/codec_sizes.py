"""Sizes and speeds of the codecs on recorded traces, in one run, against memcpy and against other systems.

    python benchmarks/codec_sizes.py [TRACE ...]      the traces in benchmarks/data, or those named

A trace is a folder with `anchor.safetensors` and, per training step, `step-NN.safetensors` that holds
`NAME.indices` and `NAME.values`: overwrites of the tensors before it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from peers import ENCODINGS

from weightcast.disk.checkpoint import Checkpoint
from weightcast.errors import CheckpointError, UsageError
from weightcast.format.codec import CODECS
from weightcast.format.diff import diff
from weightcast.format.digest import Fingerprint, fingerprint
from weightcast.format.joined import decode
from weightcast.format.patch import Patch
from weightcast.format.patchfile import PatchReader, encode
from weightcast.format.safetensors import BytesSource
from weightcast.format.tensors import Arrays, Bits
from weightcast.format.workers import Workers

REPEATS = 5
SHIPPED = Path(__file__).parent / "data"


def best_of(action: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The shortest of a few runs, in seconds: the one least disturbed."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)


@dataclass
class CodecTotals:
    """Sums over a trace: bytes, and times by number of threads."""

    nbytes: int = 0
    overhead: int = 0
    encode_seconds: dict[int, float] = field(default_factory=dict)
    apply_seconds: dict[int, float] = field(default_factory=dict)
    exact: bool = True


def load_trace(folder: Path) -> tuple[Arrays, list[Path]]:
    """The weights before the first step, and the steps."""
    steps = sorted(folder.glob("step-*.safetensors"))
    if not steps or not (folder / "anchor.safetensors").exists():
        raise CheckpointError("no trace here: it needs anchor.safetensors and step-NN.safetensors", file=str(folder))
    with Checkpoint(folder / "anchor.safetensors") as anchor:
        return Arrays.copy_of(anchor), steps


def after_step(before: Arrays, step: Path) -> Arrays:
    """The weights after one recorded step."""
    after = Arrays.copy_of(before)
    with Checkpoint(step) as changes:
        for spec in before.table:
            names = f"{spec.name}.indices", f"{spec.name}.values"
            if any(name not in changes.table for name in names):
                raise UsageError("the step has no changes of this tensor", file=str(step), tensor=spec.name)
            indices, values = (changes.read(name) for name in names)
            signed = np.int32 if changes.table[names[0]].dtype == "I32" else np.int64
            after.read(spec.name)[indices.view(signed)] = values
    return after


def bench_codecs(trace: Path, thread_counts: tuple[int, ...]) -> dict[str, Any]:
    """Apply a trace step by step with every codec; one dictionary of facts."""
    weights, steps = load_trace(trace)
    totals = {name: CodecTotals() for name in CODECS}
    other_bytes: dict[str, int | None] = dict.fromkeys(ENCODINGS, 0)
    changed, copy_seconds = 0, 0.0
    for step in steps:
        after = after_step(weights, step)
        copy_seconds += memcpy_seconds(after)
        held = fingerprint(weights)
        patch = diff(weights, after, held)
        changed += patch.changed
        for name, total in totals.items():
            _measure(name, total, weights, after, held, patch, thread_counts)
        _measure_others(other_bytes, patch, weights, after)
        weights = after
    if not changed:
        raise CheckpointError("nothing changes in this trace", file=str(trace))
    return {
        "trace": trace.name,
        "steps": len(steps),
        "elements": weights.table.elements,
        "changed": changed,
        "density": changed / weights.table.elements / len(steps),
        "memcpy_gigabytes_per_second": weights.table.nbytes * len(steps) / copy_seconds / 1e9,
        "codecs": {name: _facts(total, changed, copy_seconds) for name, total in totals.items()},
        "others_bits_per_change": {
            name: None if nbytes is None else 8 * nbytes / changed for name, nbytes in other_bytes.items()
        },
    }


def memcpy_seconds(weights: Arrays) -> float:
    """Time to copy all tensors once, on one thread."""
    sources = [weights.read(spec.name) for spec in weights.table]
    copies = [np.ones_like(bits) for bits in sources]

    def copy() -> None:
        for to, bits in zip(copies, sources, strict=True):
            np.copyto(to, bits)

    return best_of(copy)


def _measure(
    codec: str,
    total: CodecTotals,
    old: Arrays,
    new: Arrays,
    held: Fingerprint,
    patch: Patch,
    thread_counts: tuple[int, ...],
) -> None:
    data = encode(patch, codec, old)
    total.nbytes += len(data)
    total.overhead += PatchReader(BytesSource(data)).overhead
    target = Arrays.copy_of(old)
    reached = decode(data, target).apply(target, held)
    total.exact &= reached.digest == patch.result == fingerprint(target).digest and _same_bits(target, new)
    for threads in thread_counts:
        with Workers(threads) as workers:
            took = best_of(lambda: encode(diff(old, new, held, workers), codec, old, workers))
            total.encode_seconds[threads] = total.encode_seconds.get(threads, 0) + took
            took = best_of(lambda: decode(data, old, workers).apply(target, held))  # the same bits once more
            total.apply_seconds[threads] = total.apply_seconds.get(threads, 0) + took


def _same_bits(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(a.read(spec.name), b.read(spec.name)) for spec in a.table)


def _measure_others(nbytes: dict[str, int | None], patch: Patch, old: Arrays, new: Arrays) -> None:
    for tensor in patch.tensors:
        before: Bits = old.read(tensor.spec.name)
        after: Bits = new.read(tensor.spec.name)
        for name, measure in ENCODINGS.items():
            so_far = nbytes[name]
            try:
                nbytes[name] = None if so_far is None else so_far + measure(before, after, tensor.indices)
            except ModuleNotFoundError:  # zstandard: said so in the table
                nbytes[name] = None


def _facts(total: CodecTotals, changed: int, copy_seconds: float) -> dict[str, Any]:
    def multiples(seconds: dict[int, float]) -> dict[str, float]:
        return {str(threads): took / copy_seconds for threads, took in seconds.items()}

    return {
        "bits_per_change": 8 * total.nbytes / changed,
        "bytes": total.nbytes,
        "overhead_bytes": total.overhead,
        "encode_memcpys_by_threads": multiples(total.encode_seconds),
        "decode_apply_memcpys_by_threads": multiples(total.apply_seconds),
        "bit_exact": total.exact,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    traces = parser.parse_args().traces or sorted(path for path in SHIPPED.iterdir() if path.is_dir())
    cores = len(os.sched_getaffinity(0))
    results = [bench_codecs(trace, (1, cores) if cores > 1 else (1,)) for trace in traces]
    print(json.dumps({"traces": results}, indent=1))
    return 0 if all(codec["bit_exact"] for result in results for codec in result["codecs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
