"""Asynchronous GRPO: what is learned from games that were played by slightly older weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.wordle.game import LENGTH
from examples.wordle.policy import guess_ids, guess_logits
from examples.wordle.rollouts import Rollouts

CLIP = 0.2
"""How far the probability of a letter may move from the one it was sampled with before it stops counting."""
CHUNK = 64
"""Games in a forward and backward pass."""


@dataclass(frozen=True)
class Learned:
    """What a step was like."""

    kl: float
    """Estimated divergence between the policy that played and the one that learns, per letter."""
    clipped: float
    """Share of letters whose ratio was out of bounds."""
    norm: float
    """Of the gradient."""


def advantages(rewards: np.ndarray, group: int) -> np.ndarray:
    """How much better each game went than the others of the same word, in standard deviations."""
    grouped = rewards.reshape(-1, group)
    better = grouped - grouped.mean(1, keepdims=True)
    return (better / (grouped.std(1, keepdims=True) + 1e-2)).reshape(-1)


def clipped_objective(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """PPO's: the ratio of new and old probability corrects for the age of the games, within bounds."""
    ratio = (new - old).clamp(-20, 20).exp()  # beyond that, infinities
    return torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def learn(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> Learned:
    """One step of the optimizer; every letter weighs the same, so that long games weigh more.

    Games of similar length go together: little is computed for letters that were never written.
    """
    better = torch.from_numpy(advantages(rollouts.rewards, rollouts.games.repeats))
    order = np.argsort(rollouts.turns, kind="stable")
    letters = int(rollouts.turns.sum()) * LENGTH
    kl = clipped = 0.0
    optimizer.zero_grad()
    for chunk in np.array_split(order, math.ceil(len(order) / CHUNK)):
        turns = int(rollouts.turns[chunk].max())
        tokens = torch.from_numpy(rollouts.tokens[chunk])
        old = torch.from_numpy(rollouts.logprobs[chunk, : turns * LENGTH])
        written = torch.arange(turns * LENGTH) < LENGTH * torch.from_numpy(rollouts.turns[chunk])[:, None]
        logprobs = torch.log_softmax(guess_logits(model, tokens, turns), -1)
        new = logprobs.gather(2, guess_ids(tokens, turns)[..., None])[..., 0].where(written, old)
        objective = clipped_objective(new, old, better[chunk][:, None]) * written
        (-objective.sum() / letters).backward()
        with torch.no_grad():
            kl += float(((old - new) * written).sum()) / letters
            clipped += float(((((new - old).exp() - 1).abs() > CLIP) & written).sum()) / letters
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return Learned(kl, clipped, norm)
