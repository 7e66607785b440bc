"""The digest of a part, from the elements of a parameter's storage: on the host, or on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch

from weightcast.engine.layout import Steps
from weightcast.engine.prepared import unsigned
from weightcast.format.digest import MODULUS
from weightcast.format.kernels import places
from weightcast.torch.kernels.operations import mix


def digest_part(steps: Steps, words: torch.Tensor, chunk: int) -> int:
    """``chunk`` is how many elements are processed at a time where that takes memory."""
    if words.device.type == "cpu":
        return digest_on_host(steps, words)
    return digest_on_device(steps, words, chunk)


def digest_on_host(steps: Steps, words: torch.Tensor) -> int:
    return int(places.digest_places(unsigned(words), steps.source, steps.target, steps.table))


def digest_on_device(steps: Steps, words: torch.Tensor, chunk: int) -> int:
    """The same, by operations of torch."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for index, at in chunks(steps, words.device, chunk):
        total += mix(index, words[at]).sum()
    return int(total.item()) % MODULUS


def chunks(steps: Steps, device: torch.device, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Flat indices of the tensor and places in the storage, at most ``chunk`` at a time."""
    counts, there, here = steps.table.T.tolist()
    inner = next(k for k in range(len(counts)) if prod(counts[k + 1 :]) <= chunk)
    width = prod(counts[inner + 1 :])
    rows = min(counts[inner], chunk // width)

    def grid(strides: Sequence[int]) -> torch.Tensor:
        flat = torch.zeros(1, dtype=torch.int64, device=device)
        for count, stride in zip([rows, *counts[inner + 1 :]], strides[inner:], strict=True):
            flat = (flat[:, None] + torch.arange(count, device=device) * stride).reshape(-1)
        return flat

    sources, targets = grid(there), grid(here)
    for at in product(*map(range, counts[:inner]), range(0, counts[inner], rows)):
        size = min(rows, counts[inner] - at[-1]) * width
        source = steps.source + sum(i * stride for i, stride in zip(at, there, strict=False))
        target = steps.target + sum(i * stride for i, stride in zip(at, here, strict=False))
        yield sources[:size] + source, targets[:size] + target
