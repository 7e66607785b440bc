"""What an engine's worker does with a version on a GPU: decode and stage, scatter, digest, through a learned layout.

    python benchmarks/engine_gpu.py [--changed 0.01] [--codec banded] [--layers 28]

A model of Qwen3-0.6B's size whose q/k/v and gate/up are fused as vLLM fuses them, with a loader in vLLM's way; vLLM
itself is not needed. `stage` is from the coded bytes to writes that are ready; `stage_plain` is the mirror's way, from
a staged `plain` patch. All is verified: digests before, those that staging promises, and those after it. Times
are medians in ms, of the scatter by CUDA events; the floors are measured in the same run. Runs on a CPU where there is
no GPU. Prints JSON, and a table on standard error.
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
from weightcast.engine.decoding import prepare_coded
from weightcast.engine.learn import learn
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.format.joined import joined, open_objects
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource, FileSource
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


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return 1000 * (time.perf_counter() - began)


def on_device(work: Callable[[], object]) -> float:
    """Milliseconds by CUDA events, where there is a GPU."""
    if not torch.cuda.is_available():
        return milliseconds(work)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def must_be(live: LiveParameters, weights: Held, workers: wc.Workers) -> None:
    fingerprint, found = wc.fingerprint(weights, workers), live.digest_each(list(weights.table))
    for spec in weights.table:
        assert combine(spec, found[spec.name]).digest == fingerprint[spec.name], spec.name


def must_promise(prepared: Prepared, reader: PatchReader) -> None:
    digests = prepared.digests
    for row in reader.rows:
        assert combine(row.spec, digests[row.spec.name]).digest == row.digest, row.spec.name


def floors(model: torch.nn.Module, changed: int) -> dict[str, float]:
    """What the device takes to read the parameters once, and torch to write as many elements of one flat tensor."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(one.numel() for one in parameters), dtype=torch.int16, device=parameters[0].device)
    where = torch.randperm(flat.numel(), device=flat.device)[:changed].sort().values
    values = torch.zeros(changed, dtype=torch.int16, device=flat.device)
    copies = [torch.empty_like(one) for one in parameters]

    def read() -> None:
        for copy, one in zip(copies, parameters, strict=True):
            copy.copy_(one)

    return {
        "copy_of_the_parameters_ms": min(on_device(read) for _ in range(5)),
        "index_copy_ms": min(on_device(lambda: flat.index_copy_(0, where, values)) for _ in range(5)),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--changed", type=float, default=0.01)
    arguments.add_argument("--codec", choices=("banded", "gap"), default="banded")
    arguments.add_argument("--layers", type=int, default=LAYERS)
    arguments.add_argument("--vocabulary", type=int, default=VOCABULARY)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    globals().update(LAYERS=options.layers, VOCABULARY=options.vocabulary)
    wc.warm_up()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng, table, workers = np.random.default_rng(0), table_of(), wc.Workers()
    # Weights as they are after training: bits at random have every exponent.
    first = {spec.name: normal(rng, spec.elements) for spec in table}
    second = {name: bits.copy() for name, bits in first.items()}
    for bits in second.values():
        bits[rng.choice(bits.size, int(bits.size * options.changed), replace=False)] ^= 1
    states = [Held(table, bits) for bits in (first, second)]
    coded = [
        wc.encode(wc.diff(old, new, workers=workers), options.codec, old, workers=workers)
        for old, new in (states, states[::-1])
    ]
    model = Fused(device)
    tensors = {spec.name: torch.from_numpy(first[spec.name].view(np.int16)) for spec in table}
    model.load_weights((spec.name, tensors[spec.name].view(torch.bfloat16).reshape(spec.shape)) for spec in table)
    live = LiveParameters(model, learn(model, model.load_weights, table))
    assert not live.layout.unknown
    must_be(live, states[0], workers)
    times: dict[str, list[float]] = {name: [] for name in ("stage", "stage_plain", "scatter", "live_digest")}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats + 1):
            old, new = states[turn % 2], states[1 - turn % 2]
            path = Path(folder) / f"{turn}.safetensors"
            wc.write_patch(old, new, path, codec="plain", workers=workers)
            found: list[Prepared] = []
            with FileSource(path) as source:
                reader = PatchReader(source)
                times["stage_plain"].append(milliseconds(lambda: found.append(live.prepare_patches([reader]))))  # noqa: B023
                must_promise(found.pop(), reader)
            version = joined(open_objects([BytesSource(coded[turn % 2])]))

            def stage() -> None:
                decoded = prepare_coded(live, [version], workers=workers)  # noqa: B023
                assert not decoded.undecoded
                found.append(decoded.prepared)  # noqa: B023

            times["stage"].append(milliseconds(stage))
            must_promise(found[0], PatchReader(BytesSource(coded[turn % 2])))
            times["scatter"].append(on_device(lambda: live.apply(found[0])))  # noqa: B023
            times["live_digest"].append(milliseconds(lambda: live.digest_each(list(table))))
            must_be(live, new, workers)
    medians = {f"{name}_ms": median(values[1:]) for name, values in times.items()}
    result = {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "no GPU",
        "parameters": table.elements,
        "changed": found[0].changed,
        "coded_bytes": len(coded[0]),
        "staged_bytes": found[0].nbytes,
        **medians,
        **floors(model, found[0].changed),
    }
    print(json.dumps(result))
    print("| | ms |\n|---|---|", file=sys.stderr)
    for name, value in result.items():
        if name.endswith("_ms"):
            print(f"| {name.removesuffix('_ms')} | {value:.2f} |", file=sys.stderr)


def normal(rng: np.random.Generator, size: int) -> Bits:
    """Weights of a trained model's size, in bf16."""
    values = rng.standard_normal(size, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


if __name__ == "__main__":
    main()
