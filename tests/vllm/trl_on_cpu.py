"""`examples/trl_vllm/train.py` on a CPU.

Every sync and every rollout that is trained on is told as a line of JSON, with the version that TRL gives it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "trl_vllm")]

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


class TellingTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    def _sync_weight(self) -> None:
        super()._sync_weight()
        tell(event="sync", step=self.state.global_step, trl=self.model_version, **asdict(self.weight_transfer.last))


def on_cpu() -> None:
    use_cpu()
    async_grpo_trainer.RolloutQueueDataset = TellingDataset


if __name__ == "__main__":
    import train

    on_cpu()
    train.AsyncGRPOConfig = partial(train.AsyncGRPOConfig, use_cpu=True)
    train.AsyncGRPOTrainer = TellingTrainer
    train.main()
