"""Random models, tiny and one bigger, each with a tokenizer of its own, that vLLM's CPU engine serves offline."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

VOCABULARY = 520
CONTEXT = 256
END = "<|end|>"
# The CPU attention of vLLM refuses heads smaller than 32.
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,  # so that what is generated depends on every layer
}
BIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
HYBRID = {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
PIXELS = 32
QUERIES = 4
ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.1,
}


def make(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a random model of a kind named in `KINDS`, with its tokenizer, into a folder; the folder."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = KINDS[kind]()
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    (_processor() if kind == "blip2" else tokenizer()).save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens at most, learned here from a few words."""
    plain = Tokenizer(BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator([" ".join(a + b + c for a in LETTERS for b in "aeiou" for c in LETTERS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END, pad_token=END, model_max_length=CONTEXT)


LETTERS = string.ascii_lowercase


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**TINY, **TOKENS, tie_word_embeddings=True))


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**TINY, **TOKENS, tie_word_embeddings=False))


def _moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **TOKENS, **EXPERTS, tie_word_embeddings=False))


def _qwen3_next() -> PreTrainedModel:
    """Experts, and a convolution that vLLM packs on a CPU."""
    shape = TINY | EXPERTS | HYBRID | {"head_dim": 64}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**shape, **TOKENS, tie_word_embeddings=False))


def _blip2() -> PreTrainedModel:
    """It sees pictures, and is one of the few such models that vLLM loads without torchvision."""
    more = {"vocab_size": VOCABULARY + 1}  # the picture's token
    return Blip2ForConditionalGeneration(
        Blip2Config(
            vision_config=ENCODER | {"image_size": PIXELS, "patch_size": 8, "model_type": "blip_2_vision_model"},
            qformer_config=ENCODER | more | {"encoder_hidden_size": 64, "cross_attention_frequency": 1},
            text_config=TINY | TOKENS | more | {"model_type": "qwen3", "tie_word_embeddings": True},
            num_query_tokens=QUERIES,
            image_token_index=VOCABULARY,
            initializer_range=0.1,
        )
    )


def _processor() -> Blip2Processor:
    """It gives the picture's token, ``<image>``, the next free number."""
    pictures = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    return Blip2Processor(pictures, tokenizer(), num_query_tokens=QUERIES)


def _big() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**BIG, **TOKENS, tie_word_embeddings=True))


# The special token comes first in the vocabulary.
TOKENS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "moe": _moe,
    "qwen3-next": _qwen3_next,
    "blip2": _blip2,
    "big": _big,
}
