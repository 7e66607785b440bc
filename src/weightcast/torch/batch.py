"""Batches: tensors of a model that one kernel launch works on, and what a set of kernels must do."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weightcast.format.codec.ranks import Ranks
from weightcast.format.coding import Coding
from weightcast.format.kernels import cpu
from weightcast.format.scan import Change
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Bits

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size. Signed, since torch supports more operations on those; the bits are the same."""

_CHUNK = 1 << 26
"""Most elements of a copy in one allocation: the allocator finds room for this many among freed activations."""

_ALIGNMENT = 16


def unsigned(words: torch.Tensor) -> Bits:
    """Words on the host as unsigned integers; nothing is copied."""
    bits: Bits = words.numpy()
    return bits.view(f"<u{bits.itemsize}")


@dataclass(eq=False)
class Slot:
    """A tensor of the table and its memory: part of a contiguous ``source``; with ``narrow``, float32 to be rounded."""

    spec: TensorSpec
    source: torch.Tensor
    offset: int = 0
    """Elements of the source before the tensor."""
    narrow: bool = False
    dtensor: torch.Tensor | None = None
    """The DTensor whose local tensor is the source."""

    @property
    def registered(self) -> torch.Tensor:
        """The parameter or buffer: what the model and the optimizer have."""
        return self.source if self.dtensor is None else self.dtensor

    def words(self) -> torch.Tensor:
        """The tensor's memory as flat integers."""
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
        """The dtype that float32 is rounded to, if any."""
        self.device = first.source.device
        self.word = WORDS[self.kind.width // 8]

    def words(self) -> list[torch.Tensor]:
        return [slot.words() for slot in self.slots]

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The chunk of each tensor in a copy, and its offset there."""
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
    """Group slots into batches; a batch of several slots has at most ``most`` elements."""
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
        return [self.tensor(i) for i in range(len(self.batch.slots))]

    def tensor(self, i: int) -> torch.Tensor:
        chunk, offset = self.batch.places[i]
        return self.chunks[chunk][offset : offset + self.batch.sizes[i]]

    def addresses(self) -> list[int]:
        firsts, size = [chunk.data_ptr() for chunk in self.chunks], self.batch.word.itemsize
        return [firsts[chunk] + offset * size for chunk, offset in self.batch.places]


@dataclass(eq=False)
class Ledger:
    """A batch's tensors as of the last delivery: their digests, and checksums once somebody needed them."""

    digests: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64] | None = None

    def replace(self, i: int, bits: Bits, digest: int) -> None:
        """Tensor ``i`` is delivered whole."""
        self.digests[i] = digest
        if self.checksums is not None:
            self.checksums[i] = cpu.checksum(bits, 0)


Sums = Callable[[], npt.NDArray[np.uint64]]
"""Waits for one 64-bit sum per tensor of a batch, in transit to the host: small, and may be kept for long."""


class Delivered(Protocol):
    """What changed in a batch, in transit to the host."""

    @property
    def gains(self) -> Sums:
        """What the changes add to each tensor's digest."""
        ...

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        """A generator that waits, then yields the tensors that changed.

        Those in ``replaced``, by their index in the batch, are sent whole instead: all their bits and their digest.
        """
        ...


def without_undone(change: Change) -> Change | None:
    """The change without elements that have their old bits again, since an edit bypassed the optimizer."""
    assert change.was is not None
    kept = change.was != change.now
    if kept.all():
        return change if kept.size else None
    if not kept.any():
        return None
    prepared = change.prepared
    # Blocks that are coded already hold those elements too, and so may parts.
    left = replace(prepared, ranks=prepared.ranks[kept]) if isinstance(prepared, Ranks) else None
    return replace(change, indices=change.indices[kept], was=change.was[kept], now=change.now[kept], prepared=left)


def log_edits(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        logging.getLogger("weightcast").warning("%s%s changed outside the optimizer: published whole", names[0], more)


def replacement(spec: TensorSpec, bits: Bits, digest: int) -> Change:
    """A change of the whole tensor, whatever its bits were."""
    return Change(spec, np.arange(spec.elements), None, bits, digest)


F = TypeVar("F")


F_co = TypeVar("F_co", covariant=True)


class Comparison(Protocol[F_co]):
    """A batch that is compared with an older copy one tensor at a time."""

    def add(self, i: int, tensor: torch.Tensor) -> None:
        """Compare a tensor, given as the words of its elements; its memory is not read after that."""
        ...

    def flips(self) -> F_co:
        """What `Kernels.differ` finds, once all tensors were added."""
        ...


class Kernels(ABC, Generic[F]):
    """The work on a batch. ``F`` is a kernel set's own form of *flips*: indices, and the old bits there."""

    @abstractmethod
    def take(self, batch: Batch) -> Copied:
        """Copy a batch's wire bits."""

    @abstractmethod
    def differ(self, batch: Batch, old: Copied) -> F:
        """Find where the batch differs from an older copy."""

    def begin(self, batch: Batch, old: Copied) -> Comparison[F] | None:
        """Begin to compare tensors as they arrive; None where they are copied first, for one launch on all of them."""
        return None

    @abstractmethod
    def count(self, flips: F) -> int: ...

    @abstractmethod
    def put(self, copied: Copied, flips: F) -> None:
        """Write the old bits back into a copy."""

    @abstractmethod
    def deliver(
        self, batch: Batch, flips: F, coding: Coding, shadow: Copied | None, ledger: Ledger | None = None
    ) -> Delivered:
        """Read the new bits, prepare the changes for the codec, and send everything to the host.

        A ``shadow`` holds all of the old bits, and is updated. With a ``ledger``, a kernel set may check in the
        background that the old bits are those of the last delivery.
        """

    def settle(self, copied: Copied) -> None:
        """Complete what `deliver` has yet to write into a shadow."""

    def rest(self, batch: Batch) -> None:
        """Free memory on the device that is held only for speed."""

    @abstractmethod
    def digests(self, batch: Batch) -> torch.Tensor:
        """The current digest of each tensor, as signed 64-bit integers on the batch's device."""
