"""An engine of two workers in this process, and a trainer whose channel it follows. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from cases import Bag
from changes import changed
from sharded_engine import SHAPES, Engine, Stream, stream, weights_of

import weightcast as wc
from weightcast.disk.checkpoint import save
from weightcast.engine.agent import Agent
from weightcast.engine.client import read_answers
from weightcast.engine.learn import learn
from weightcast.engine.messages import ApplyUpdate, Request
from weightcast.engine.proof import prove
from weightcast.engine.protocol import encode, kind_of
from weightcast.engine.worker import EngineWorker

A = TypeVar("A")
RANKS = (0, 1)


class Local:
    """Two workers, started with some weights, perhaps from a folder of them.

    ``packed``: it reorders a parameter after loading. ``skips``: its loader ignores that tensor. ``traceable=False``:
    its loader cannot be traced. ``cannot_reload``: why it refuses to reload. ``available``: bytes of free host memory.
    ``calls`` lists the kinds of all requests, and the calls to the engine itself. While ``loader_error`` is set, its
    loader raises it.
    """

    url = "a test"

    def __init__(
        self,
        weights: Bag,
        folder: Path | None = None,
        *,
        packed: bool = False,
        skips: str | None = None,
        traceable: bool = True,
        cannot_reload: str | None = None,
        available: Callable[[], int] | None = None,
    ):
        self.calls: list[str] = []
        self.paused = False
        self.served: str = "default"
        self.loader_error: Exception | None = None
        self.models: list[torch.nn.Module] = []
        self.workers: list[EngineWorker] = []
        self._packed, self._skips, self._traceable = packed, skips, traceable
        self._cannot_reload, self._available = cannot_reload, available
        self.restart(weights, folder)

    def restart(self, weights: Bag, folder: Path | None = None) -> None:
        """Other processes under the same address: they know nothing of what was before."""
        self.models, self.workers = [], []
        self.paused, self.served = False, "default"
        for rank in RANKS:
            shard = Engine(rank, len(RANKS))
            model = shard.make()
            shard.load(model, stream(weights))
            if self._packed:
                pack(model)
            self.models.append(model)
            self.workers.append(self._worker(shard, model, folder, rank))

    def _worker(self, shard: Engine, model: torch.nn.Module, folder: Path | None, rank: int) -> EngineWorker:
        def load(given: Stream) -> None:
            kept = ((name, x) for name, x in given if name != self._skips)
            shard.load(model, kept if self._traceable else ((name, _through_numpy(x)) for name, x in kept))

        def reload(given: Stream) -> None:
            assert self._cannot_reload is None
            self.calls.append(f"reload {rank}")
            if self.loader_error is not None:
                raise self.loader_error
            if self._packed:
                pack(model)  # it is its own inverse
            load(given)
            if self._packed:
                pack(model)

        return EngineWorker(
            model,
            lambda table: learn(model, load, table),
            reload,
            str(folder or "nowhere"),
            rank,
            len(RANKS),
            lambda: self._cannot_reload,
            self._available,
        )

    def ask(self, request: Request[A]) -> list[A]:
        self.calls.append(kind_of(type(request)))
        return read_answers(request, self.exchange(encode(request)), self.url)

    def exchange(self, text: str) -> Iterable[str]:
        """A request to all workers, and their answers, as they are on the wire."""
        return [one.answer(text) for one in self.workers]

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, clear_cache: bool) -> None:
        self.calls.append("pause")
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def update(self, update: ApplyUpdate) -> None:
        assert self.paused
        self.calls.append("update")
        for one in self.workers:
            one.apply(encode(update))

    def finish(self, version: str | None) -> None:
        self.calls.append("finish")
        self.served = self.served if version is None else version

    def name_version(self, version: str) -> None:
        self.served = version


def pack(model: torch.nn.Module) -> None:
    """What an engine may do to a parameter after loading it."""
    with torch.no_grad():
        model.gate_up.copy_(model.gate_up.flip(0))


def _through_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a tensor without memory cannot have."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(raw.copy()).view(tensor.dtype).reshape(tensor.shape)


def saved(weights: wc.Weights, folder: Path) -> Path:
    folder.mkdir()
    save(weights, folder)
    return folder


class Training:
    """A trainer and its channel."""

    def __init__(self, folder: Path):
        self.url = str(folder / "channel")
        self.weights = weights_of(SHAPES)
        self._publisher = wc.Publisher(self.url, self.weights)

    def step(self, seed: int, names: set[str] | None = None, density: float = 0.05) -> int:
        """Change some weights and publish them; the version."""
        new = changed(self.weights, density, seed, names)
        for spec in new.table:
            self.weights.write(spec.name, new.read(spec.name))
        return self._publisher.publish().result(60).position.version

    def close(self) -> None:
        self._publisher.close()


def other_weights() -> Bag:
    """Of the same table as the trainer's, and of no version."""
    return changed(weights_of(SHAPES), 0.5, 99)


def attached(training: Training, engine: Local, tmp_path: Path, **options: Any) -> Agent:
    return Agent(training.url, engine, tmp_path / "mirror", **options)


def must_be(engine: Local, agent: Agent, version: int) -> None:
    """The engine serves exactly that version's bits."""
    proof = prove(engine, agent.subscriber.chain)
    assert (proof.version, dict(proof.wrong), dict(proof.unproven)) == (version, {}, {})
    assert proof.holds
    assert engine.served == str(version)
    assert not engine.paused
