"""Processes that train one model together, and checks of what each of them would publish of it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed, multiprocessing, nn

from weightcast.format.coding import Coding
from weightcast.format.digest import tensor_digest
from weightcast.format.scan import Change
from weightcast.torch.coordinates import unwrapped
from weightcast.torch.detectors import detector_of
from weightcast.torch.model import LiveModel
from weightcast.torch.sharded import ShardedModel, is_sharded

Case = Callable[[], None]


FORKED = "forkserver"
"""Processes that are forked by one that has imported the module `forked`: they begin at once."""


def start_forking() -> None:
    """Start the process that forks others, unless it runs."""
    forkserver.set_forkserver_preload(["forked"])
    # Before Python 3.13 it finds modules only where the environment says.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()


def run_together(world: int, cases: Sequence[Case], folder: Path, method: str = "spawn") -> dict[str, str]:
    """Run the cases, functions of a module, in processes of one group: what went wrong in each, or nothing.

    A process that fails ends at once, since the others may wait for it; what comes after it is not run.
    """
    multiprocessing.start_processes(_process, (world, cases, folder), nprocs=world, start_method=method)
    ends = {case.__name__: [folder / f"{case.__name__}-{rank}" for rank in range(world)] for case in cases}
    return {
        name: "\n".join(path.read_text() if path.exists() else "not run" for path in paths).strip()
        for name, paths in ends.items()
    }


def run_with_a_victim(world: int, case: Case, folder: Path, victim: int, method: str = "spawn") -> list[str]:
    """Run a case in which one process is killed: what went wrong in each of the others, or nothing."""
    context = multiprocessing.get_context(method)
    started = [context.Process(target=_process, args=(rank, world, [case], folder)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    ends = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert ends[victim] == -signal.SIGKILL
    paths = [folder / f"{case.__name__}-{rank}" for rank in range(world) if rank != victim]
    return [path.read_text() if path.exists() else "did not end" for path in paths]


def _process(rank: int, world: int, cases: Sequence[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    wait = timedelta(minutes=1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", timeout=wait, rank=rank, world_size=world
    )
    for case in cases:
        torch.manual_seed(0)
        try:
            case()
        except BaseException:  # noqa: BLE001
            (folder / f"{case.__name__}-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
            os._exit(0)
        (folder / f"{case.__name__}-{rank}").write_text("")
    distributed.destroy_process_group()
    os._exit(0)  # all is told: a thread of torch's sometimes aborts the interpreter when it ends


def gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as rank 0 would save them, under their names without wrappers."""
    state = {}
    for name, tensor in unwrapped(model).state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state[name.replace("_orig_mod.", "")] = full.detach().clone()
    return gathered(state)[0]


class Checked:
    """A model in training, all of whose detectors are compared with the whole model on one process."""

    def __init__(
        self,
        model: nn.Module,
        plain: nn.Module,
        dtype: str | None = "BF16",
        ranks: Sequence[int] | None = None,
        lr: float = 1e-3,
    ):
        """``plain`` is a model of the same class that is not sharded."""
        assert is_sharded(model)
        assert not is_sharded(plain)
        self.model, self._plain, self._dtype = model, plain, dtype
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        self.lives = {detect: ShardedModel(model, dtype, ranks=ranks) for detect in ("transient", "device")}
        self._detectors = {
            detect: detector_of(live, self.optimizer if detect == "transient" else None, detect, None, Coding("banded"))
            for detect, live in self.lives.items()
        }
        self._known = {detect: self._read(live) for detect, live in self.lives.items()}
        self.compare()
        self._covers()

    @property
    def live(self) -> ShardedModel:
        return self.lives["device"]

    def _read(self, live: LiveModel) -> dict[str, Any]:
        return {spec.name: live.read(spec.name).copy() for spec in live.table}

    def compare(self) -> None:
        """Each rank's bits are those of its boxes of the whole model."""
        self._plain.load_state_dict(whole_state(self.model))
        reference = LiveModel(self._plain, self._dtype)
        for live in self.lives.values():
            assert live.whole == reference.table
            parts = [replace(place.spec, shape=place.box.shape) for place in live.places.values()]
            assert parts == [live.table[name] for name in live.places]
            assert live.places.keys() == {spec.name for spec in live.table}
            for name, place in live.places.items():
                assert place.spec == reference.table[name]
                assert np.array_equal(live.read(name), place.read(reference.read(name))), name
            assert live.digests() == [tensor_digest(live.read(spec.name)) for spec in live.table]

    def _covers(self) -> None:
        """All ranks together have every element once, and share the bytes."""
        times = {spec.name: np.zeros(spec.shape, int) for spec in self.live.whole}
        for places in gathered([(name, place.box) for name, place in self.live.places.items()]):
            for name, box in places:
                times[name][tuple(slice(one.start, one.start + one.count) for one in box.ranges)] += 1
        assert {name for name, found in times.items() if not (found == 1).all()} == set()

    def step(self, backward: Callable[[], None]) -> None:
        backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scan(self, detect: str) -> None:
        """A detector finds exactly what changed since its last scan."""
        live, old = self.lives[detect], self._known[detect]
        found = {change.spec.name: change for change in self._detectors[detect].scan().changes()}
        new = self._known[detect] = self._read(live)
        changed = {name: np.flatnonzero(old[name] != new[name]) for name in new}
        assert found.keys() == {name for name, at in changed.items() if at.size}
        for name, change in found.items():
            assert change.spec == live.table[name]
            _same(change, changed[name], old[name], new[name])

    def follow(self, detect: str) -> None:
        """What a detector finds leads from its last scan to the bits as they are now, be it the least or not."""
        known, live = self._known[detect], self.lives[detect]
        for change in self._detectors[detect].scan().changes():
            known[change.spec.name][change.indices] = change.now
        now = self._read(live)
        assert all(np.array_equal(known[name], bits) for name, bits in now.items())

    def train(self, steps: int, backward: Callable[[int], None], after: Callable[[], None] = lambda: None) -> None:
        """Scan with one detector after each step, with the other after each second step."""
        seen = 0
        for step in range(steps):
            self.step(lambda step=step: backward(step))
            after()
            before = self._known["device"]
            self.scan("device")
            seen += sum((before[name] != bits).sum() for name, bits in self._known["device"].items())
            if step % 2:
                self.scan("transient")
            self.compare()
        assert sum(gathered(int(seen))) > 0

    def close(self) -> None:
        for detector in self._detectors.values():
            detector.close()


def _same(change: Change, at: Any, old: Any, new: Any) -> None:
    assert change.was is not None
    assert np.array_equal(change.indices, at)
    assert np.array_equal(change.was, old[at])
    assert np.array_equal(change.now, new[at])
