"""An engine of a few workers in this process, and a trainer whose channel it follows. No vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import Bag
from changes import changed
from sharded_engine import SHAPES, Engine, Stream, stream, weights_of

import weightcast as wc
from weightcast.disk.checkpoint import save
from weightcast.engine.agent import Agent
from weightcast.engine.client import LocalEngine
from weightcast.engine.control import Control
from weightcast.engine.learn import learn
from weightcast.engine.proof import prove
from weightcast.engine.worker import EngineWorker

RANKS = 2
"""Workers, unless a test wants another number."""


class Local(LocalEngine):
    """Some workers, started with some weights, perhaps from a folder of them.

    ``packed``: it reorders a parameter after loading. ``skips``: its loader ignores that tensor. ``traceable=False``:
    its loader cannot be traced. ``cannot_reload``: why it refuses to reload. ``available``: bytes of free host memory.
    ``calls`` lists the kinds of all requests to workers, and the calls to the engine itself; ``requests`` has those to
    workers whole. While ``loader_error`` is set, its loader raises it.
    """

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
        ranks: int = RANKS,
    ):
        self._ranks = ranks
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.paused = False
        self.served: str = "default"
        self.loader_error: Exception | None = None
        self.models: list[torch.nn.Module] = []
        self.workers: list[EngineWorker] = []
        self._packed, self._skips, self._traceable = packed, skips, traceable
        self._cannot_reload, self._available = cannot_reload, available
        super().__init__(Control(Host(self), "a test"))
        self.restart(weights, folder)

    def restart(self, weights: Bag, folder: Path | None = None, *, packed: bool | None = None) -> None:
        """Other processes under the same address: they know nothing of what was before."""
        self._packed = self._packed if packed is None else packed
        self.models, self.workers = [], []
        self.paused, self.served = False, "default"
        self._control = Control(Host(self), self.url)  # of another process, too
        for rank in range(self._ranks):
            shard = Engine(rank, self._ranks)
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
            self._ranks,
            lambda: self._cannot_reload,
            self._available,
            moved={"gate_up"} if self._packed else (),
        )

    @property
    def control(self) -> Control:
        """As in the engine's own process."""
        return self._control

    def other(self) -> LocalEngine:
        """The same engine, as another agent reaches it."""
        return LocalEngine(self._control)

    def exchange(self, text: str) -> list[str]:
        """A request to all workers, and their answers, as they are on the wire."""
        self.requests.append(json.loads(text))
        self.calls.append(self.requests[-1]["kind"])
        return [one.answer(text) for one in self.workers]

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def clear_caches(self) -> None:
        assert self.paused
        self.calls.append("clear")

    def name_version(self, version: str) -> None:
        self.calls.append("name")
        self.served = version


class Host:
    """A `Local` as its own process reaches it. Tests replace methods of the `Local`."""

    def __init__(self, local: Local):
        self._local = local

    def exchange(self, text: str) -> list[str]:
        return self._local.exchange(text)

    def is_paused(self) -> bool:
        return self._local.paused

    def pause(self) -> None:
        self._local.pause()

    def resume(self) -> None:
        self._local.resume()

    def clear_caches(self) -> None:
        self._local.clear_caches()

    def served(self) -> str:
        return self._local.served

    def name_version(self, version: str) -> None:
        self._local.name_version(version)


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

    def __init__(self, folder: Path, **options: Any):
        self.url = str(folder / "channel")
        self.weights = weights_of(SHAPES)
        self._publisher = wc.Publisher(self.url, self.weights, **options)

    def step(self, seed: int, names: set[str] | None = None, density: float = 0.05) -> int:
        """Change some weights and publish them; the version."""
        self.change(seed, names, density)
        return self.publish()

    def change(self, seed: int, names: set[str] | None = None, density: float = 0.05) -> None:
        new = changed(self.weights, density, seed, names)
        for spec in new.table:
            self.weights.write(spec.name, new.read(spec.name))

    def publish(self) -> int:
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
