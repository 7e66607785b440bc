"""Small models of the families of transformers, and how their coordinates are compared with what they save."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from transformers.core_model_loading import ConversionOps

from weightcast.disk.checkpoint import Checkpoint
from weightcast.format.digest import fingerprint
from weightcast.format.tensors import Arrays
from weightcast.torch.coordinates import DTYPES, Coordinates, coordinates_of

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **TOKENS,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4}


def qwen3(tied: bool = True) -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=tied))


def qwen3_moe() -> Any:
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8))


def deepseek_v3() -> Any:
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    routing = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {**SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**sizes, **ranks, **routing))


def gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **TOKENS))


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, tie_word_embeddings=True))


def llava() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", **sizes, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = tf.LlavaConfig(text_config={"model_type": "llama", **SMALL}, vision_config=vision)
    return tf.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    config = tf.Qwen2VLConfig(text_config=SMALL, vision_config={**VISION, "embed_dim": 16})
    return tf.Qwen2VLForConditionalGeneration(config)


def qwen3_vl_moe() -> Any:
    sizes = {"intermediate_size": 24, "out_hidden_size": 16, "num_position_embeddings": 16}
    vision = {**VISION, **sizes, "deepstack_visual_indexes": [0]}
    config = tf.Qwen3VLMoeConfig(text_config={**SMALL, **EXPERTS, "head_dim": 8}, vision_config=vision)
    return tf.Qwen3VLMoeForConditionalGeneration(config)


def ernie_vl_moe() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    moe = {"moe_intermediate_size": [8, 4], "moe_num_experts": 4, "moe_k": 2, "mlp_layer_types": ["dense", "sparse"]}
    text = {**SMALL, **moe, "rope_parameters": rope}
    config = tf.Ernie4_5_VLMoeConfig(text_config=text, vision_config={**VISION, "intermediate_size": 24})
    return tf.Ernie4_5_VLMoeForConditionalGeneration(config)


def marian() -> Any:
    sides = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
    }
    start = {"decoder_start_token_id": 0, "forced_eos_token_id": 2}
    config = tf.MarianConfig(vocab_size=64, d_model=16, max_position_embeddings=32, **sides, **TOKENS, **start)
    return tf.MarianMTModel(config)


def jina() -> Any:
    config = tf.JinaEmbeddingsV3Config(**SMALL, max_position_embeddings=32)
    return tf.JinaEmbeddingsV3Model(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3 tied": qwen3,
    "qwen3": lambda: qwen3(tied=False),
    "qwen3_moe": qwen3_moe,
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL, num_local_experts=4)),
    "deepseek_v3": deepseek_v3,
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=4)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL, head_dim=8)),
    "gpt2": gpt2,
    "t5": t5,
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL)),
    "qwen2_vl": qwen2_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "llava": llava,
    "marian": marian,
    "ernie4_5_vl_moe": ernie_vl_moe,
    "jina_embeddings_v3": jina,
    "hrm_text": lambda: tf.HrmTextForCausalLM(tf.HrmTextConfig(**SMALL, head_dim=8)),
}

MADE = {
    "ernie4_5_vl_moe": {  # gates are transposed, the biases of two routers stacked
        "model.layers.*.mlp.gate.weight",
        "model.layers.*.mlp.gate.weight_*",
        "model.layers.*.mlp.moe_statics.e_score_correction_bias",
    },
    "jina_embeddings_v3": {"encoder.layers.*.mixer.Wqkv.bias", "encoder.layers.*.mixer.Wqkv.weight"},
    "hrm_text": {
        f"model.{side}_module.layers.*.{name}.weight"
        for side in "HL"
        for name in ("attn.gqkv_proj", "mlp.gate_up_proj")
    },
}
"""The families whose checkpoints have tensors that are no part of a parameter; all others have none."""


def change(model: nn.Module, seed: int) -> None:
    """New values in place, from the whole range of the dtype's bits but NaN."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=random))


def built(family: str, dtype: Any = None) -> Any:
    model = FAMILIES[family]().to(dtype or torch.bfloat16)
    change(model, 0)
    return model


def arrays_of(layout: Coordinates) -> Arrays:
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    tensors = {piece.name: piece.view() for piece in layout.pieces} | {made.name: made.tensor() for made in layout.made}
    arrays = {name: tensor.view(words[tensor.itemsize]).numpy() for name, tensor in tensors.items()}
    return Arrays(arrays, {name: DTYPES[tensor.dtype] for name, tensor in tensors.items()}, layout.aliases)


def assert_is_saved(layout: Coordinates, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    arrays = arrays_of(layout)
    with Checkpoint(folder) as checkpoint:
        assert arrays.table == checkpoint.table
        for spec in checkpoint.table:
            assert np.array_equal(arrays.read(spec.name), checkpoint.read(spec.name)), spec.name
        assert fingerprint(arrays).digest == fingerprint(checkpoint).digest


def patterns(names: Iterator[str]) -> set[str]:
    return {re.sub(r"\d+", "*", name) for name in names}


class NeedsAll(ConversionOps):
    """Hands one of its tensors on, changed, but wants to see them all."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        first, _ = (input_dict[pattern] for pattern in ("q_norm.weight", "k_norm.weight"))
        return {target_patterns[0]: first[0].clone() + 1}

    @property
    def reverse_op(self) -> NeedsAll:
        return self


def table_of(model: Any) -> Any:
    return arrays_of(coordinates_of(model)).table
