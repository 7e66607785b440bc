"""Boxes: one range of coordinates along each dimension of a tensor (SPEC 2.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Bits

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Range:
    """Evenly spaced coordinates along one dimension."""

    start: int
    count: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.step

    def fits(self, size: int) -> bool:
        return self.start >= 0 and self.count >= 0 and self.step >= 1 and self.last < size

    def meets(self, other: Range) -> bool:
        """Whether some coordinate is in both."""
        first, last = max(self.start, other.start), min(self.last, other.last)
        apart, common = other.start - self.start, math.gcd(self.step, other.step)
        if first > last or apart % common:
            return False
        theirs = other.step // common
        shared = self.start + self.step * (apart // common * pow(self.step // common, -1, theirs) % theirs)
        return first + (shared - first) % (self.step * theirs) <= last


@dataclass(frozen=True)
class Box:
    """Some elements of a tensor: one range along each dimension.

    Boxes of the format have no gaps (`of`); those of engines may.
    """

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """The box without gaps that begins at ``offset``."""
        return cls(tuple(Range(start, count) for start, count in zip(offset, shape, strict=True)))

    @cached_property
    def offset(self) -> tuple[int, ...]:
        return tuple(one.start for one in self.ranges)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(one.count for one in self.ranges)

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is inside a tensor of that shape."""
        return len(self.ranges) == len(shape) and all(map(Range.fits, self.ranges, shape))

    def meets(self, other: Box) -> bool:
        """Whether some element is in both."""
        return all(a.meets(b) for a, b in zip(self.ranges, other.ranges, strict=True))

    def is_all_of(self, shape: Sequence[int]) -> bool:
        return self.shape == tuple(shape)


def whole(shape: Sequence[int]) -> Box:
    return Box.of([0] * len(shape), shape)


@dataclass(frozen=True)
class Place:
    """A box without gaps, and the tensor that it is part of."""

    spec: TensorSpec
    box: Box

    @property
    def is_whole(self) -> bool:
        return self.box.is_all_of(self.spec.shape)

    @cached_property
    def label(self) -> str:
        """The tensor's name, with the offset unless the box is all of it: a name of its own for each box."""
        return self.spec.name if self.is_whole else f"{self.spec.name}[{','.join(map(str, self.box.offset))}]"

    @cached_property
    def part(self) -> TensorSpec:
        """The box as a tensor of its own: what detectors and codecs see."""
        return self.spec if self.is_whole else TensorSpec(self.label, self.spec.dtype, self.box.shape)

    @cached_property
    def first(self) -> int | None:
        """The flat index of the first element, if the box is one run of elements of the tensor; else None."""
        inner = 1
        for axis in reversed(range(len(self.box.shape))):
            if inner != math.prod(self.spec.shape[axis + 1 :]) and self.box.shape[axis] > 1:
                return None
            inner *= self.box.shape[axis]
        return sum(one * stride for one, stride in zip(self.box.offset, natural_strides(self.spec.shape), strict=True))

    def flat(self, indices: Indices) -> Indices:
        """Flat indices in the tensor of elements of the box, given by their flat indices there. Order is kept."""
        if self.first is not None:
            return indices + self.first if self.first else indices
        rest, found = indices, np.zeros_like(indices)
        for axis, stride in zip(
            reversed(range(len(self.box.shape))), reversed(natural_strides(self.spec.shape)), strict=True
        ):
            rest, along = np.divmod(rest, self.box.shape[axis])
            found += (along + self.box.offset[axis]) * stride
        return found

    def within(self, indices: Indices) -> tuple[npt.NDArray[np.intp], Indices]:
        """Which of some sorted flat indices of the tensor are in the box: their places in the list, and where there."""
        if self.first is not None:
            begin, end = np.searchsorted(indices, [self.first, self.first + self.box.elements])
            return np.arange(begin, end), indices[begin:end] - self.first
        is_inside, local, inner = np.ones(indices.size, bool), np.zeros_like(indices), 1
        rest = indices
        for one, size in reversed(list(zip(self.box.ranges, self.spec.shape, strict=True))):
            rest, along = np.divmod(rest, size)
            is_inside &= (along >= one.start) & (along < one.start + one.count)
            local += (along - one.start) * inner
            inner *= one.count
        chosen = np.flatnonzero(is_inside)
        return chosen, local[chosen]

    def read(self, tensor: Bits) -> Bits:
        """The bits of the box, from those of the whole tensor; copied unless they are one run of it."""
        if self.first is not None:
            return tensor[self.first : self.first + self.box.elements]
        within = tuple(slice(one.start, one.start + one.count) for one in self.box.ranges)
        return np.ascontiguousarray(tensor.reshape(self.spec.shape)[within]).reshape(-1)


class Held(NamedTuple):
    """A box that one of several ranks has."""

    name: str
    dtype: str
    box: Box


def natural_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def place_of(spec: TensorSpec, box: Box) -> Place:
    """The box of a tensor; `UsageError` if it is not inside it, or cuts values that share a byte."""
    if not box.fits(spec.shape) or any(one.step != 1 for one in box.ranges):
        problem = f"a box of {list(box.shape)} at {list(box.offset)} is not inside a tensor of {list(spec.shape)}"
        raise UsageError(problem, tensor=spec.name)
    if spec.kind.per_value < 8 and not box.is_all_of(spec.shape):
        raise UsageError(f"a tensor of {spec.dtype} cannot be cut into boxes", tensor=spec.name)
    return Place(spec, box)
