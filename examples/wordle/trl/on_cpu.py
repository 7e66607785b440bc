"""TRL's asynchronous GRPO on a machine without a GPU: what it has for CUDA alone is replaced here."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


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


def use_cpu() -> None:
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
