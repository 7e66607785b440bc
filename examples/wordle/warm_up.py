"""Makes the checkpoint that RL begins with: a policy that imitates a poor player.

    python -m examples.wordle.warm_up        # about three minutes on two cores, into examples/wordle/checkpoint

The teacher guesses a random word that fits all marks, or, half of the time, any word of the list. The policy learns the
teacher's exact distribution of each next letter; from sampled letters alone it would take many times as long.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.wordle.game import LENGTH, MARKS, TURNS, marks, words
from examples.wordle.policy import CHECKPOINT, CONTEXT, IDS, LETTERS, TOKENS, TURN, config, guess_logits

GAMES = 24
"""In a batch."""
NOISE = 0.5
"""How often the teacher guesses any word."""


class Teacher:
    """Plays games, and knows the distribution that each of its letters was drawn from."""

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)
        self._words = np.array([[LETTERS.index(letter) for letter in word] for word in words()])
        self._one_hot = np.eye(len(LETTERS), dtype=np.float32)[self._words]
        codes = [[marks(guess, target) for target in words()] for guess in words()]
        self._marks = np.array([[[MARKS.index(mark) for mark in code] for code in row] for row in codes])
        self._pattern = self._marks @ 3 ** np.arange(LENGTH)

    def play(self, games: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Games as token numbers, the distributions of their letters, and which letters were played before the end."""
        count = len(self._words)
        targets = self._random.integers(count, size=games)
        fits = np.ones((games, count), dtype=bool)
        tokens = np.zeros((games, CONTEXT), dtype=np.int64)
        soft = np.zeros((games, TURNS * LENGTH, len(TOKENS)), dtype=np.float32)
        played = np.zeros((games, TURNS * LENGTH), dtype=bool)
        alive = np.ones(games, dtype=bool)
        for turn in range(TURNS):
            any_word = self._random.random(games) < NOISE
            draws = self._random.random((games, count)) * (fits | any_word[:, None])
            guesses = draws.argmax(1)
            soft[:, turn * LENGTH : (turn + 1) * LENGTH] = self._distributions(fits, guesses)
            played[:, turn * LENGTH : (turn + 1) * LENGTH] = alive[:, None]
            start = 1 + TURN * turn
            letters = self._words[guesses]
            tokens[:, start : start + LENGTH] = 1 + letters
            codes = self._marks[guesses, targets]
            tokens[:, start + LENGTH : start + TURN] = 1 + len(LETTERS) + len(MARKS) * letters + codes
            fits &= self._pattern[guesses] == self._pattern[guesses, targets][:, None]
            alive &= guesses != targets
        return tokens, soft, played

    def _distributions(self, fits: np.ndarray, guesses: np.ndarray) -> np.ndarray:
        """Of each letter of a guess, given the letters before it."""
        weights = (1 - NOISE) * fits / fits.sum(1, keepdims=True) + NOISE / fits.shape[1]
        out = np.zeros((len(guesses), LENGTH, len(TOKENS)), dtype=np.float32)
        for place in range(LENGTH):
            letters = weights.astype(np.float32) @ self._one_hot[:, place]
            out[:, place, 1 : 1 + len(LETTERS)] = letters / letters.sum(1, keepdims=True)
            weights = weights * (self._words[None, :, place] == self._words[guesses, place][:, None])
        return out


def new_policy(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config()).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # Larger than the usual 0.02: so small a model would spend most of its warm-up growing.
            std = 0.5 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
            torch.nn.init.normal_(parameter, std=std)
    return model


def learn(model: Qwen3ForCausalLM, steps: int, lr: float, seed: int) -> float:
    """Imitate the teacher; the loss at the end."""
    teacher = Teacher(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    mean = math.log(len(LETTERS))
    for step in range(1, steps + 1):
        tokens, soft, played = map(torch.from_numpy, teacher.play(GAMES))
        logits = guess_logits(model, tokens, TURNS)
        loss = torch.nn.functional.cross_entropy(logits[played], soft[played])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        mean += 0.05 * (loss.item() - mean)
        if step % 250 == 0:
            print(f"step {step} of {steps}: loss {mean:.3f}", flush=True)
    return mean


def tokenizer() -> PreTrainedTokenizerFast:
    """For engines and trainers that take text; the boxes of the demo exchange token numbers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel(IDS, unk_token=TOKENS[0]))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"<s>|[a-z][.?!]?"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="<s>", pad_token="<s>", unk_token="<s>"
    )
    made.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    made.response_template = {  # an answer is what comes after the last mark, all of it
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": "<s>|[.?!]",
        "fields": {"content": {"content": "text"}},
    }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, default=CHECKPOINT)
    given = parser.parse_args()
    model = new_policy(given.seed)
    loss = learn(model, given.steps, given.lr, given.seed)
    model.bfloat16().save_pretrained(given.into)
    tokenizer().save_pretrained(given.into)
    made = {
        "steps": given.steps,
        "lr": given.lr,
        "seed": given.seed,
        "loss": round(loss, 4),
        "torch": torch.__version__,
    }
    (given.into / "made.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
