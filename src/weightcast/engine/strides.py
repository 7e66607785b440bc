"""The elements of strided views, as boxes of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weightcast.engine.layout import Loop, Part
from weightcast.format.boxes import Box, Range, natural_strides


@dataclass(frozen=True)
class Write:
    """Elements of a parameter's storage that the loader writes; without a ``part``, their source is unknown."""

    part: Part | None
    first: int
    last: int
    elements: int
    box: Box | None
    """The same elements in the parameter's own coordinates, if they are a box."""

    def meets(self, other: Write) -> bool:
        if self.last < other.first or other.last < self.first:
            return False
        return self.box is None or other.box is None or self.box.meets(other.box)


def box_of_loops(shape: Sequence[int], offset: int, loops: Iterable[Loop]) -> tuple[Box, tuple[int, ...]] | None:
    """The elements of a contiguous tensor that ``loops`` visit, as a box with its strides on the other side.

    ``offset`` is that of the first element. None if the elements are not a box.
    """
    natural = natural_strides(shape)
    ranges, strides = [], [0] * len(natural)
    for width in natural:
        ranges.append(Range(offset // width, 1))
        offset %= width
    # Innermost first: a loop that passes the end of a dimension continues in the next outer one.
    left = sorted((loop for loop in loops if loop.size != 1), key=lambda loop: -loop.there)
    while left:
        count, there, here = left.pop()
        axis = next((k for k, width in enumerate(natural) if shape[k] > 1 and there and there % width == 0), None)
        if axis is None:
            return None
        start, step, full = ranges[axis].start, there // natural[axis], shape[axis]
        if ranges[axis].count > 1:  # a second loop over this dimension must continue the first, on both sides
            one = ranges[axis]
            if step != one.count * one.step or here != one.count * strides[axis]:
                return None
            count, step, here = one.count * count, one.step, strides[axis]
        if start + (count - 1) * step >= full:
            if start >= step or full % step or count % (full // step):
                return None
            fitting = full // step
            left.append(Loop(count // fitting, natural[axis] * full, here * fitting))
            count = fitting
        if count > 1:
            ranges[axis], strides[axis] = Range(start, count, step), here
    return Box(tuple(ranges)), tuple(strides)


def boxes_of_loops(
    shape: Sequence[int], offset: int, at: int, loops: Sequence[Loop]
) -> Iterator[tuple[Box, int, tuple[int, ...]]]:
    """The same as boxes, as few as the shortest loops allow: each with where it begins on the other side, ``at``."""
    boxed = box_of_loops(shape, offset, loops) if all(loop.there > 0 for loop in loops) else None
    if boxed is not None:
        yield boxed[0], at, boxed[1]
        return
    apart = min((loop for loop in loops if loop.size > 1), key=lambda loop: (loop.there > 0, loop.size))
    rest = [loop for loop in loops if loop is not apart]
    for i in range(apart.size):
        yield from boxes_of_loops(shape, offset + i * apart.there, at + i * apart.here, rest)


def grid_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor in the order of its memory; that of a flat one if it does not fill its storage."""
    dims = sorted(
        ((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1), reverse=True
    )
    shape = tuple(size for _, size in dims)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() == elements and [step for step, _ in dims] == natural_strides(shape):
        return shape
    return (elements,)


def overwritten(writes: Sequence[Write]) -> Iterator[Part]:
    """Parts that a later write replaces, in whole or in part."""
    ordered = sorted(enumerate(writes), key=lambda one: one[1].first)
    open_: list[tuple[int, Write]] = []
    for when, write in ordered:
        open_ = [other for other in open_ if other[1].last >= write.first]
        for then, other in open_:
            earlier, later = (other, write) if then < when else (write, other)
            if earlier.part is not None and earlier.part != later.part and earlier.meets(later):
                yield earlier.part
        open_.append((when, write))
