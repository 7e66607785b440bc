"""Elements that strided views show, as boxes of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weightcast.engine.layout import Box, Part, Range, natural_strides


@dataclass(frozen=True)
class Dim:
    """``count`` elements in a row: ``here`` apart in the copy, ``there`` apart in the stand-in."""

    count: int
    here: int
    there: int


@dataclass(frozen=True)
class Write:
    """Elements of a parameter's storage that the loader writes; without a ``part``, it is not known with what."""

    part: Part | None
    first: int
    last: int
    elements: int
    box: Box | None
    """The same in the parameter's own coordinates, where they are one."""

    def meets(self, other: Write) -> bool:
        if self.last < other.first or other.last < self.first:
            return False
        return self.box is None or other.box is None or self.box.meets(other.box)


def merge_dims(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    merged: list[Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if last and last.here == dim.count * dim.here and last.there == dim.count * dim.there:
            merged[-1] = Dim(last.count * dim.count, dim.here, dim.there)
        else:
            merged.append(dim)
    return tuple(merged) or (Dim(1, 1, 1),)


def box_of_loops(
    shape: Sequence[int], offset: int, loops: Iterable[tuple[int, int, int]]
) -> tuple[Box, tuple[int, ...]] | None:
    """Some elements of a contiguous tensor as a box, with the step along each dimension on another side.

    A loop is a count, the step in the tensor, and the step on the other side. None if the elements are no box.
    """
    natural = natural_strides(shape)
    ranges, strides = [], [0] * len(natural)
    for width in natural:
        ranges.append(Range(offset // width, 1))
        offset %= width
    # From the innermost out: a loop that runs over the end of a dimension goes on in the one before.
    left = sorted((loop for loop in loops if loop[0] != 1), key=lambda loop: -loop[1])
    while left:
        count, there, here = left.pop()
        axis = next((k for k, width in enumerate(natural) if shape[k] > 1 and there and there % width == 0), None)
        if axis is None:
            return None
        start, step, full = ranges[axis].start, there // natural[axis], shape[axis]
        if ranges[axis].count > 1:  # a second loop over this dimension goes on where the first ends, on both sides
            one = ranges[axis]
            if step != one.count * one.step or here != one.count * strides[axis]:
                return None
            count, step, here = one.count * count, one.step, strides[axis]
        if start + (count - 1) * step >= full:
            if start >= step or full % step or count % (full // step):
                return None
            fitting = full // step
            left.append((count // fitting, natural[axis] * full, here * fitting))
            count = fitting
        if count > 1:
            ranges[axis], strides[axis] = Range(start, count, step), here
    return Box(tuple(ranges)), tuple(strides)


def grid_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor that fills its storage, in the order of its memory; else that of a flat one."""
    dims = sorted(
        ((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1), reverse=True
    )
    shape = tuple(size for _, size in dims)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() == elements and [step for step, _ in dims] == natural_strides(shape):
        return shape
    return (elements,)


def overwritten(writes: Sequence[Write]) -> Iterator[Part]:
    """Parts that something else is written over later."""
    ordered = sorted(enumerate(writes), key=lambda one: one[1].first)
    open_: list[tuple[int, Write]] = []
    for when, write in ordered:
        open_ = [other for other in open_ if other[1].last >= write.first]
        for then, other in open_:
            earlier, later = (other, write) if then < when else (write, other)
            if earlier.part is not None and earlier.part != later.part and earlier.meets(later):
                yield earlier.part
        open_.append((when, write))
