"""Two engine workers in this process, and a trainer whose channel they follow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from cases import Bag
from changes import changed
from sharded_engine import SHAPES, Engine, stream, weights_of

import weightcast as wc
from weightcast.engine.agent import Agent
from weightcast.engine.client import refuse_errors
from weightcast.engine.learn import learn
from weightcast.engine.proof import prove
from weightcast.engine.worker import EngineWorker


class Local:
    """Two workers, started with some weights, perhaps from a folder of them."""

    url = "a test"

    def __init__(self, weights: Bag, folder: Path | None = None, packed: bool = False):
        self.calls: list[str] = []
        self.paused = False
        self.served: str = "default"
        self.models, self.workers = [], []
        for rank in (0, 1):
            engine = Engine(rank)
            model = engine.make()
            engine.load(model, stream(weights))
            if packed:
                _pack(model)
            self.models.append(model)
            self.workers.append(self._worker(engine, model, folder, packed, rank))

    def _worker(
        self, engine: Engine, model: torch.nn.Module, folder: Path | None, packed: bool, rank: int
    ) -> EngineWorker:
        def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
            engine.load(model, given)

        def reload(given: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.calls.append(f"reload {rank}")
            if packed:
                _pack(model)  # it is its own inverse
            load(given)
            if packed:
                _pack(model)

        return EngineWorker(
            model, lambda table: learn(model, load, table), reload, str(folder or "nowhere"), rank, len((0, 1))
        )

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(request["do"])
        answers = [json.loads(one.answer(json.dumps(request))["json"]) for one in self.workers]
        refuse_errors(answers, self.url)
        return answers

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, clear_cache: bool) -> None:
        self.calls.append("pause")
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def update(self, info: Mapping[str, Any]) -> None:
        assert self.paused
        self.calls.append("update")
        for one in self.workers:
            one.apply(info["job"], info["position"], info["mirror"], list(info["reload"]))

    def finish(self, version: str | None) -> None:
        self.calls.append("finish")
        self.served = self.served if version is None else version

    def name_version(self, version: str) -> None:
        self.served = version


def _pack(model: torch.nn.Module) -> None:
    """What an engine may do to a parameter after loading it."""
    with torch.no_grad():
        model.gate_up.copy_(model.gate_up.flip(0))


class Training:
    def __init__(self, folder: Path):
        self.url = str(folder / "channel")
        self.weights = weights_of(SHAPES)
        self._publisher = wc.Publisher(self.url, self.weights)

    def step(self, seed: int, names: set[str] | None = None, density: float = 0.05) -> int:
        new = changed(self.weights, density, seed, names)
        for spec in new.table:
            self.weights.write(spec.name, new.read(spec.name))
        return self._publisher.publish().result(60).position.version

    def close(self) -> None:
        self._publisher.close()


def attached(training: Training, engine: Local, tmp_path: Path, **options: Any) -> Agent:
    return Agent(training.url, engine, tmp_path / "mirror", **options)


def must_be(engine: Local, agent: Agent, version: int) -> None:
    proof = prove(engine, agent.subscriber.chain)
    assert (proof.version, dict(proof.wrong), dict(proof.unproven)) == (version, {}, {})
    assert proof.holds
    assert engine.served == str(version)
    assert not engine.paused
