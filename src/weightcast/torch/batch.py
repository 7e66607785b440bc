"""Batches: tensors of a model that one kernel launch works on, and what a set of kernels must be able to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weightcast.format.codec.ranks import Ranks
from weightcast.format.patch import Indices
from weightcast.format.scan import Change
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Bits

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size. Signed, since torch supports more operations on those; the bits are the same."""

_CHUNK = 1 << 26
"""Most elements of a copy in one allocation: an allocator finds room for this among freed activations."""

_ALIGNMENT = 16


@dataclass(eq=False)
class Slot:
    """A tensor of the table and its memory: part of a contiguous ``source``, perhaps as float32 that is rounded."""

    spec: TensorSpec
    source: torch.Tensor
    offset: int = 0
    """Elements of the source before it."""
    narrow: bool = False

    def words(self) -> torch.Tensor:
        """Its memory as flat integers."""
        whole = self.source.detach().view(WORDS[self.source.element_size()]).reshape(-1)
        return whole[self.offset : self.offset + self.spec.elements]

    def address(self) -> int:
        return self.source.data_ptr() + self.offset * self.source.element_size()


class Batch:
    """Slots on one device and of one wire dtype; all or none of them are rounded."""

    def __init__(self, slots: Sequence[Slot]):
        first = slots[0]
        self.slots = tuple(slots)
        self.specs = tuple(slot.spec for slot in slots)
        self.sizes = tuple(spec.elements for spec in self.specs)
        self.kind = first.spec.kind
        self.narrow = first.spec.dtype if first.narrow else None
        """The dtype that float32 is rounded to, if it is."""
        self.device = first.source.device
        self.word = WORDS[self.kind.width // 8]

    def words(self) -> list[torch.Tensor]:
        return [slot.words() for slot in self.slots]

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """In a copy: the chunk and the offset of each tensor."""
        places, chunk, used = [], 0, 0
        for size in self.sizes:
            room = -(-size // _ALIGNMENT) * _ALIGNMENT
            if used and used + room > _CHUNK:
                chunk, used = chunk + 1, 0
            places.append((chunk, used))
            used += room
        return places

    @cached_property
    def chunks(self) -> list[int]:
        """Elements of each chunk of a copy."""
        sizes: list[int] = []
        for (chunk, offset), size in zip(self.places, self.sizes, strict=True):
            sizes[chunk:] = [offset + size]
        return sizes


def batches_of(slots: Sequence[Slot], most: int | None = None) -> list[Batch]:
    """Slots in batches; a batch of several slots has at most ``most`` elements."""
    alike: dict[tuple[object, ...], list[Slot]] = {}
    for slot in slots:
        alike.setdefault((slot.source.device, slot.spec.dtype, slot.narrow), []).append(slot)
    found = []
    for group in alike.values():
        batch: list[Slot] = []
        elements = 0
        for slot in group:
            if batch and most is not None and elements + slot.spec.elements > most:
                found.append(Batch(batch))
                batch, elements = [], 0
            batch.append(slot)
            elements += slot.spec.elements
        found.append(Batch(batch))
    return found


@dataclass(frozen=True, eq=False)
class Copied:
    """The wire bits of a batch's tensors in memory of their own."""

    batch: Batch
    chunks: list[torch.Tensor]

    @classmethod
    def room(cls, batch: Batch) -> Copied:
        return cls(batch, [torch.empty(size, dtype=batch.word, device=batch.device) for size in batch.chunks])

    def words(self) -> list[torch.Tensor]:
        placed = zip(self.batch.places, self.batch.sizes, strict=True)
        return [self.chunks[chunk][offset : offset + size] for (chunk, offset), size in placed]

    def addresses(self) -> list[int]:
        firsts, size = [chunk.data_ptr() for chunk in self.chunks], self.batch.word.itemsize
        return [firsts[chunk] + offset * size for chunk, offset in self.batch.places]


@dataclass(eq=False)
class Ledger:
    """The digests of a batch's tensors as of the last delivery."""

    digests: npt.NDArray[np.uint64]


class Gains(Protocol):
    """What each tensor's digest gains, on its way to the host: small, and may be kept for long."""

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Wait for it: one array of 64-bit integers."""
        ...


class Delivered(Protocol):
    """What changed in a batch, on its way to the host."""

    @property
    def gains(self) -> Gains: ...

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        """Wait, then yield the tensors that changed. Some are ``replaced``: by all their bits and their digest."""
        ...


def change_of(
    spec: TensorSpec, indices: Indices, was: Bits, now: Bits, gain: int, ranks: Ranks | None
) -> Change | None:
    """What changed in a tensor; an edit that bypassed the optimizer may have undone some or all of it."""
    kept = was != now
    if not kept.any():
        return None
    if kept.all():
        return Change(spec, indices, was, now, gain, ranks)
    left = None if ranks is None else Ranks(ranks.ranks[kept], ranks.bands, ranks.uppers, ranks.sizes)
    return Change(spec, indices[kept], was[kept], now[kept], gain, left)


def log_edits(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        logging.getLogger("weightcast").warning("%s%s changed outside the optimizer: published whole", names[0], more)


def replacement(spec: TensorSpec, bits: Bits, digest: int) -> Change:
    """All of a tensor, whatever its bits were."""
    return Change(spec, np.arange(spec.elements), None, bits, digest, None)


F = TypeVar("F")


class Kernels(Protocol, Generic[F]):
    """The work on a batch. ``F`` is a kernel set's own form of *flips*: indices, and the bits that were there."""

    def take(self, batch: Batch) -> Copied:
        """Copy a batch's wire bits."""
        ...

    def differ(self, batch: Batch, old: Copied) -> F:
        """Where the batch differs from an older copy."""
        ...

    def count(self, flips: F) -> int: ...

    def put(self, copied: Copied, flips: F) -> None:
        """Write the bits that were there back into a copy."""
        ...

    def deliver(
        self, batch: Batch, flips: F, ranked: bool, shadow: Copied | None, ledger: Ledger | None = None
    ) -> Delivered:
        """Read the bits that are there now, rank them, and send everything to the host.

        A ``shadow`` holds all of the old bits, and is brought up to date. With a ``ledger`` a kernel set may check in
        the background that the old bits are those that were delivered before.
        """
        ...

    def rest(self, batch: Batch) -> None:
        """Free what is held on the device only for speed."""
        ...

    def digests(self, batch: Batch) -> torch.Tensor:
        """The digest of each tensor as it is now, as signed 64-bit integers, on the batch's device."""
        ...
