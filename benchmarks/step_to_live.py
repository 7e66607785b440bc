"""From the optimizer's step to live: publisher, channel in memory, an engine's worker and a mirror, by phase.

    python benchmarks/step_to_live.py [--size 0.6B|7.6B|tiny] [--lr 1e-6] [--steps 8] [--threads 16]

A bf16 model of Qwen3's shapes with random gradients, AdamW, a channel and a mirror in /dev/shm, a worker with vLLM's
fused layout that decodes against its own parameters. On a GPU where there is one: `publish` is then what the trainer's
thread waits for, and what it leaves to the GPU is a phase of its own. `live` is the sum of all phases but the mirror's,
which follows beside. What the worker stages is compared with the version by digest before it is written; at the end
every bit of the worker and of the mirror is. Prints JSON: medians and maxima in ms, what changed, and beside them the
time of one copy of the model in host memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import engine_gpu as shapes
import numpy as np
import torch

import weightcast as wc
from weightcast.channel.keys import Position
from weightcast.engine.box_digests import combine
from weightcast.engine.decoding import prepare_coded
from weightcast.engine.engine_replica import EngineReplica, StagedCoded
from weightcast.engine.learn import learn
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.format.joined import joined, open_objects
from weightcast.format.safetensors import ReopenedSource
from weightcast.format.spec import TensorTable

SIZES = {
    "tiny": {"HIDDEN": 128, "INNER": 384, "LAYERS": 4, "QUERIES": 256, "KEYS": 128, "VOCABULARY": 8192},
    "0.6B": {},
    "7.6B": {"HIDDEN": 4096, "INNER": 12288, "LAYERS": 36, "QUERIES": 4096, "KEYS": 1024},
}


class Trainer(torch.nn.Module):
    """A model with the tensors of a table."""

    def __init__(self, table: TensorTable, device: str):
        super().__init__()
        for spec in table:
            head, _, leaf = spec.name.partition(".")
            parameter = torch.nn.Parameter((torch.randn(spec.shape, device=device) * 0.02).bfloat16())
            if not leaf:
                self.register_parameter(head, parameter)
                continue
            if not hasattr(self, head):
                self.add_module(head, torch.nn.Module())
            getattr(self, head).register_parameter(leaf, parameter)


@dataclass
class Times:
    """Milliseconds of each phase, over the steps."""

    cuda: bool
    phases: dict[str, list[float]] = field(default_factory=dict)
    _last: float = 0.0

    def begin(self) -> None:
        self._wait()
        self._last = time.perf_counter()

    def end(self, phase: str, wait: bool = True) -> None:
        if wait:
            self._wait()
        now = time.perf_counter()
        self.phases.setdefault(phase, []).append(1000 * (now - self._last))
        self._last = now

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def resize(size: str) -> TensorTable:
    for name, value in SIZES[size].items():
        setattr(shapes, name, value)
    shapes.ROWS.update(q=shapes.QUERIES, k=shapes.KEYS, v=shapes.KEYS, gate=shapes.INNER, up=shapes.INNER)
    return shapes.table_of()


def copy_rate(nbytes: int) -> float:
    """Bytes per ms of a copy of the model in host memory on one thread, counting what is read."""
    source, target = np.ones(min(nbytes, 1 << 30), np.uint8), np.empty(min(nbytes, 1 << 30), np.uint8)
    best = min(_timed(source, target) for _ in range(3))
    return source.size / best


def _timed(source: np.ndarray, target: np.ndarray) -> float:
    began = time.perf_counter()
    target[:] = source
    return 1000 * (time.perf_counter() - began)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = resize(options.size)
    torch.manual_seed(0)
    model = Trainer(table, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    engine = shapes.Fused(device)
    engine.load_weights((name, parameter.detach()) for name, parameter in model.named_parameters())
    times, commits = Times(device == "cuda"), []
    url, replica = folder / "channel", EngineReplica(folder / "engine")
    target: Any = replica  # neither weights in memory nor a mirror
    with ExitStack() as opened:
        publisher = opened.enter_context(wc.Publisher(url, model, optimizer=optimizer, threads=options.threads))
        mirror = opened.enter_context(wc.Subscriber(url, folder / "mirror", threads=options.threads))
        mirror.sync()
        worker = opened.enter_context(wc.Subscriber(url, target))
        workers = opened.enter_context(wc.Workers(options.threads))
        live = LiveParameters(engine, learn(engine, engine.load_weights, table))
        live.digest_each(list(table))
        replica.hold(*held(mirror))
        for step in range(1, options.steps + 1):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            times.begin()
            receipt = publisher.publish(step=step)
            times.end("publish", wait=False)
            times.end("publish: the GPU's work after it")
            commits.append(receipt.result())
            times.end("commit")
            coded = worker.poll()
            assert isinstance(coded, StagedCoded)
            times.end("worker: fetch")
            prepared = decoded(live, coded, workers)
            times.end("worker: decode, verify, stage")
            live.apply(prepared)
            times.end("worker: scatter")
            worker.apply(coded)
            times.begin()
            staged = mirror.poll()
            assert staged is not None
            times.end("mirror: fetch, decode, verify, stage")
            mirror.apply(staged)
            times.end("mirror: apply")
        weights, found = mirror.weights, live.digest_each(list(table))
        assert weights is not None
        assert isinstance(coded, StagedCoded)
        exact = wc.fingerprint(weights, workers).digest == coded.position.digest
        exact &= all(combine(one, found[one.name]).digest == coded.fingerprint[one.name] for one in table)
    steps = [phase for phase in times.phases if not phase.startswith("mirror")]
    times.phases["live"] = [sum(each) for each in zip(*(times.phases[phase] for phase in steps), strict=True)]
    counted = slice(options.warm, None)  # the first versions fill caches
    return {
        "hardware": f"{platform.machine()}, {torch.cuda.get_device_name() if device == 'cuda' else 'no GPU'}",
        "parameters": table.elements,
        "threads": options.threads,
        "changed": median(commit.changed for commit in commits[counted]) / table.elements,
        "bytes": median(commit.nbytes for commit in commits[counted]),
        "milliseconds": {name: round(median(values[counted]), 1) for name, values in times.phases.items()},
        "most": {name: round(max(values[counted]), 1) for name, values in times.phases.items()},
        "copy_of_the_model_ms": round(table.nbytes / copy_rate(table.nbytes), 1),
        "every_bit_proven": exact,
    }


def held(mirror: wc.Subscriber) -> tuple[Position, wc.Fingerprint]:
    weights, position = mirror.weights, mirror.position
    assert weights is not None
    assert position is not None
    return position, wc.fingerprint(weights)


def decoded(live: LiveParameters, coded: StagedCoded, workers: wc.Workers) -> Prepared:
    """What a worker prepares, once its digests are those of the version."""
    versions = [joined(open_objects(map(ReopenedSource, map(Path, paths)))) for paths in coded.versions]
    found = prepare_coded(live, versions, workers=workers)
    assert not found.undecoded
    for name, boxes in found.prepared.digests.items():
        assert combine(live.layout.table[name], boxes).digest == coded.fingerprint[name], name
    return found.prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2, help="steps that do not count")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
