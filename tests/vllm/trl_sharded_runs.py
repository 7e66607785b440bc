"""TRL's `AsyncGRPOTrainer` with FSDP2 in processes on a CPU: run by `sharded_models.run_together`. No vLLM runs.

The rollouts are made up, since nothing here depends on what is learned.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsdp_on_cpu  # noqa: F401
import numpy as np
import pytest
import torch
import transformers as tf
from datasets import Dataset
from sharded_models import whole_state
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import UsageError
from weightcast.integrations.trl import Sync, WeightcastTransfer
from weightcast.integrations.trl_sharded import ShardedSync
from weightcast.store.file import FileStore
from weightcast.torch.model import LiveModel

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from examples.wordle.trl.on_cpu import use_cpu  # noqa: E402

STEPS = 3
PATIENCE = 300.0
"""Bounds a test that fails."""


class Rollouts:
    """Stands for the worker that generates: a few rollouts for each version that is live."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._luck = random.Random(0)

    def start(self) -> None:
        self.update_model_version(0)

    def update_model_version(self, model_version: int) -> None:
        for number in range(8):
            tokens = np.array([self._luck.randrange(256) for _ in range(12)])
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=tokens,
                    completion_mask=np.array([0] * 4 + [1] * 8),
                    old_log_probs=np.full(12, -5.0, np.float32),
                    advantage=self._luck.uniform(-1, 1),
                    model_version=model_version,
                    group_id=8 * model_version + number,
                    metrics={},
                )
            )

    def stop(self) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        pass


class Watched(AsyncGRPOTrainer):
    """After each sync it notes the collectives that it took, and compares the channel's head with the model."""

    def watch(self, run: Run, transfer: WeightcastTransfer) -> None:
        self._run, self._sent = run, transfer
        self.syncs: list[Sync | None] = []
        self.collectives: list[int] = []

    def _sync_weight(self) -> None:
        assert all(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        self._sent.patience = 1.0 if len(self.syncs) == self._run.missed else PATIENCE
        with CommDebugMode() as counted:
            super()._sync_weight()
        (self._run.folder / f"sync-{len(self.syncs)}-{distributed.get_rank()}").touch()
        self.collectives.append(counted.get_total_counts())
        self.syncs.append(self._sent.last)
        assert Chain.open(FileStore(self._run.channel)).head().position.digest == self._run.digest_of(self.model)


class Sharded(ShardedSync, Watched):
    pass


@dataclass(frozen=True)
class Run:
    """A training that is followed from elsewhere: a rank that has ended a sync makes ``folder/sync-NUMBER-RANK``."""

    model: Path
    folder: Path
    missed: int = -1
    """A version that no engine ever serves."""

    @property
    def channel(self) -> Path:
        return self.folder / "channel"

    def digest_of(self, model: Any) -> str:
        """Of the whole model, as its checkpoint would have it in bf16."""
        plain = tf.AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        plain.load_state_dict(whole_state(model))
        return wc.fingerprint(LiveModel(plain, "BF16")).digest

    def trainer(self, kind: type[Watched], **options: Any) -> Watched:
        as_launched()
        transfer = WeightcastTransfer(self.channel, patience=PATIENCE, threads=1)
        trainer = kind(
            model=str(self.model),
            reward_funcs=lambda **_: [0.0],
            args=config(self.folder / "out"),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * 4),
            rollout_worker=Rollouts(),
            **{"weight_transfer": transfer, **options},
        )
        trainer.watch(self, transfer)
        return trainer


def as_launched() -> None:
    """What `accelerate launch` and `torchrun` tell a process."""
    rank, world = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    use_cpu()


def config(output: Path) -> AsyncGRPOConfig:
    fsdp: Mapping[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}, "use_cpu": True}
    size: Mapping[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 4, "token_budget": 0}
    silent: Mapping[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return AsyncGRPOConfig(
        output_dir=str(output), max_steps=STEPS, learning_rate=1e-4, bf16=False, **fsdp, **size, **silent
    )


@dataclass(frozen=True)
class ShardByShard(Run):
    """Every version is published by both ranks, without a collective of the training."""

    __name__ = "shard_by_shard"

    def __call__(self) -> None:
        trainer = self.trainer(Sharded)
        trainer.train()
        assert trainer.collectives == [0] * (STEPS + 1)
        chain = Chain.open(FileStore(self.channel))
        manifests = [chain.manifest(version) for version in chain.versions()]
        assert [manifest.step for manifest in manifests] == [None, 1, 2, 3]
        assert [len(manifest.objects) for manifest in manifests[1:]] == [2] * STEPS
        if distributed.get_rank():
            assert trainer.syncs == [None] * (STEPS + 1)
            return
        assert [sync.version for sync in trainer.syncs] == [0, 1, 2, 3]
        assert [sync.live for sync in trainer.syncs] == [version != self.missed for version in range(STEPS + 1)]
        assert [sync.nbytes for sync in trainer.syncs[1:]] == [manifest.nbytes for manifest in manifests[1:]]
        assert trainer.model_version == STEPS + 1
        with pytest.raises(UsageError, match="has trained already"):
            trainer.train()


@dataclass(frozen=True)
class Gathered(Run):
    """Without `ShardedSync` TRL gathers every tensor, on all ranks, and rank 0 publishes what it gets."""

    __name__ = "gathered"

    def __call__(self) -> None:
        trainer = self.trainer(Watched)
        trainer.train()
        assert trainer.collectives == [len(list(trainer.model.parameters()))] * (STEPS + 1)
        if distributed.get_rank() == 0:
            whole = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
            assert [sync.broadcast for sync in trainer.syncs] == [whole] * (STEPS + 1)
            assert [sync.version for sync in trainer.syncs] == [0, 1, 2, 3]


class Killing(tf.TrainerCallback):
    """Kills this process, which is rank 1, once a version is published."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Killed(Run):
    """A rank is killed in its second step: the other one ends too."""

    __name__ = "killed"

    def __call__(self) -> None:
        trainer = self.trainer(Sharded, callbacks=[Killing()])
        with pytest.raises(RuntimeError, match="peer"):
            trainer.train()
        assert [sync.version for sync in trainer.syncs] == [0, 1]
