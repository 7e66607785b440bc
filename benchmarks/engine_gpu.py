"""What an engine's worker does with a patch on a GPU: stage, scatter, digest, through a learned layout.

    python benchmarks/engine_gpu.py [--changed 0.01]

A model of Qwen3-0.6B's size whose q/k/v and gate/up are fused as vLLM fuses them, with a loader in vLLM's way; vLLM
itself is not needed. All is verified: digests before the patch, those that staging promises, and those after it. Times
are medians; of the scatter by CUDA events. Prints JSON, and a table on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import numpy as np
import torch

import weightcast as wc
from weightcast.engine.box_digests import combine
from weightcast.engine.learn import learn
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Bits

HIDDEN, INNER, LAYERS, QUERIES, KEYS, VOCABULARY = 1024, 3072, 28, 2048, 1024, 151936
ROWS = {"q": QUERIES, "k": KEYS, "v": KEYS, "gate": INNER, "up": INNER}
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


class Held:
    """Weights of a table in memory."""

    def __init__(self, table: TensorTable, bits: dict[str, Bits]):
        self.table, self._bits = table, bits

    def read(self, name: str) -> Bits:
        return self._bits[name]


class Fused(torch.nn.Module):
    """The parameters of an engine."""

    def __init__(self, device: str):
        super().__init__()
        shapes = {"embed": (VOCABULARY, HIDDEN)}
        for layer in range(LAYERS):
            shapes |= {f"{name}_{layer}": (sum(ROWS[part] for part in parts), HIDDEN) for name, parts in FUSED.items()}
            shapes |= {f"o_{layer}": (HIDDEN, QUERIES), f"down_{layer}": (HIDDEN, INNER)}
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part, _, layer = name.partition(".")
            fused = next((one for one, parts in FUSED.items() if part in parts), None)
            if fused is None:
                self.get_parameter(f"{part}_{layer}" if layer else part).data.copy_(tensor)
                continue
            before = FUSED[fused][: FUSED[fused].index(part)]
            target = self.get_parameter(f"{fused}_{layer}").data
            target.narrow(0, sum(ROWS[one] for one in before), ROWS[part]).copy_(tensor)


def table_of() -> TensorTable:
    specs = [TensorSpec("embed", "BF16", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        specs += [TensorSpec(f"{part}.{layer}", "BF16", (rows, HIDDEN)) for part, rows in ROWS.items()]
        specs += [
            TensorSpec(f"o.{layer}", "BF16", (HIDDEN, QUERIES)),
            TensorSpec(f"down.{layer}", "BF16", (HIDDEN, INNER)),
        ]
    return TensorTable.of(specs)


def milliseconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def scattered(live: LiveParameters, prepared: Prepared) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    live.apply(prepared)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def must_be(live: LiveParameters, weights: Held, workers: wc.Workers) -> None:
    fingerprint = wc.fingerprint(weights, workers)
    for spec in weights.table:
        assert combine(spec, live.digest(spec)).digest == fingerprint[spec.name], spec.name


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--changed", type=float, default=0.01)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    wc.warm_up()
    rng, table, workers = np.random.default_rng(0), table_of(), wc.Workers()
    first = {spec.name: rng.integers(0, 1 << 16, spec.elements, np.uint16) for spec in table}
    second = {name: bits.copy() for name, bits in first.items()}
    for bits in second.values():
        bits[rng.choice(bits.size, int(bits.size * options.changed), replace=False)] ^= 1
    states = [Held(table, bits) for bits in (first, second)]
    model = Fused("cuda")
    tensors = {spec.name: torch.from_numpy(first[spec.name].view(np.int16)) for spec in table}
    model.load_weights((spec.name, tensors[spec.name].view(torch.bfloat16).reshape(spec.shape)) for spec in table)
    live = LiveParameters(model, learn(model, model.load_weights, table))
    assert not live.layout.unknown
    must_be(live, states[0], workers)
    stages, scatters, digests = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats + 1):
            old, new = states[turn % 2], states[1 - turn % 2]
            path = Path(folder) / f"{turn}.safetensors"
            wc.write_patch(old, new, path, codec="plain", workers=workers)
            found: list[Prepared] = []
            with FileSource(path) as source:
                reader = PatchReader(source)
                stages.append(milliseconds(lambda: found.append(live.prepare_patches([reader]))))  # noqa: B023
                promised = {row.spec.name: row.digest for row in reader.rows}
            for name, boxes in found[0].digests.items():
                assert combine(table[name], boxes).digest == promised[name]
            scatters.append(scattered(live, found[0]))
            digests.append(milliseconds(lambda: [live.digest(spec) for spec in table]))
            must_be(live, new, workers)
    result = {
        "parameters": table.elements,
        "changed": found[0].changed,
        "staged_bytes": found[0].nbytes,
        "stage_ms": median(stages[1:]),
        "scatter_ms": median(scatters[1:]),
        "live_digest_ms": median(digests[1:]),
    }
    print(json.dumps(result))
    print("| | ms |\n|---|---|", file=sys.stderr)
    for name in ("stage_ms", "scatter_ms", "live_digest_ms"):
        print(f"| {name.removesuffix('_ms')} | {result[name]:.2f} |", file=sys.stderr)


if __name__ == "__main__":
    main()
