"""What the storages hold that a loader works with: which elements of which stand-ins, however they got there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from weightcast.engine.layout import Loop, merge_loops
from weightcast.engine.numbers import (
    CONSTANTS,
    COPIES,
    MOVES,
    Numbers,
    Run,
    TooManyError,
    constants,
    elements_of_storage,
    move,
    numbers_of_loops,
    runs_of,
    see,
    unit_of_loops,
    unit_of_view,
)
from weightcast.torch.tracing import tensors_in

COMPUTED = "the loader computes with it"
NO_BOX = "the loader rearranges it, and the result is not a box"


@dataclass(frozen=True)
class Trace:
    """What a storage holds: elements of one stand-in in nested ``loops``, or those of any in ``numbers``.

    Without either it holds something that cannot be traced.
    """

    names: frozenset[str]
    dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes it was cast through, from the stand-in's to its own."""
    index: int = 0
    """The stand-in's, for ``loops``."""
    offset: int = 0
    loops: Sequence[Loop] | None = None
    """Over the storage, outermost first, and over the stand-in from ``offset`` on."""
    numbers: Numbers | None = None
    reason: str = COMPUTED
    """Why it cannot be traced, if it cannot."""

    @property
    def is_known(self) -> bool:
        return self.loops is not None or self.numbers is not None

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether a view of this storage shows the elements as what they are."""
        return self.is_known and tensor.dtype == self.dtypes[-1] and is_plain(tensor, self.dtypes[-1].itemsize)

    def view(self, tensor: torch.Tensor) -> tuple[int, list[int]] | None:
        """Offset and strides, in the stand-in, of a view of this storage; None if strides cannot describe it."""
        if self.loops is None or not is_plain(tensor, self.dtypes[-1].itemsize):
            return None
        if not tensor.numel():
            return 0, [0] * tensor.ndim
        at, rest = [], tensor.storage_offset()
        for loop in self.loops:
            at.append(rest // loop.here)
            rest -= at[-1] * loop.here
        offset = self.offset + sum(i * loop.there for i, loop in zip(at, self.loops, strict=True))
        strides = []
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if size == 1:
                strides.append(0)
                continue
            k = next((k for k, loop in enumerate(self.loops) if stride and stride % loop.here == 0), None)
            if k is None:
                return None
            many = stride // self.loops[k].here
            at[k] += many * (size - 1)
            if at[k] >= self.loops[k].size:
                return None
            strides.append(many * self.loops[k].there)
        return offset, strides

    @property
    def unit(self) -> int:
        """How many consecutive elements of the storage are consecutive in a stand-in, everywhere."""
        return self.numbers.unit if self.numbers is not None else unit_of_loops(self.loops or ())

    def in_units(self, unit: int) -> torch.Tensor:
        """The storage in numbers."""
        if self.numbers is not None:
            return self.numbers.in_units(unit)
        return numbers_of_loops(self.index, self.offset, self.loops or (), unit).values


Look = Callable[[torch.Tensor], Trace | None]
"""The trace of a tensor's storage; None if it holds nothing of any stand-in."""


def names_of(traces: Iterable[Trace]) -> frozenset[str]:
    return frozenset().union(*(trace.names for trace in traces))


def moved(func: Any, args: Sequence[Any], result: torch.Tensor, look: Look) -> Trace:
    """The trace of what an operation makes of its first argument by moving elements."""
    sources = tensors_in(args[0])
    traces = _traces(sources, look)
    at_hand = all(look(one) is None and one.device.type != "meta" for one in tensors_in(args[1:]))
    if not traces or not at_hand:
        return Trace(names_of(_traces(tensors_in(args), look)))
    if func.overloadpacket in COPIES and (loops := _copied(traces[0], sources[0], result)):
        return loops
    if refused := _refused(traces, sources, look):
        return refused
    together = MOVES[func.overloadpacket](*args)
    unit = math.gcd(unit_of_view(result), *(_unit(one, look) for one in sources)) if together else 1
    try:
        target = constants(elements_of_storage(result), unit or 1)
        found = move(func, args, tree_map(lambda one: _numbers(one, unit or 1, look), args[0]))
    except (TooManyError, RuntimeError):  # an operation may not know numbers: then one tensor is unknown, not all
        return Trace(names_of(traces), reason=NO_BOX)
    see(target.values, result, unit or 1).copy_(found)
    return Trace(names_of(traces), _path(traces[0].dtypes, result.dtype), numbers=target)


