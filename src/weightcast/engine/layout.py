"""Where the elements of a checkpoint are in an engine's own parameters: fused, sharded, stacked, transposed, padded.

A layout is a table of *parts*: a box of a checkpoint tensor, and the elements of a parameter that hold it.
`weightcast.engine.learn` finds layouts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightcast.format.boxes import Box, natural_strides
from weightcast.format.kernels import places
from weightcast.format.spec import TensorTable


@dataclass(frozen=True)
class Part:
    """A box of the checkpoint tensor ``name``, and where a parameter holds it."""

    name: str
    box: Box
    parameter: str
    dtype: str
    """The parameter's dtype; values are cast where the tensor has another."""
    offset: int
    """Of the box's first element, in elements from the beginning of the parameter's storage."""
    strides: tuple[int, ...]
    """Elements of the storage from one coordinate of the box to the next, along each dimension."""

    def steps(self, shape: Sequence[int]) -> Steps:
        """The part as nested loops for kernels, as few as possible."""
        natural = natural_strides(shape)
        along = list(zip(self.box.ranges, natural, self.strides, strict=True))
        loops = merge_loops(Loop(one.count, one.step * width, stride) for one, width, stride in along)
        source = sum(one.start * width for one, width, _ in along)
        return Steps(source, self.offset, np.array(loops, np.int64))


class Loop(NamedTuple):
    """``size`` elements at even steps: ``there`` in a checkpoint tensor, ``here`` in a parameter or a copy."""

    size: int
    there: int
    here: int


def merge_loops(loops: Iterable[Loop]) -> list[Loop]:
    """The same elements in as few nested loops as possible, outermost first; at least one."""
    merged: list[Loop] = []
    for loop in loops:
        if loop.size == 1:
            continue
        outer = merged[-1] if merged else None
        if outer and outer[1:] == (loop.size * loop.there, loop.size * loop.here):
            merged[-1] = loop._replace(size=outer.size * loop.size)
        else:
            merged.append(loop)
    return merged or [Loop(1, 1, 1)]


@dataclass(frozen=True, eq=False)
class Steps:
    """Nested loops over a box, outermost first: the count, the step in the tensor, the step in the parameter."""

    source: int
    target: int
    table: npt.NDArray[np.int64]

    def translate(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of some sorted flat indices are in the box, and where in the parameter's storage those are."""
        first, last = np.searchsorted(indices, [self.source, self._last + 1])
        inside = indices[first:last]
        which, where = np.empty(inside.size, np.int64), np.empty(inside.size, np.int64)
        found = places.translate(inside, self.source, self.target, self.table, which, where)
        return which[:found] + first, where[:found]

    def in_order(self) -> Steps:
        """The same loops over a copy of the elements, in the order of the box."""
        table = self.table.copy()
        table[:, 2] = [prod(table[k + 1 :, 0].tolist()) for k in range(len(table))]
        return Steps(self.source, 0, table)

    @property
    def _last(self) -> int:
        return self.source + int(((self.table[:, 0] - 1) * self.table[:, 1]).sum())

    @property
    def extent(self) -> tuple[int, int]:
        """The elements of the storage that are touched: the first, and one past the last."""
        reach = (self.table[:, 0] - 1) * self.table[:, 2]
        return self.target + int(reach[reach < 0].sum()), self.target + int(reach[reach > 0].sum()) + 1


class Layout:
    """All parts that one worker of an engine holds.

    ``unknown`` names tensors that could not be traced, and why. ``uncovered`` names parameters that the loader leaves
    as they are, in whole or in part, and how many elements of each. ``broken`` says why the loader failed before the
    end of the table, if it did; ``uncovered`` is meaningless then.
    """

    def __init__(
        self,
        table: TensorTable,
        parts: Iterable[Part],
        unknown: Mapping[str, str],
        uncovered: Mapping[str, int] | None = None,
        broken: str | None = None,
    ):
        self.table = table
        self.unknown = dict(unknown)
        self.uncovered = dict(uncovered or {})
        self.broken = broken
        self._by_name: dict[str, list[Part]] = {}
        for part in dict.fromkeys(parts):
            if part.name not in self.unknown and part.box.elements:
                self._by_name.setdefault(part.name, []).append(part)

    def __iter__(self) -> Iterator[Part]:
        return (part for spec in self.table for part in self.locate(spec.name))

    def without(self, parameters: Mapping[str, str], left_out: Container[str]) -> Layout:
        """The layout if some parameters must not be written, each for a reason; some others need not be covered."""
        held = {name: self.by_parameter[name] for name in parameters if name in self.by_parameter}
        unknown = {part.name: parameters[name] for name, parts in held.items() for part in parts}
        uncovered = {name: count for name, count in self.uncovered.items() if name not in left_out}
        return Layout(self.table, self, self.unknown | unknown, uncovered, self.broken)

    def locate(self, name: str) -> tuple[Part, ...]:
        """Where a checkpoint tensor is; empty if this worker does not hold it, or its place is unknown."""
        return () if name in self.unknown else tuple(self._by_name.get(name, ()))

    @cached_property
    def by_parameter(self) -> Mapping[str, tuple[Part, ...]]:
        """The inverse: the parts that each parameter holds."""
        found: dict[str, list[Part]] = {}
        for parts in self._by_name.values():
            for part in parts:
                found.setdefault(part.parameter, []).append(part)
        return {name: tuple(parts) for name, parts in found.items()}
