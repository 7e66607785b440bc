"""Groups of streamed tensors: each tensor is copied beside the others of its group as it arrives, so that they can be
compared by one launch, and so that the sender may free or overwrite it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from weightcast.format.spec import TensorSpec
from weightcast.torch.batch import WORDS, Batch, Copied, Slot
from weightcast.torch.transit import PinnedCopy

LIMIT = 1 << 28
"""Bytes of a group; a tensor that is larger is a group of its own."""

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
    """Tensors that are compared together. ``room`` holds them while they arrive."""

    kind: Kind
    room: torch.Tensor | None = None
    nbytes: int = 0
    slots: list[Slot] = field(default_factory=list)
    shadow: Copied | PinnedCopy | None = None
    """Their wire bits as of the last stream; None until the first one is whole."""
    _places: list[tuple[int, int]] = field(default_factory=list)
    _arrived: int = 0

    @property
    def names(self) -> list[str]:
        return [slot.spec.name for slot in self.slots]

    @property
    def is_whole(self) -> bool:
        return self._arrived == len(self.slots)

    def has_room_for(self, nbytes: int) -> bool:
        return self.room is not None and self.nbytes + nbytes <= self.room.numel()

    def add(self, spec: TensorSpec) -> int:
        """Add a tensor to a group that is being formed; returns its index."""
        size = spec.elements * self.kind.dtype.itemsize
        self._places.append((self.nbytes, self.nbytes + size))
        self.nbytes += aligned(size)
        self.slots.append(Slot(spec, _NOWHERE, narrow=self.kind.narrow))
        return len(self.slots) - 1

    def receive(self, i: int, tensor: torch.Tensor) -> None:
        """Copy a tensor that has arrived, in the order of its device's current stream."""
        assert self.room is not None
        first, end = self._places[i]
        source = self.slots[i].source = self.room[first:end].view(self.kind.word)
        # Never `non_blocking`: from pinned memory, the copy would still run when the sender reuses that.
        source.view(tensor.shape).copy_(tensor.view(self.kind.word))
        self._arrived += 1

    @cached_property
    def batch(self) -> Batch:
        """All of them, once the group is formed and whole."""
        return Batch(self.slots)

    def leave(self) -> torch.Tensor | None:
        """Give up the room; returns it."""
        room, self.room, self._arrived = self.room, None, 0
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


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nothing holds now, torch's own reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
