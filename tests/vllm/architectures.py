"""Tiny random checkpoints of many architectures, small enough that vLLM loads each in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import HYBRID, TINY, TOKENS
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_NARROW = {**TINY, **TOKENS, "vocab_size": 512, "intermediate_size": 96}
_WIDE = {name: value for name, value in _NARROW.items() if name != "head_dim"} | {"hidden_size": 128}
"""For those that divide the hidden size among the heads: the CPU attention refuses heads smaller than 32."""
_OLD = {"vocab_size": 512, "initializer_range": 0.1, **TOKENS, "bos_token_id": 0}
_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED = {"shared_expert_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
_ABSORBED = {
    f"{attention}.kv_b_proj.weight": (f"{attention}.mla_attn.mla_attn.W_UK_T", f"{attention}.mla_attn.mla_attn.W_UV")
    for attention in ("model.layers.0.self_attn", "model.layers.1.self_attn")
}
_ROUTED = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
}
_GPT = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
_FALCON = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
_OPT = _FALCON | {"ffn_dim": 160, "word_embed_proj_dim": 128, "init_std": 0.1}


@dataclass(frozen=True)
class Architecture:
    kind: str
    """Its name in transformers."""
    config: Mapping[str, Any]
    refused: str | None = field(default=None, kw_only=True)
    """What the refusal says, if the CPU engine cannot follow it."""
    derived: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    """Parameters that vLLM makes others of after loading, and those."""
    apart: bool = field(default=False, kw_only=True)
    """Whether those are copies here. vLLM has views of unquantised weights, and copies of others."""


ARCHITECTURES = {
    "llama": Architecture("llama", _NARROW),
    "mistral": Architecture("mistral", _NARROW),
    "mixtral": Architecture("mixtral", _NARROW | _TWO_OF_FOUR),
    "qwen2": Architecture("qwen2", _WIDE),
    "qwen2-moe": Architecture("qwen2_moe", _WIDE | _EXPERTS | _SHARED | {"decoder_sparse_step": 1}),
    "qwen3": Architecture("qwen3", _NARROW | {"tie_word_embeddings": True}),
    "qwen3-moe": Architecture("qwen3_moe", _NARROW | _EXPERTS | {"decoder_sparse_step": 1}),
    "qwen3-next": Architecture(
        "qwen3_next",
        _NARROW | _EXPERTS | HYBRID | {"head_dim": 64},
        refused="can neither place nor reload 1 tensor: model.layers.0.linear_attn.conv1d.weight",  # packed on a CPU
    ),
    "gemma2": Architecture("gemma2", _NARROW | {"query_pre_attn_scalar": 32}),
    "gemma3": Architecture("gemma3_text", _NARROW | {"query_pre_attn_scalar": 32}),
    "phi": Architecture("phi", _WIDE),
    "phi3": Architecture("phi3", _WIDE),
    "olmo2": Architecture("olmo2", _WIDE),
    "cohere": Architecture("cohere", _WIDE),
    "granite-moe": Architecture("granitemoe", _WIDE | _TWO_OF_FOUR),
    "deepseek-v2": Architecture(
        "deepseek_v2",
        _NARROW | _LATENT | _ROUTED,
        derived=_ABSORBED,
    ),
    "deepseek-v2-apart": Architecture("deepseek_v2", _NARROW | _LATENT | _ROUTED, derived=_ABSORBED, apart=True),
    "gpt-oss": Architecture("gpt_oss", _NARROW | _TWO_OF_FOUR | {"sliding_window": 32}),
    "gpt2": Architecture("gpt2", _OLD | _GPT),
    "gpt-neox": Architecture("gpt_neox", _WIDE),
    "opt": Architecture("opt", _OLD | _OPT | {"pad_token_id": 1}),
    "bloom": Architecture("bloom", _OLD | {"hidden_size": 128, "n_layer": 2, "n_head": 4}),
    "falcon-7b": Architecture("falcon", _OLD | _FALCON | {"multi_query": True}),
    "falcon-40b": Architecture("falcon", _OLD | _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
}


def make(name: str, folder: Path) -> Path:
    """Write a random checkpoint into a folder; the folder."""
    wanted = ARCHITECTURES[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[wanted.kind](**wanted.config))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:  # norms and biases are ones and zeros
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder
