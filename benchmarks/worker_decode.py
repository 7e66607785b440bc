"""From coded bytes to writes that are ready: a worker decodes itself, or a mirror does and hands it `plain` patches.

    python benchmarks/worker_decode.py [--scale 0.25] [--workers 2] [--threads 1 2]

A model of Qwen3-0.6B's shapes with a part of its layers and vocabulary, fused as vLLM fuses it, and one worker of those
that share it; what they hold of a tensor is coded in boxes. Weights make one step of an optimizer, seeded. Times are
multiples of one memcpy of what the worker holds, on one thread, in the same run. The mirror's weights are in memory,
its file is written to --folder and synced. What was prepared is applied and compared. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from codec_sizes import REPEATS, best_of
from engine_gpu import FUSED, HIDDEN, INNER, LAYERS, QUERIES, ROWS, VOCABULARY
from speed import synthesise

import weightcast as wc
from weightcast.disk.staged import stage
from weightcast.engine.cuts import cuts_of
from weightcast.engine.decoding import prepare_coded
from weightcast.engine.layout import Part
from weightcast.engine.learn import learn
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.format.joined import joined, open_objects
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource, FileSource

AXES = {"o": 1, "down": 1}
"""The dimension that workers share a tensor along; the first, if it is not named here."""


class Worker(torch.nn.Module):
    """The parameters of the first of some workers that share a model, with a loader in vLLM's way."""

    def __init__(self, layers: int, vocabulary: int, workers: int):
        super().__init__()
        self._workers = workers
        shapes = {"embed": (vocabulary // workers, HIDDEN)}
        for layer in range(layers):
            for name, parts in FUSED.items():
                shapes[f"{name}_{layer}"] = (sum(ROWS[part] for part in parts) // workers, HIDDEN)
            shapes |= {f"o_{layer}": (HIDDEN, QUERIES // workers), f"down_{layer}": (HIDDEN, INNER // workers)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part, _, layer = name.partition(".")
            axis = AXES.get(part, 0)
            mine = tensor.narrow(axis, 0, tensor.shape[axis] // self._workers)
            fused = next((one for one, parts in FUSED.items() if part in parts), None)
            target = self.get_parameter(f"{fused or part}_{layer}" if layer else part).data
            if fused is not None:
                before = FUSED[fused][: FUSED[fused].index(part)]
                target = target.narrow(0, sum(ROWS[one] for one in before) // self._workers, mine.shape[0])
            target.copy_(mine)


def shapes_of(layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"{part}.{layer}": (rows, HIDDEN) for part, rows in ROWS.items()}
        shapes |= {f"o.{layer}": (HIDDEN, QUERIES), f"down.{layer}": (HIDDEN, INNER)}
    return shapes


def load(model: Worker, weights: wc.Arrays) -> None:
    tensors = {spec.name: torch.from_numpy(weights.read(spec.name).view(np.int16)) for spec in weights.table}
    model.load_weights(
        (spec.name, tensors[spec.name].view(torch.bfloat16).reshape(spec.shape)) for spec in weights.table
    )


def prepared_once(live: LiveParameters, prepare: Callable[[], Prepared], old: wc.Arrays, new: wc.Arrays) -> bool:
    """Whether what was prepared leads to the digests of ``new``; the old weights are back afterwards."""
    before = {part: live.read(part).copy() for part in live.layout}
    digests = dict(live.digests)
    prepared = prepare()
    live.apply(prepared)
    is_right = bool(prepared.boxes) and all(
        live.digest_of_part(part, live.layout.table[part.name]).digest == box.digest
        for part, box in prepared.boxes.items()
    )
    is_right = is_right and all(np.array_equal(live.read(part), wanted(part, new)) for part in live.layout)
    for part, bits in before.items():
        live.write(part, bits)
    live.digests.update(digests)
    return is_right and all(np.array_equal(live.read(part), wanted(part, old)) for part in live.layout)


def wanted(part: Part, weights: wc.Arrays) -> np.ndarray:
    within = tuple(slice(one.start, one.last + 1, one.step) for one in part.box.ranges)
    tensor = weights.read(part.name).reshape(weights.table[part.name].shape)
    return np.ascontiguousarray(tensor[within]).reshape(-1)


def memcpy_of(live: LiveParameters) -> float:
    sources = [live.read(part) for part in live.layout]
    copies = [np.ones_like(bits) for bits in sources]

    def copy() -> None:
        for to, bits in zip(copies, sources, strict=True):
            np.copyto(to, bits)

    return best_of(copy)


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, object]:
    layers = max(1, round(LAYERS * chosen.scale))
    vocabulary = max(64, round(VOCABULARY * chosen.scale) // 64 * 64)
    old, new = synthesise(shapes_of(layers, vocabulary))
    model = Worker(layers, vocabulary, chosen.workers)
    layout = learn(model, model.load_weights, old.table)
    load(model, old)
    live = LiveParameters(model, layout)
    for spec in old.table:
        live.digest(spec)
    fingerprint, copy = wc.fingerprint(old), memcpy_of(live)
    patch = wc.diff(old, new, fingerprint)
    found: dict[str, object] = {}
    for codec in ("gap", "banded"):
        data = wc.encode(patch, codec, old, cut=cuts_of(layout))
        found[codec] = {
            threads: measure_ways(live, data, old, new, folder, threads, copy) for threads in chosen.threads
        }
    return {
        "elements": old.table.elements,
        "held_elements": sum(part.box.elements for part in layout),
        "density": patch.changed / old.table.elements,
        "memcpy_seconds": copy,
        "memcpys_by_codec_and_threads": found,
    }


def measure_ways(
    live: LiveParameters, data: bytes, old: wc.Arrays, new: wc.Arrays, folder: Path, threads: int, copy: float
) -> dict[str, object]:
    fingerprint, path = wc.fingerprint(old), folder / "staged.safetensors"

    def decode() -> Prepared:
        found = prepare_coded(live, [joined(open_objects([BytesSource(data)]))], workers=workers)
        assert not found.undecoded, found.undecoded
        return found.prepared

    def stage_plain() -> None:
        path.unlink(missing_ok=True)
        stage(joined(open_objects([BytesSource(data)])), old, fingerprint, path, workers)

    def prepare_plain() -> Prepared:
        with FileSource(path) as source:
            return live.prepare_patches([PatchReader(source)])

    with wc.Workers(threads) as workers:
        times = {
            "worker_decodes": best_of(decode, REPEATS) / copy,
            "mirror_stages": best_of(stage_plain, REPEATS) / copy,
            "worker_prepares_plain": best_of(prepare_plain, REPEATS) / copy,
        }
        exact = prepared_once(live, decode, old, new) and prepared_once(live, prepare_plain, old, new)
    ratio = (times["mirror_stages"] + times["worker_prepares_plain"]) / times["worker_decodes"]
    return {**times, "ratio": ratio, "bit_exact": exact}


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--scale", type=float, default=0.25)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--folder", type=Path, default=None)
    chosen = options.parse_args(arguments)
    wc.warm_up()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        print(json.dumps(measure(chosen, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
