"""A sharded training of which one rank is killed at a named event: run by `sharded_models.run_with_a_victim`.

The victim sees its own steps, scans, encoding, messages and requests to the store as events: "after step",
"before gather", "sync in put deltas/…". It sends itself SIGKILL at one of them, so no time decides when it dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from scripted_store import Request, ScriptedStore
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import weightcast as wc
from weightcast.errors import PeerError
from weightcast.store.file import FileStore
from weightcast.torch.model import LiveModel
from weightcast.torch.peers import GroupPeers

OTHER = 1000
"""A step whose weights are of no version."""

Phase = Literal["beginning", "publishing", "returning"]
"""Of the channel, of version 2, or of a training that opens the channel with weights of no version."""


@dataclass(frozen=True)
class Moment:
    """Where one rank dies: at the ``nth`` event of a phase that begins so."""

    phase: Phase
    event: str
    victim: int
    heads: tuple[int | None, ...]
    """The versions that the channel may be at then."""
    nth: int = 1

    def __str__(self) -> str:
        event = self.event.replace(" ", "-").replace("/", "")
        return f"{self.phase}-rank{self.victim}-{event}-{self.nth}"


SHAPES = {"up": (37, 24), "down": (8, 40), "norm": (24,), "last": (1, 3)}
"""Tensors that ranks share unevenly, and one that not all ranks have a part of."""


class Model(nn.Module):
    """As it is after some steps."""

    def __init__(self, step: int):
        super().__init__()
        for name, tensor in weights_at(step).items():
            self.register_parameter(name, nn.Parameter(tensor))


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """Whole weights; a third of them moves in each step, by a few steps of bf16."""
    random = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    for number in range(OTHER if step >= OTHER else 1, step + 1):
        random.manual_seed(number)
        for tensor in found.values():
            tensor *= torch.where(torch.rand(tensor.shape, generator=random) < 0.3, 1.02, 1.0)
    return found


def digest_at(step: int) -> str:
    return wc.fingerprint(LiveModel(Model(step), "BF16")).digest


class Steps(torch.optim.Optimizer):
    """Brings this rank's part of a model from a step to the next one."""

    def __init__(self, model: nn.Module, step: int):
        super().__init__(model.parameters(), {})
        self._model, self._step = model, step

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self._step += 1
        for name, tensor in weights_at(self._step).items():
            parts = tensor.chunk(distributed.get_world_size())  # as FSDP2 cuts
            if distributed.get_rank() < len(parts):
                self._model.get_parameter(name).to_local().copy_(parts[distributed.get_rank()])


class Doomed:
    """What a rank does, as events; it ends its process at one of them."""

    def __init__(self, moment: Moment | None):
        self._moment = moment
        self._left = 0

    def arm(self, phase: Phase) -> None:
        """The phase begins; those before are over."""
        if self._moment is not None and self._moment.phase == phase:
            self._left = self._moment.nth

    def at(self, event: str) -> None:
        if not self._left or self._moment is None or not event.startswith(self._moment.event):
            return
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def around(self, what: str) -> Iterator[None]:
        self.at(f"before {what}")
        yield
        self.at(f"after {what}")

    def wrap(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            with self.around(what):
                return call(*args, **options)

        return wrapped

    def store(self, channel: Path) -> ScriptedStore:
        def perform(request: Request, proceed: Callable[[], Any]) -> Any:
            what = f"{request.verb} {request.key}"
            sync = os.fsync

            def note(fd: int) -> None:
                self.at(f"sync in {what}")
                sync(fd)

            with self.around(what), patch("os.fsync", note):
                return proceed()

        store = ScriptedStore(FileStore(channel))
        store.on("put create", "", perform)
        return store

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The functions that find changes and encode them are events too."""
        from weightcast.publish import committer, sharded
        from weightcast.torch.detectors import Transient

        with ExitStack() as patches:
            for owner, name, what in (
                (Steps, "step", "step"),
                (Transient, "scan", "scan"),
                (committer, "resolve", "resolve"),
                (sharded, "encode_boxes", "encode"),
            ):
                patches.enter_context(patch.object(owner, name, self.wrap(what, getattr(owner, name))))
            yield


class Messages:
    """Implements `Peers` over a group of gloo; each call is an event."""

    def __init__(self, doomed: Doomed):
        self._peers, self._doomed = GroupPeers(), doomed
        self.ranks, self.rank, self.size = self._peers.ranks, self._peers.rank, self._peers.size

    def gather(self, mine: bytes) -> list[bytes] | None:
        with self._doomed.around("gather"):
            return self._peers.gather(mine)

    def share(self, data: bytes | None) -> bytes:
        with self._doomed.around("share"):
            return self._peers.share(data)

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        with self._doomed.around("exchange"):
            return self._peers.exchange(parts)

    def close(self) -> None:
        self._peers.close()


@dataclass(frozen=True)
class Training:
    """Publishes to ``folder/channel``. What a rank has seen acknowledged is a line of ``folder/acknowledged``."""

    folder: Path

    def publish(self, publisher: wc.Publisher, optimizer: Steps, step: int) -> None:
        optimizer.step()
        position = publisher.publish(step=step).result(60).position
        with (self.folder / "acknowledged").open("a") as file:
            file.write(f"{position.version} {position.digest}\n")

    def open(self, doomed: Doomed, step: int) -> tuple[wc.Publisher, Steps]:
        model = Model(step)
        fully_shard(model)
        optimizer = Steps(model, step)
        store = doomed.store(self.folder / "channel")
        publisher = wc.Publisher(
            store, model, optimizer=optimizer, dtype="BF16", group=Messages(doomed), threads=1, retry_after=0.1
        )
        return publisher, optimizer


@dataclass(frozen=True)
class UntilKilled(Training):
    """Until one rank is killed: all others must name it."""

    moment: Moment
    __name__ = "killed"

    def __call__(self) -> None:
        is_victim = distributed.get_rank() == self.moment.victim
        doomed = Doomed(self.moment if is_victim else None)
        with doomed.watching(), pytest.raises(PeerError) as raised:
            self._train(doomed)
        assert raised.value.rank == self.moment.victim, raised.value

    def _train(self, doomed: Doomed) -> None:
        doomed.arm("beginning")
        publisher, optimizer = self.open(doomed, 0)
        self.publish(publisher, optimizer, 1)
        if self.moment.phase == "returning":
            publisher.close()
            doomed.arm("returning")
            publisher, optimizer = self.open(doomed, OTHER)
        doomed.arm("publishing")
        for step in count(2):
            self.publish(publisher, optimizer, step)


@dataclass(frozen=True)
class Again(Training):
    """Goes on with the weights of a step, and publishes two more."""

    step: int
    __name__ = "again"

    def __call__(self) -> None:
        publisher, optimizer = self.open(Doomed(None), self.step)
        with publisher:
            for step in (self.step + 1, self.step + 2):
                self.publish(publisher, optimizer, step)
