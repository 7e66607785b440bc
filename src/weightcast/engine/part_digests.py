"""The digests of parts, from the elements of parameters' storages: on the host, or on any device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from weightcast.engine.layout import Steps
from weightcast.engine.prepared import unsigned
from weightcast.format.digest import MODULUS
from weightcast.format.kernels import places
from weightcast.torch.kernels.operations import mix
from weightcast.torch.model import has_triton
from weightcast.torch.strided import Strided

if TYPE_CHECKING:
    from weightcast.torch.kernels.parts import PartDigests

K = TypeVar("K", bound=Hashable)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return device.type == "cuda" and has_triton()


class DigestReader(Generic[K]):
    """Reads digests of parts. Those on a device with ``has_kernels`` are read by a launch for all parts alike.

    ``chunk`` is how many elements are processed at a time where that takes memory.
    """

    def __init__(self, chunk: int, has_kernels: Callable[[torch.device], bool] = has_kernels):
        self._chunk, self._has_kernels = chunk, has_kernels
        self._together: tuple[tuple[K, ...], PartDigests] | None = None
        """The last parts that were read by one launch, and its tables: they are often asked for again."""

    def reads_together(self, device: torch.device) -> bool:
        return self._has_kernels(device)

    def read(self, parts: Mapping[K, Strided]) -> dict[K, int]:
        """The digests of the bits that are there now."""
        there = {key: part for key, part in parts.items() if self.reads_together(part.words.device)}
        found = self._read_together(there)
        for key, part in parts.items():
            if key not in there:
                found[key] = self._read_alone(part)
        return found

    def _read_together(self, parts: Mapping[K, Strided]) -> dict[K, int]:
        if not parts:
            return {}
        keys, together = tuple(parts), self._together  # once: another thread may read other parts
        if together is None or together[0] != keys:
            from weightcast.torch.kernels.parts import PartDigests

            self._together = together = keys, PartDigests(list(parts.values()))
        return dict(zip(keys, together[1].read(), strict=True))

    def _read_alone(self, part: Strided) -> int:
        steps = Steps(part.source, part.target, part.loops)
        if part.words.device.type == "cpu":
            return digest_on_host(steps, part.words)
        return digest_on_device(steps, part.words, self._chunk)


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
