"""The policy: a small Qwen3 that reads a game as letters and marks, and writes letters.

A game is one sequence: a begin token, then for each turn the five letters of the guess and five tokens that repeat them
with their marks, such as ``c. r? a! n. e.`` in the tokenizer's text. The letters are what the policy is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightcast as wc
from examples.wordle.game import LENGTH, MARKS, TURNS

BEGIN = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ("<s>", *LETTERS, *(letter + mark for letter in LETTERS for mark in MARKS))
"""The text of every token, by its number."""

IDS = {text: number for number, text in enumerate(TOKENS)}
TURN = 2 * LENGTH
"""Tokens of a turn: a guess and its marks."""

CONTEXT = 1 + TURNS * TURN
CHECKPOINT = Path(__file__).parent / "checkpoint"
"""What RL begins with; made by `examples.wordle.warm_up`."""


def config() -> Qwen3Config:
    """552 thousand parameters: small enough that two cores train and serve it."""
    return Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
        bos_token_id=BEGIN,
        eos_token_id=BEGIN,
        pad_token_id=BEGIN,
        dtype="bfloat16",
    )


def load(folder: Path = CHECKPOINT, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The policy of a checkpoint."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


def published(model: torch.nn.Module) -> wc.Fingerprint:
    """The fingerprint that its published weights must have: rounded to bf16 by other means than the publisher's."""
    arrays = {name: wc.round_to("BF16", value.float().numpy()) for name, value in model.state_dict().items()}
    return wc.fingerprint(wc.Arrays(arrays, dict.fromkeys(arrays, "BF16")))


def mark_ids(guess: str, marks: str) -> list[int]:
    """The tokens that tell a policy what came of its guess."""
    return [IDS[letter + mark] for letter, mark in zip(guess, marks, strict=True)]


def text_of(ids: Sequence[int]) -> str:
    return "".join(TOKENS[number] for number in ids)


def guess_logits(model: Qwen3ForCausalLM, tokens: Tensor, turns: int) -> Tensor:
    """For games as token numbers, what the policy thinks of each letter of the first guesses: [game, letter, token]."""
    before = torch.tensor([TURN * turn + place for turn in range(turns) for place in range(LENGTH)])
    hidden = model.model(input_ids=tokens[:, : TURN * turns - LENGTH], use_cache=False).last_hidden_state
    logits: Tensor = model.lm_head(hidden[:, before])
    return logits


def guess_ids(tokens: Tensor, turns: int) -> Tensor:
    """The letters that were guessed, as `guess_logits` has them."""
    return torch.stack([tokens[:, 1 + TURN * turn : 1 + TURN * turn + LENGTH] for turn in range(turns)], 1).flatten(1)
