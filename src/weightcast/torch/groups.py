"""Groups of streamed tensors. The sender may free or overwrite a tensor at once: it is compared as it arrives, or
copied beside the others of its group, so that one launch compares them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from weightcast.format.spec import TensorSpec
from weightcast.torch.batch import WORDS, Batch, Comparison, Copied, Slot
from weightcast.torch.transit import PinnedCopy

_SMALLEST, _SENT, _PART = 1 << 26, 1 << 28, 16
_MOST = 1 << 30
"""Bytes of a group, and most elements; a tensor that is larger is a group of its own.

On the host, room in the caches is worth most. On a GPU each group costs a dozen launches, which take the sender longer
than the device: so one group for a small model, up to a 16th of what is free. Where shadows are sent to the device, a
group is compared while the next one's shadow is on its way.
"""

_ALIGNMENT = 16
_NOWHERE = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Kind:
    """What all tensors of a group share."""

    device: torch.device
    dtype: torch.dtype
    """In the stream."""
    wire: str
    narrow: bool
    """Whether float32 is rounded to ``wire``."""

    @property
    def word(self) -> torch.dtype:
        return WORDS[self.dtype.itemsize]


@dataclass(eq=False)
class Group:
    """Tensors that are compared together. They arrive in a ``room``, or in a ``comparison``."""

    kind: Kind
    room: torch.Tensor | None = None
    """Words, in which the tensors are one after the other."""
    comparison: Comparison[Any] | None = None
    """With the shadow."""
    used: int = 0
    """Words of a room."""
    slots: list[Slot] = field(default_factory=list)
    shadow: Copied | PinnedCopy | None = None
    """Their wire bits as of the last stream; None until the first one is whole."""
    _places: list[tuple[tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)
    """Shape, strides and first word of each."""
    _arrived: int = 0

    @property
    def names(self) -> list[str]:
        return [slot.spec.name for slot in self.slots]

    @property
    def is_whole(self) -> bool:
        return self._arrived == len(self.slots)

    def has_room_for(self, elements: int) -> bool:
        return self.room is not None and self.used + elements <= self.room.numel()

    def add(self, spec: TensorSpec) -> int:
        """Add a tensor to a group that is being formed; returns its index."""
        strides = tuple(prod(spec.shape[i + 1 :]) for i in range(len(spec.shape)))
        self._places.append((spec.shape, strides, self.used))
        self.used += aligned(spec.elements)
        self.slots.append(Slot(spec, _NOWHERE, narrow=self.kind.narrow))
        return len(self.slots) - 1

    def receive(self, i: int, tensor: torch.Tensor) -> None:
        """Compare a tensor that has arrived, or copy it, in the order of its device's current stream."""
        words = tensor.view(self.kind.word)
        if self.comparison is not None:
            self.comparison.add(i, words)
        else:
            assert self.room is not None
            source = self.slots[i].source = self.room.as_strided(*self._places[i])
            # Never `non_blocking`: from pinned memory, the copy would still run when the sender reuses that.
            source.copy_(words)
        self._arrived += 1

    @cached_property
    def batch(self) -> Batch:
        """All of them, once the group is formed and whole."""
        return Batch(self.slots)

    def leave(self) -> torch.Tensor | None:
        """Give up the room and the comparison; returns the room."""
        room, self.room, self._arrived = self.room, None, 0
        self.comparison = None
        for slot in self.slots:
            slot.source = _NOWHERE
        return room

    def load(self) -> Copied:
        """The shadow on the device of the tensors."""
        assert self.shadow is not None
        return self.shadow.load() if isinstance(self.shadow, PinnedCopy) else self.shadow

    def store(self, copied: Copied) -> None:
        """Keep what `load` returned after it was changed."""
        if isinstance(self.shadow, PinnedCopy):
            self.shadow.store(copied)


def aligned(elements: int) -> int:
    """Elements of a room for a tensor: the next one begins where the widest loads can be used."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def limit_on(kind: Kind, in_parts: bool) -> int:
    """Elements of a group; ``in_parts``: shadows are sent to the device."""
    size, device = kind.dtype.itemsize, kind.device
    if device.type != "cuda":
        return _SMALLEST // size
    if in_parts:
        return _SENT // size
    return min(_MOST, max(_SMALLEST, free_memory(device) // _PART) // size)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nothing holds now, torch's own reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
