"""`examples/trl_vllm/train.py` on a CPU.

Every sync and every rollout that is trained on is told as a line of JSON, with the version that TRL gives it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "trl_vllm"), str(ROOT / "tests" / "support")]

import train  # noqa: E402

from examples.wordle.trl.on_cpu import use_cpu  # noqa: E402


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


class TellingQueue:
    """The queue that rollouts come from."""

    def __init__(self, queue: Any):
        self._queue = queue
        self.qsize = queue.qsize

    def get(self, timeout: float) -> Any:
        sample = self._queue.get(timeout=timeout)
        tell(event="rollout", trl=sample.model_version)
        return sample


class TellingDataset(async_grpo_trainer.RolloutQueueDataset):
    def __init__(self, rollout_queue: Any, *args: Any, **kwargs: Any):
        super().__init__(TellingQueue(rollout_queue), *args, **kwargs)


class TellingTrainer(train.Trainer):
    def _sync_weight(self) -> None:
        super()._sync_weight()
        if self.accelerator.is_main_process:
            tell(event="sync", step=self.state.global_step, trl=self.model_version, **asdict(self.weight_transfer.last))


def on_cpu() -> None:
    use_cpu()
    async_grpo_trainer.RolloutQueueDataset = TellingDataset


def options() -> dict[str, Any]:
    """With several ranks the model is sharded."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {"use_cpu": True}
    import fsdp_on_cpu  # noqa: F401

    return {"use_cpu": True, "fsdp": True, "fsdp_config": {"version": 2}, "bf16": False}


if __name__ == "__main__":
    on_cpu()
    train.AsyncGRPOConfig = partial(train.AsyncGRPOConfig, **options())
    train.Trainer = TellingTrainer
    train.main()
