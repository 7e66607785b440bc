"""What a worker holds of a box of a tensor: which of its blocks, and their bits in the order of the box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from weightcast.engine.casts import cast_back
from weightcast.engine.layout import Part
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import unsigned
from weightcast.format.boxes import Box, Indices, Place, Range, natural_strides
from weightcast.format.codec.blocks import Window
from weightcast.format.kernels.bands import BLOCK
from weightcast.format.tensors import Bits

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Overlap:
    """The elements that a part and a box have in common."""

    part: Part
    inside: tuple[slice, ...]
    """Of the part's box."""
    within: Box
    """Coordinates in the box; it may have gaps."""


def overlap_of(part: Part, box: Box) -> Overlap | None:
    """None if they have no element in common."""
    inside, within = [], []
    for mine, theirs in zip(part.box.ranges, box.ranges, strict=True):
        first = max(0, -((mine.start - theirs.start) // mine.step))
        count = min(mine.count, (theirs.start + theirs.count - 1 - mine.start) // mine.step + 1) - first
        if count <= 0:
            return None
        inside.append(slice(first, first + count))
        step = mine.step if count > 1 else 1
        within.append(Range(mine.start + first * mine.step - theirs.start, count, step))
    return Overlap(part, tuple(inside), Box(tuple(within)))


class Held:
    """What some parts, no two of them of the same box, hold of a place.

    It is a *run* if it is consecutive elements in the place's own order: all of it, or rows of it. A run is read
    without a copy where a parameter on the host has it in that order, too. Anything else is copied.
    """

    def __init__(self, place: Place, overlaps: Sequence[Overlap]):
        self.place = place
        self.overlaps = tuple(overlaps)
        self.run = _run_of(place, overlaps)

    @property
    def is_all(self) -> bool:
        return self.run == range(self.place.box.elements)

    def blocks(self, ordinals: Indices) -> tuple[Flags, Flags]:
        """Which blocks of the place are held whole, and which of them at least in part.

        Parts of a layout that was proven do not overlap, so what they hold adds up.
        """
        if self.is_all:
            everything = np.ones(ordinals.size, bool)
            return everything, everything.copy()
        begins = ordinals * BLOCK
        ends = np.minimum(begins + BLOCK, self.place.box.elements)
        counts = np.zeros(ordinals.size, np.int64)
        for one in self.overlaps:
            counts += count_before(one.within, self.place.box.shape, ends)
            counts -= count_before(one.within, self.place.box.shape, begins)
        return counts == ends - begins, counts > 0

    def choose(self, indices: Indices) -> Flags:
        """Which elements of the place are held."""
        chosen = np.zeros(indices.size, bool)
        for one in self.overlaps:
            chosen |= _contains(one.within, self.place.box.shape, indices)
        return chosen

    def between(self, first: int, end: int) -> Indices:
        """The elements that are held, of those from ``first`` on."""
        pieces = [np.arange(begin, min(begin + BLOCK, end)) for begin in range(first, end, BLOCK)]
        return np.concatenate([piece[self.choose(piece)] for piece in pieces])

    def window(self, live: LiveParameters) -> Window | None:
        """The bits that are held: of a run alone, else with others of no meaning between them.

        None if a parameter holds a value that is not a cast of the tensor's dtype.
        """
        if self.run is not None:
            (one,) = self.overlaps
            bits = _bits_of(live, one, self.place.spec.dtype)
            return None if bits is None else Window(self.run.start, bits)
        found = np.empty(self.place.box.shape, self.place.spec.kind.word)
        for one in self.overlaps:
            bits = _bits_of(live, one, self.place.spec.dtype)
            if bits is None:
                return None
            found[_slices(one.within)] = bits.reshape(one.within.shape)
        return Window(0, found.reshape(-1))

    def words(self, live: LiveParameters) -> torch.Tensor | None:
        """All elements of the place on their device, copied if they are in another order there.

        None if not all are held, or if they were cast.
        """
        if not self.is_all or self.overlaps[0].part.dtype != self.place.spec.dtype:
            return None
        return live.view(self.overlaps[0].part)[self.overlaps[0].inside].reshape(-1).contiguous()


def count_before(box: Box, shape: Sequence[int], edges: Indices) -> Indices:
    """How many elements of a box have a flat index, in a tensor of ``shape``, below each of some edges."""
    total, rest, inner = np.zeros(edges.size, np.int64), edges, box.elements
    is_inside = np.ones(edges.size, bool)
    for one, stride in zip(box.ranges, natural_strides(shape), strict=True):
        at, rest = np.divmod(rest, stride)
        inner //= one.count
        before = np.clip(-((one.start - at) // one.step), 0, one.count)
        total += is_inside * before * inner
        is_inside &= (before < one.count) & (one.start + before * one.step == at)
    return total + (is_inside & (rest > 0))  # a rest is left of a scalar's end alone


def _contains(box: Box, shape: Sequence[int], indices: Indices) -> Flags:
    found, rest = np.ones(indices.size, bool), indices
    for one, stride in zip(box.ranges, natural_strides(shape), strict=True):
        at, rest = np.divmod(rest, stride)
        hops, gap = np.divmod(at - one.start, one.step)
        found &= (gap == 0) & (hops >= 0) & (hops < one.count)
    return found


def _run_of(place: Place, overlaps: Sequence[Overlap]) -> range | None:
    if len(overlaps) != 1:
        return None
    (one,) = overlaps
    if one.within.shape == place.box.shape:
        return range(place.box.elements)
    if any(along.step > 1 for along in one.within.ranges):
        return None
    first = Place(place.part, one.within).first
    return None if first is None else range(first, first + one.within.elements)


def _bits_of(live: LiveParameters, one: Overlap, dtype: str) -> Bits | None:
    """In the tensor's dtype and the order of the box: where they are, if they are in this order on the host."""
    words: torch.Tensor = live.view(one.part)[one.inside]
    return cast_back(unsigned(words.contiguous().cpu().reshape(-1)), dtype, one.part.dtype)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(one.start, one.last + 1, one.step) for one in box.ranges)


def elements_of(parts: Sequence[Part]) -> int:
    return sum(prod(part.box.shape) for part in parts)
