"""Sharded trainings that publish to a folder, in processes of their own: run by `sharded_models.run_together`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from sharded_cases import (
    Odd,
    causal,
    config_with_odd_experts,
    descend,
    experts_by_fsdp,
    experts_over,
    invent,
    mesh_of,
)
from sharded_models import gathered, whole_state
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Small, backward

import weightcast as wc
from weightcast.errors import PeerError
from weightcast.publish.peers import Message, Sums
from weightcast.publish.rounds import Rounds
from weightcast.torch.model import LiveModel
from weightcast.torch.peers import GroupPeers

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


def fsdp_of_fused_experts() -> None:
    """Experts that are fused in the model, cut along each dimension, and apart in the checkpoint."""
    for dimension in range(3):
        model = experts_by_fsdp(dimension)
        plain = families.built("qwen3_moe", torch.float32)
        train(shared_folder() / "channel", model, plain, causal(model), range(1, 4))


def experts_in_parallel() -> None:
    model = experts_over(mesh_of(4), 0)
    plain = families.tf.Qwen3MoeForCausalLM(config_with_odd_experts())
    train(shared_folder() / "channel", model, plain, invent(model), range(1, 4))


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
class Late:
    """One rank comes to a round when the others have given up: all others must name it."""

    victim: int
    __name__ = "late"

    def __call__(self) -> None:
        group = distributed.new_group(timeout=timedelta(seconds=2))
        rounds = Rounds(GroupPeers(group))
        rank, size = distributed.get_rank(), distributed.get_world_size()
        sums = np.full(10, (1 << 63) + rank, np.uint64)
        rounds.meet(Message())
        assert (rounds.add(sums) == sum((1 << 63) + one for one in range(size)) % (1 << 64)).all()
        rounds.meet(Message())
        if rank == self.victim:
            time.sleep(6)
            return
        with pytest.raises(PeerError, match=f"rank {self.victim} did not come in time") as raised:
            self.act(rounds, sums)
        assert raised.value.rank == self.victim
        time.sleep(6)  # the store of the group may be in this process

    def act(self, rounds: Rounds, sums: Sums) -> None:
        rounds.meet(Message())


class LateToSums(Late):
    def act(self, rounds: Rounds, sums: Sums) -> None:
        rounds.add(sums)
