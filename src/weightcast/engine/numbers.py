"""Elements followed by their numbers, where offset and strides do not suffice: concatenated, picked, interleaved.

An operation that only moves elements runs a second time, on int64 tensors that hold *numbers* in place of elements:
which tensor, and which element of it. Where a copy into a parameter ends, its numbers are taken apart into nested loops
of even steps. Elements that stay together along the last dimension share one number, so that rows are numbered rather
than elements wherever a loader moves rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

from weightcast.engine.layout import Loop, merge_loops

_EACH = 1 << 42
"""Numbers of one tensor: half of them at most are elements, so that numbers of two tensors are far apart."""

_MOST_TENSORS = 1 << 18

_CONSTANT = -(1 << 62)
"""Elements that are of no tensor: zeros, padding. Differences of other numbers are much nearer to zero."""

_MOST = 1 << 24
"""Numbers of one storage: more would take too much memory."""

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Numbers:
    """The elements of a storage: one number for each ``unit`` of consecutive elements, which follow it."""

    unit: int
    values: torch.Tensor

    def in_units(self, unit: int) -> torch.Tensor:
        if unit == self.unit:
            return self.values
        values = self.values[:, None]
        return torch.where(values == _CONSTANT, _CONSTANT, values + _range(0, self.unit, unit)).reshape(-1)


class TooManyError(Exception):
    """It would take too many numbers."""


def constants(elements: int, unit: int) -> Numbers:
    """A storage that holds elements of no tensor."""
    _refuse_too_many(elements // unit)
    return Numbers(unit, torch.full((elements // unit,), _CONSTANT, device="cpu"))


def numbers_of_loops(tensor: int, offset: int, loops: Sequence[Loop], unit: int) -> Numbers:
    """A dense storage that holds elements of the tensor with a number of its own, in nested loops, outermost first."""
    *outer, inner = loops
    _refuse_too_many(math.prod(loop.size for loop in loops) // unit)
    if tensor >= _MOST_TENSORS:
        raise TooManyError
    values = torch.tensor([tensor * _EACH + offset], device="cpu")
    for loop in (*outer, Loop(inner.size // unit, inner.there * unit, unit)):
        values = (values[:, None] + _range(0, loop.size) * loop.there).reshape(-1)
    return Numbers(unit, values)


def unit_of_loops(loops: Sequence[Loop]) -> int:
    return loops[-1].size if loops[-1].there == 1 else 1


def unit_of_view(tensor: torch.Tensor) -> int:
    """How many elements along the last dimension of a view stay together, in the view and in its storage."""
    if not tensor.ndim or tensor.stride(-1) != 1:
        return 1
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    return math.gcd(tensor.shape[-1], int(tensor.storage_offset()), elements_of_storage(tensor), *steps)


def see(values: torch.Tensor, tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """The ``values`` of a storage's units, as a view of that storage arranges them."""
    if unit == 1:
        return values.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    shape = (*tensor.shape[:-1], tensor.shape[-1] // unit)
    strides = (*(step // unit for step in tensor.stride()[:-1]), 1)
    return values.as_strided(shape, strides, int(tensor.storage_offset()) // unit)


def elements_of_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _range(begin: int, end: int, step: int = 1) -> torch.Tensor:
    return torch.arange(begin, end, step, device="cpu")  # while it loads, an engine's default is a GPU


def _refuse_too_many(count: int) -> None:
    if count > _MOST:
        raise TooManyError


# -- operations that only move elements --------------------------------------------------------------------------------

_aten = torch.ops.aten


def _never(*_: Any) -> bool:
    return False


def _is_last(dim: int, ndim: int) -> bool:
    return dim % max(ndim, 1) == ndim - 1


MOVES: dict[Any, Callable[..., bool]] = {
    _aten.clone: lambda *_: True,
    _aten._to_copy: lambda *_: True,
    _aten.cat: lambda *_: True,
    _aten.stack: lambda parts, dim=0: dim % (parts[0].ndim + 1) != parts[0].ndim,
    _aten.index_select: lambda x, dim, _: not _is_last(dim, x.ndim),
    _aten.index: lambda x, indices: len(indices) < x.ndim,
    _aten.flip: lambda x, dims: not any(_is_last(dim, x.ndim) for dim in dims),
    _aten.roll: _never,
    _aten.repeat: _never,
    _aten.gather: _never,
    _aten.constant_pad_nd: _never,
}
"""Operations whose result has the elements of their first argument, and whether those along its last dimension stay
together."""

COPIES = {_aten.clone, _aten._to_copy}
CONSTANTS = {_aten.fill_, _aten.zero_}
OVERLAYS = {_aten.copy_, *CONSTANTS}
"""Operations that overwrite a view with elements."""


def move(func: Any, args: Sequence[Any], numbers: Any) -> torch.Tensor:
    """The numbers after an operation, given those of its first argument."""
    if func.overloadpacket in COPIES:
        return numbers  # type: ignore[no-any-return]
    rest = (*args[1:2], _CONSTANT) if func.overloadpacket is _aten.constant_pad_nd else args[1:]
    rest = tree_map(lambda one: one.cpu() if isinstance(one, torch.Tensor) else one, rest)
    return func(numbers, *rest)  # type: ignore[no-any-return]


# -- numbers to loops --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Elements of a tensor, or of none, at even steps on both sides."""

    index: int | None
    """The tensor's."""
    offset: int
    """Of the first element in the tensor."""
    at: int
    """Of the first element on the other side."""
    loops: Sequence[Loop]


def runs_of(numbers: torch.Tensor, unit: int, strides: Sequence[int], begin: int) -> Iterator[Run]:
    """What the numbers in a view are, if the other side begins at ``begin`` with these ``strides``."""
    steps = (*strides[:-1], unit) if unit > 1 else tuple(strides)
    for first, at, loops in _runs(numbers.numpy(), steps):
        index, offset = divmod(first, _EACH)
        yield Run(index if index >= 0 else None, offset, begin + at, merge_loops((*loops, Loop(unit, 1, 1))))


_Found = tuple[int, int, tuple[Loop, ...]]


def _runs(numbers: Array, strides: Sequence[int]) -> Iterator[_Found]:
    """Neighbours along the first dimension that look alike from inside are taken apart together."""
    if not numbers.ndim:
        yield int(numbers), 0, ()
        return
    flat = numbers.reshape(len(numbers), -1)
    heads = flat[np.arange(len(flat)), (flat != _CONSTANT).argmax(axis=1)]
    inside = np.where(flat == _CONSTANT, _CONSTANT, flat - heads[:, None])
    ends = [*(1 + np.flatnonzero((inside[1:] != inside[:-1]).any(axis=1))).tolist(), len(numbers)]
    begin = 0
    for end in ends:
        inner = list(_runs(inside[begin].reshape(numbers.shape[1:]), strides[1:]))
        for head, at, outer in _sequences(heads[begin:end], strides[0]):
            for first, further, loops in inner:
                known = _CONSTANT if first == _CONSTANT else head + first
                yield known, begin * strides[0] + at + further, (*outer, *loops)
        begin = end


def _sequences(values: Array, stride: int) -> Iterator[_Found]:
    """A list of numbers as evenly spaced runs, and those as runs of runs where all of them are alike."""
    steps = np.diff(values)
    is_near = np.abs(steps) < _EACH // 2
    turns = 1 + np.flatnonzero(steps[1:] != steps[:-1])

    def length(begin: int) -> int:
        if begin >= steps.size or not is_near[begin]:
            return 1
        turn = int(np.searchsorted(turns, begin + 1))
        return (int(turns[turn]) if turn < turns.size else steps.size) - begin + 1

    size = length(0)  # of the first run
    if 1 < size < values.size and values.size % size == 0:
        rows = values.reshape(-1, size)
        if np.array_equal(rows - rows[:, :1], np.broadcast_to(rows[0] - rows[0, 0], rows.shape)):
            inner = Loop(size, int(steps[0]), stride)
            yield from ((first, at, (*loops, inner)) for first, at, loops in _sequences(rows[:, 0], stride * size))
            return
    begin = 0
    while begin < values.size:
        size = length(begin)
        if size == 2 < length(begin + 1):
            size = 1
        loops = (Loop(size, int(steps[begin]), stride),) if size > 1 else ()
        yield int(values[begin]), begin * stride, loops
        begin += size
