"""Training in a few lines: a small torch model with something of everything, a step, and a follower of its channel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from torch import nn

import weightcast as wc
from weightcast.store.memory import MemoryStore
from weightcast.torch import TorchTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DETECTORS = ("transient", "device", "host")
names = count()


class Small(nn.Module):
    """Something of everything: tied weights, a buffer that training changes, one that it does not, a frozen weight."""

    def __init__(self, width: int = 24, words: int = 40):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.up = nn.Linear(width, 3 * width)
        self.norm = nn.BatchNorm1d(3 * width)
        self.down = nn.Linear(3 * width, width)
        self.fixed = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.norm(self.up(self.fixed(hidden)))))
        return self.head(hidden)


def small(dtype: torch.dtype, seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().to(DEVICE, dtype)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (16,), generator=generator).to(DEVICE)
    target = torch.randint(0, 40, (16,), generator=generator).to(DEVICE)
    nn.functional.cross_entropy(model(tokens).float(), target).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def store() -> MemoryStore:
    return MemoryStore(f"torch-{next(names)}")


def bits_of(model: nn.Module) -> dict[str, np.ndarray]:
    """A model as it should arrive: floats as the channel has them, the rest as it is."""
    found = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            found[name] = value.view(torch.int16).numpy().view(np.uint16)
        elif value.dtype == torch.float32:
            found[name] = wc.round_to("BF16", value.numpy())
        else:
            found[name] = value.numpy()
    return found


def same(model: nn.Module, other: nn.Module) -> None:
    mine, others = bits_of(model), bits_of(other)
    assert mine.keys() == others.keys()
    for name, bits in mine.items():
        assert np.array_equal(bits, others[name]), name


class Following:
    """A subscriber with a model of its own, which is asked for every version."""

    def __init__(self, channel: MemoryStore, make: Callable[[], nn.Module] | None = None):
        self.model = make() if make else small(torch.bfloat16, seed=9)
        self.target = TorchTarget(self.model)
        self._subscriber = wc.Subscriber(channel, self.target)

    def catch_up(self) -> wc.Position:
        staged = self._subscriber.poll()
        if staged is not None:
            self._subscriber.apply(staged)
        assert self._subscriber.position is not None
        return self._subscriber.position

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()


def adam(model: nn.Module, lr: float = 3e-5, **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)
