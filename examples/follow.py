"""Train a small transformer; ship every step as a patch; prove that a second copy holds the same bits.

    python examples/follow.py [--steps 12] [--lr 3e-6]

The model learns to add. The first steps bring it off the random start at a large learning rate; then every step of
fine-tuning at an RL-like one is detected, coded three ways, decoded against the follower's own weights and applied.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

import weightcast as wc

ALPHABET = "0123456789+= "
LENGTH = 12


class Adder(nn.Module):
    """A causal transformer over characters, 3.2 M parameters."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(hidden, mask=causal, is_causal=True))
        return logits


def sums(count: int, generator: torch.Generator) -> Tensor:
    """Lines such as `517+94=611  `, as token numbers."""
    pairs = torch.randint(0, 1000, (count, 2), generator=generator).tolist()
    lines = [f"{a}+{b}={a + b}".ljust(LENGTH) for a, b in pairs]
    return torch.tensor([[ALPHABET.index(character) for character in line] for line in lines])


def train(model: Adder, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
    lines = sums(64, generator)
    logits = model(lines[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def published(model: nn.Module) -> wc.Arrays:
    """The fp32 masters as they go on the wire: bf16, by weightcast's own rounding."""
    bits = {name: wc.round_to("BF16", value.numpy()) for name, value in model.state_dict().items()}
    return wc.Arrays(bits, dict.fromkeys(bits, "BF16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-6)
    args = parser.parse_args()
    wc.warm_up()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    console, model = Console(), Adder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with console.status("learning to add, off the wire"):
        for _ in range(60):
            train(model, optimizer, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    trainer = published(model)
    follower = wc.Arrays.copy_of(trainer)  # as if it had downloaded the checkpoint
    trainer_at = follower_at = wc.fingerprint(trainer)
    full = trainer.table.nbytes

    table = Table(
        box=None, title=f"{trainer.table.elements:,} parameters, {full:,} bytes in bf16, AdamW at {args.lr:g}"
    )
    for column in ("step", "loss", "changed", "plain", "gap", "banded", "to full", "position", "proof"):
        table.add_column(column, justify="right", no_wrap=True)
    with Live(table, console=console):
        for step in range(1, args.steps + 1):
            loss = train(model, optimizer, generator)
            after = published(model)
            patch = wc.diff(trainer, after, trainer_at)
            files = {codec: wc.encode(patch, codec, old=trainer) for codec in ("plain", "gap", "banded")}
            trainer, trainer_at = after, wc.advance(trainer_at, patch)

            follower_at = wc.decode(files["banded"], old=follower).apply(follower, follower_at)
            proven = prove_equal(trainer, follower)
            sizes = [f"{len(data) // 1000} kB" for data in files.values()]
            changed, ratio = f"{patch.changed / trainer.table.elements:.2%}", f"1 : {full / len(files['banded']):.0f}"
            table.add_row(str(step), f"{loss:.3f}", changed, *sizes, ratio, proven[:8], "bit-equal")
    console.print(f"\nTrainer and follower both stand at {proven}.", soft_wrap=True)


def prove_equal(trainer: wc.Arrays, follower: wc.Arrays) -> str:
    """Read all bits of both again, remembering nothing; returns the position they share."""
    positions = [wc.fingerprint(weights).position for weights in (trainer, follower)]
    same = all(np.array_equal(trainer.read(spec.name), follower.read(spec.name)) for spec in trainer.table)
    if not same or positions[0] != positions[1]:
        raise SystemExit("the follower holds other bits than the trainer")
    return positions[0]


if __name__ == "__main__":
    main()
