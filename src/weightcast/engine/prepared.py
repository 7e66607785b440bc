"""Writes that are prepared while the engine serves, and made while it is paused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.layout import Part
from weightcast.format.kernels import cpu
from weightcast.format.tensors import Bits

if TYPE_CHECKING:
    from weightcast.torch.kernels.parts import DeviceChanges

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Scatter:
    """Elements of one storage, on its device."""

    words: torch.Tensor
    where: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.where.nbytes + self.values.nbytes

    def apply(self) -> None:
        if self.words.device.type == "cpu":
            cpu.scatter(unsigned(self.words), self.where.numpy(), unsigned(self.values))
        else:
            self.words.index_copy_(0, self.where, self.values)


@dataclass(frozen=True, eq=False)
class Whole:
    """All elements of a part, on its device: where much of it changes, places would take more memory than elements."""

    target: torch.Tensor
    """A view of the storage, in the order of the part's box."""
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def apply(self) -> None:
        self.target.copy_(self.values.reshape(self.target.shape))


@dataclass(frozen=True, eq=False)
class PartChange:
    """What differs in a part: flat indices of the tensor, places in the storage, the values to write there."""

    indices: Places
    where: Places
    values: Bits
    """In the parameter's dtype."""
    box: BoxDigest
    """After the change."""

    @property
    def nbytes(self) -> int:
        """Of places and values."""
        return self.where.nbytes + self.values.nbytes


@dataclass
class Prepared:
    """Writes that bring an engine's parameters to other weights, and the digests that touched boxes have afterwards."""

    room: int | None = None
    """Bytes of memory that it may take."""
    holds_wholes: bool = False
    """Whether parts of which much changes are held, as far as there is room, and not read again to be written."""
    scatters: list[Scatter] = field(default_factory=list)
    wholes: list[Whole] = field(default_factory=list)
    on_device: list[DeviceChanges] = field(default_factory=list)
    """Changes that were decoded where the parameters are."""
    rewrites: dict[str, list[Part]] = field(default_factory=dict)
    """Parts to write whole, from the weights themselves: much of them changes, or there was no room."""
    boxes: dict[Part, BoxDigest] = field(default_factory=dict)
    """The digest of every touched box, once it is written."""
    changed: int = 0

    @property
    def writes(self) -> list[Scatter | Whole | DeviceChanges]:
        return [*self.scatters, *self.wholes, *self.on_device]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.writes)

    @property
    def left(self) -> int | None:
        """Bytes of memory that more may take; None if that is not limited."""
        return None if self.room is None else self.room - self.nbytes

    def add(self, other: Prepared) -> None:
        """Take what was prepared for other tensors."""
        self.scatters += other.scatters
        self.wholes += other.wholes
        self.on_device += other.on_device
        for name, parts in other.rewrites.items():
            self.rewrites.setdefault(name, []).extend(parts)
        self.boxes |= other.boxes
        self.changed += other.changed

    @property
    def parameters(self) -> frozenset[str]:
        """Those that are written."""
        return frozenset(part.parameter for part in self.boxes)

    @property
    def digests(self) -> dict[str, tuple[BoxDigest, ...]]:
        """The boxes' digests by tensor."""
        found: dict[str, tuple[BoxDigest, ...]] = {}
        for part, box in self.boxes.items():
            found[part.name] = (*found.get(part.name, ()), box)
        return found


def unsigned(words: torch.Tensor) -> Bits:
    """A view of words on the host as unsigned integers."""
    bits: Bits = words.numpy()
    return bits.view(f"<u{bits.itemsize}")


def words_of(bits: Bits) -> torch.Tensor:
    bits = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(bits.view("u1" if bits.itemsize == 1 else f"<i{bits.itemsize}"))
