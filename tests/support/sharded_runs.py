"""Sharded trainings that publish to a folder, in processes of their own: run by `sharded_models.run_together`."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sharded_cases import Odd, descend, mesh_of
from sharded_models import gathered, whole_state
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Small, backward

import weightcast as wc
from weightcast.errors import PeerError
from weightcast.torch.model import LiveModel

STEPS = 30


def shared_folder() -> Path:
    """A folder that all ranks know."""
    return Path(gathered(tempfile.mkdtemp(prefix="weightcast-sharded-"))[0])


def train(
    channel: Path, model: nn.Module, plain: nn.Module, act: Callable[[int], None], steps: range, **options: object
) -> None:
    """Publish after every step; each version must be what the gathered model is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with wc.Publisher(channel, model, optimizer=optimizer, dtype="BF16", **options) as publisher:  # type: ignore[arg-type]
        for step in steps:
            act(step)
            optimizer.step()
            optimizer.zero_grad()
            manifest = publisher.publish(step=step).result(60)
            plain.load_state_dict(whole_state(model))
            expected = wc.fingerprint(LiveModel(plain, "BF16")).digest
            assert manifest.position.digest == expected, (step, manifest)
            assert manifest.step == step
    if distributed.get_rank() == 0:
        followed(channel)


def followed(channel: Path) -> None:
    """Go through every version: each is decoded and verified on the way."""
    head = wc.Subscriber(channel, channel / "unused", wc.Pinned(0)).chain.head()
    assert head is not None
    with wc.Subscriber(channel, Path(tempfile.mkdtemp()) / "mirror", wc.Every()) as subscriber:
        while subscriber.position != head.position:
            assert subscriber.sync() is not None


def fsdp() -> None:
    model = Small(24, 41)
    fully_shard(model.up)
    fully_shard(model)
    train(
        shared_folder() / "channel",
        model,
        Small(24, 41),
        lambda step: backward(model, 2 * step + distributed.get_rank()),
        range(1, STEPS + 1),
    )


def fsdp_mixed_precision() -> None:
    model = Odd()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.up, mp_policy=policy)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    train(shared_folder() / "channel", model, Odd(), descend(model), range(1, STEPS + 1))


def fsdp_uneven() -> None:
    model = Odd()
    fully_shard(model)
    train(shared_folder() / "channel", model, Odd(), descend(model), range(1, STEPS + 1))


def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(Small(24, 41))
    act = lambda step: backward(model, 2 * step + distributed.get_rank())  # noqa: E731
    train(shared_folder() / "channel", model, Small(24, 41), act, range(1, 4))


def fsdp_over_tensor_parallel() -> None:
    mesh = mesh_of(2, 2)
    model, plain = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"])
    train(shared_folder() / "channel", model, plain, descend(model, 6), range(1, STEPS + 1))


def hsdp() -> None:
    model = Small(24, 41)
    fully_shard(model, mesh=mesh_of(2, 2))
    act = lambda step: backward(model, 4 * step + distributed.get_rank())  # noqa: E731
    train(shared_folder() / "channel", model, Small(24, 41), act, range(1, 6))


@dataclass(frozen=True)
class UntilKilled:
    """Publish without an end; one rank is killed in the middle of whatever it does, the others must name it."""

    channel: Path
    moment: float
    victim: int
    __name__ = "killed"

    def __call__(self) -> None:
        publish_until_killed(self.channel, self.moment, self.victim)


def publish_until_killed(channel: Path, moment: float, victim: int) -> None:
    rank = distributed.get_rank()
    model = Small(24, 41)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    publisher = wc.Publisher(channel, model, optimizer=optimizer, dtype="BF16")
    if rank == victim:
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for step in range(1, 100_000):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step=step)
    except PeerError as error:
        ended = error
    except RuntimeError:  # the training's own group noticed it first: the publisher has its own word on it
        with pytest.raises(PeerError) as raised:
            publisher.flush(30)
        ended = raised.value
    assert ended.rank == victim, ended


@dataclass(frozen=True)
class Again:
    """Three more versions of a model that begins anew."""

    channel: Path
    __name__ = "again"

    def __call__(self) -> None:
        model = Small(24, 41)
        fully_shard(model)
        act = lambda step: backward(model, 2 * step + distributed.get_rank())  # noqa: E731
        train(self.channel, model, Small(24, 41), act, range(1, 4))
