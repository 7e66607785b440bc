"""Writes that are prepared while the engine serves, and carried out while it is paused."""

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
    """Writes that bring an engine's parameters to other weights, and the digests that every touched box has then."""

    room: int | None = None
    """Bytes that may be held for it."""
    scatters: list[Scatter] = field(default_factory=list)
    rewrites: dict[str, list[Part]] = field(default_factory=dict)
    """Parts that are written whole, from the weights themselves: so much of them changes, or there was no room."""
    digests: dict[str, list[BoxDigest]] = field(default_factory=dict)
    """Of every touched box, once it is written."""
    changed: int = 0
    part_digests: dict[Part, int | None] = field(default_factory=dict)
    """The same digests by part."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scatters)


class Overwrites:
    """What patches overwrite in one part; later values replace earlier ones."""

    def __init__(self) -> None:
        self.indices = self.where = np.empty(0, np.int64)
        self.values: Bits = np.empty(0, np.uint8)

    def add(self, where: Places, indices: Places, values: Bits) -> None:
        if not self.where.size:
            self.indices, self.where, self.values = indices, where, values
            return
        kept = ~np.isin(self.indices, indices, assume_unique=True)
        order = np.argsort(both := np.concatenate([self.indices[kept], indices]), kind="stable")
        self.indices = both[order]
        self.where = np.concatenate([self.where[kept], where])[order]
        self.values = np.concatenate([self.values[kept], values])[order]


def unsigned(words: torch.Tensor) -> Bits:
    """Words on this side as the unsigned integers they are; their own memory."""
    bits: Bits = words.numpy()
    return bits.view(f"<u{bits.itemsize}")


def words_of(bits: Bits) -> torch.Tensor:
    bits = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(bits.view("u1" if bits.itemsize == 1 else f"<i{bits.itemsize}"))
