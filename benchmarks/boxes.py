"""What it costs in bytes to cut tensors into boxes, for readers that hold columns of them, on recorded RL steps.

    python benchmarks/boxes.py [TRACE …] [--parts 1 2 4 8 16] [--groups 1]

Each step is coded with `banded`, every tensor of two dimensions cut along its last one (what a tensor-parallel engine
holds of the layers that it splits by input) or along its first. With ``--groups`` each part of columns is also cut into
so many groups of rows, as if its blocks were shorter. Every object is decoded again, to the same patch. Prints JSON:
bytes of all steps, of these the bytes of tables and blocks, and the share that cutting adds.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

from codec_sizes import SHIPPED, after_step, load_trace

import weightcast as wc

STREAMS = ("weightcast.table", "weightcast.blocks")


def stream_sizes(data: bytes) -> dict[str, int]:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    return {name: header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in STREAMS}


def cuts_of(table: wc.TensorTable, kind: str, number: int, groups: int) -> list[wc.Cut]:
    matrices = [spec.name for spec in table if len(spec.shape) > 1]
    if kind == "rows":
        return [wc.Cut(name, 0, number) for name in matrices]
    along = [(1, number), (0, groups)] if number > 1 else []
    return [wc.Cut(name, axis, parts) for name in matrices for axis, parts in along]


def measure(trace: Path, parts: list[int], groups: int) -> dict[str, object]:
    weights, steps = load_trace(trace)
    kinds = ("columns", "rows")
    totals = {kind: dict.fromkeys(parts, 0) for kind in kinds}
    streams = {kind: {number: dict.fromkeys(STREAMS, 0) for number in parts} for kind in kinds}
    for step in steps:
        after = after_step(weights, step)
        patch = wc.diff(weights, after)
        for kind in kinds:
            for number in parts:
                data = wc.encode(patch, old=weights, cut=cuts_of(weights.table, kind, number, groups))
                assert wc.decode(data, weights) == patch
                totals[kind][number] += len(data)
                for name, size in stream_sizes(data).items():
                    streams[kind][number][name] += size
        weights = after
    whole = totals["columns"][parts[0]]
    added = {
        kind: {number: round(size / whole - 1, 4) for number, size in sizes.items()} for kind, sizes in totals.items()
    }
    return {"trace": trace.name, "bytes": totals, "streams": streams, "added": added}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--groups", type=int, default=1)
    given = parser.parse_args()
    traces = given.traces or sorted(SHIPPED.iterdir())
    print(json.dumps([measure(trace, given.parts, given.groups) for trace in traces], indent=1))


if __name__ == "__main__":
    main()
