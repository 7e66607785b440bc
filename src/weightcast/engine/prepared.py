"""Writes that are prepared while the engine serves, and made while it is paused."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.layout import Part
from weightcast.format.kernels import cpu
from weightcast.format.tensors import Bits

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


@dataclass
class Prepared:
    """Writes that bring an engine's parameters to other weights, and the digests that touched boxes have afterwards."""

    room: int | None = None
    """Bytes of memory that it may take."""
    scatters: list[Scatter] = field(default_factory=list)
    rewrites: dict[str, list[Part]] = field(default_factory=dict)
    """Parts to write whole, from the weights themselves: much of them changes, or there was no room."""
    boxes: dict[Part, BoxDigest] = field(default_factory=dict)
    """The digest of every touched box, once it is written."""
    changed: int = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scatters)

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