def overlaid(func: Any, args: Sequence[Any], target: torch.Tensor, look: Look) -> Trace:
    """The trace of a storage that the loader made itself, of which it overwrites a view."""
    is_constant = func.overloadpacket in CONSTANTS
    if is_constant and (filled := _traces(tensors_in(args[1:]), look)):
        return Trace(names_of([*filled, *_traces([target], look)]))
    sources = [] if is_constant else [args[1].expand(target.shape)]
    both = [target, *sources]
    traces = _traces(both, look)
    if refused := _refused(traces, both, look, target.dtype):
        return refused
    unit = math.gcd(unit_of_view(target), *(_unit(one, look) for one in both)) or 1
    was = look(target)
    try:
        values = constants(elements_of_storage(target), unit).values if was is None else was.in_units(unit).clone()
        new = _numbers(sources[0], unit, look) if sources else constants(1, 1).values
    except TooManyError:
        return Trace(names_of(traces), reason=NO_BOX)
    see(values, target, unit).copy_(new)
    return Trace(names_of(traces), _path(traces[0].dtypes, target.dtype), numbers=Numbers(unit, values))


def runs_between(source: torch.Tensor, target: torch.Tensor, look: Look) -> Iterator[Run]:
    """What a copy moves from a traced storage into a parameter, at even steps on both sides."""
    source = source.expand(target.shape)
    unit = math.gcd(unit_of_view(target), _unit(source, look))
    return runs_of(_numbers(source, unit, look), unit, target.stride(), int(target.storage_offset()))


def is_plain(tensor: torch.Tensor, itemsize: int) -> bool:
    """Whether offset and strides count elements of the storage, and those elements are the values."""
    return tensor.element_size() == itemsize and not tensor.is_conj() and not tensor.is_neg()


def _traces(tensors: Iterable[torch.Tensor], look: Look) -> list[Trace]:
    return [trace for tensor in tensors if (trace := look(tensor)) is not None]


def _copied(trace: Trace, source: torch.Tensor, copy: torch.Tensor) -> Trace | None:
    """The trace of a copy: its elements in the order of its storage. None if that is no nest of loops."""
    view = trace.view(source) if source.dtype in trace.dtypes[-1:] else None
    if view is None:
        return None
    offset, strides = view
    outer_first = sorted(map(Loop, copy.shape, strides, copy.stride()), key=lambda loop: -loop.here)
    return Trace(trace.names, _path(trace.dtypes, copy.dtype), trace.index, offset, merge_loops(outer_first))


def _refused(
    traces: Sequence[Trace], tensors: Iterable[torch.Tensor], look: Look, dtype: torch.dtype | None = None
) -> Trace | None:
    """Why elements of these tensors cannot be numbered together, if they cannot."""
    unknown = next((trace.reason for trace in traces if not trace.is_known), None)
    if unknown is not None:
        return Trace(names_of(traces), reason=unknown)
    paths = {_path(trace.dtypes, dtype or trace.dtypes[-1]) for trace in traces}
    as_they_are = all(trace is None or trace.shows(tensor) for tensor in tensors for trace in [look(tensor)])
    return None if as_they_are and len(paths) == 1 else Trace(names_of(traces))


def _path(dtypes: Sequence[torch.dtype], last: torch.dtype) -> tuple[torch.dtype, ...]:
    return tuple(dtypes) if dtypes[-1] == last else (*dtypes, last)


def _unit(tensor: torch.Tensor, look: Look) -> int:
    """How many elements a number may stand for in a view."""
    trace = look(tensor)
    if trace is None:
        return tensor.shape[-1] if tensor.ndim else 1
    return math.gcd(unit_of_view(tensor), trace.unit)


def _numbers(tensor: torch.Tensor, unit: int, look: Look) -> torch.Tensor:
    trace = look(tensor)
    if trace is not None:
        return see(trace.in_units(unit), tensor, unit)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // unit) if tensor.ndim else ()
    return constants(math.prod(shape), 1).values.reshape(shape)
