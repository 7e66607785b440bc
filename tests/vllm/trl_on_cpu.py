"""`examples/trl_vllm/train.py` on a CPU: what TRL has for CUDA alone is replaced here.

Every sync and every rollout that is trained on is told as a line of JSON, with the version that TRL gives it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trl_vllm"))


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: object,
    softmax_scale: float | None = None,
    **__: object,
) -> torch.Tensor:
    """Flash attention over segments, each behind its own path of keys: by torch's own attention, one at a time."""
    groups, outs = query.shape[1] // key.shape[1], []
    for i in range(len(starts_q) - 1):
        mine, theirs = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        q, k, v = (part.transpose(0, 1) for part in (query[mine], key[theirs], value[theirs]))
        k, v = (part.repeat_interleave(groups, 0) for part in (k, v))
        behind = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outs.append(scaled_dot_product_attention(q, k, v, behind, scale=softmax_scale).transpose(0, 1))
    return torch.cat(outs)


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
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    async_grpo_trainer.RolloutQueueDataset = TellingDataset


if __name__ == "__main__":
    import train

    on_cpu()
    train.AsyncGRPOConfig = partial(train.AsyncGRPOConfig, use_cpu=True)
    train.AsyncGRPOTrainer = TellingTrainer
    train.main()
