"""What flips: counted exactly over successive versions of a tensor, from its bits alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightcast.analysis.floats import FloatLayout, layout_of
from weightcast.analysis.steps import History
from weightcast.format.workers import ONE, Workers

Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.unsignedinteger]
"""Elements of a tensor at successive versions, one row for each."""

_SPAN_BYTES = 1 << 25
"""Bytes of the rows that are looked at in one go: all of them stay in a few times as much memory."""

DISTANCES = 65
"""Classes of distances: 1, 2, 3–4, 5–8, … units in the last place; none is wider than 64 bits."""


def intervals(steps: int) -> tuple[int, ...]:
    """1, 2, 4, 8, …: as many versions between two syncs as there are steps for.

    >>> intervals(6)
    (1, 2, 4)
    """
    return tuple(1 << i for i in range(steps.bit_length()))


@dataclass(frozen=True)
class Union:
    """What changes between syncs that are some versions apart, summed over the windows that fit into the steps."""

    windows: int
    changed: int = 0
    """Elements that differ at the end of a window from its beginning: what one sync ships."""
    touched: int = 0
    """Elements that changed at any time in it."""

    def __add__(self, other: Union) -> Union:
        return Union(self.windows, self.changed + other.changed, self.touched + other.touched)


@dataclass(frozen=True, eq=False)
class Exponents:
    """Weights and flips by the field of the old weight's exponent, summed over all steps."""

    weights: Counts
    flips: Counts
    distances: Counts
    """Flips by distance in units in the last place: 1, 2, 3–4, 5–8, …"""
    away: int = 0
    """Flips to a larger magnitude with the same sign."""
    towards: int = 0
    """Flips to a smaller one."""
    across: int = 0
    """Flips to the other sign."""

    def __add__(self, other: Exponents) -> Exponents:
        return Exponents(
            self.weights + other.weights,
            self.flips + other.flips,
            self.distances + other.distances,
            self.away + other.away,
            self.towards + other.towards,
            self.across + other.across,
        )


@dataclass(frozen=True, eq=False)
class Flips:
    """All that is counted of a tensor, or of several tensors of one dtype."""

    elements: int
    changed: tuple[int, ...]
    """Elements that each step changes."""
    returned: int
    """Of these, those that got bits which the element had at an earlier version."""
    unions: Mapping[int, Union]
    """By the number of versions between two syncs."""
    exponents: Exponents | None = field(default=None)
    """None for a dtype that is not one of floats."""

    def __add__(self, other: Flips) -> Flips:
        mine, theirs = self.exponents, other.exponents
        return Flips(
            self.elements + other.elements,
            tuple(a + b for a, b in zip(self.changed, other.changed, strict=True)),
            self.returned + other.returned,
            {each: union + other.unions[each] for each, union in self.unions.items()},
            mine + theirs if mine is not None and theirs is not None else None,
        )

    @property
    def total(self) -> int:
        """Flips of all steps together."""
        return sum(self.changed)


def flips_of(histories: Sequence[History], workers: Workers = ONE) -> Flips:
    """Count some tensors of one dtype, with as many versions, in bundles of bounded size."""
    layout = layout_of(histories[0].spec.dtype)

    def count(bundle: Sequence[_Piece]) -> Flips:
        rows = [history.span(first, last) for history, first, last in bundle]
        return count_span(rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1), layout)

    counted = workers.stream(count, _bundles(histories), lambda bundle: sum(last - first for _, first, last in bundle))
    return reduce(lambda a, b: a + b, counted)


_Piece = tuple[History, int, int]
"""Some elements of a tensor: those from the first to before the last."""


def _bundles(histories: Sequence[History]) -> Iterator[list[_Piece]]:
    """All elements of all tensors: small tensors together, large ones in pieces; at least one, which may be empty."""
    most = max(1, _SPAN_BYTES // (histories[0].base.itemsize * (len(histories[0].steps) + 1)))
    bundle: list[_Piece] = []
    room = most
    for history in histories:
        for first in range(0, history.base.size, most):
            last = min(first + most, history.base.size)
            if bundle and last - first > room:
                yield bundle
                bundle, room = [], most
            bundle.append((history, first, last))
            room -= last - first
    yield bundle or [(histories[0], 0, 0)]


def count_span(rows: Rows, layout: FloatLayout | None) -> Flips:
    """Count some elements at successive versions."""
    flipped = [np.flatnonzero(before != after) for before, after in pairwise(rows)]
    return Flips(
        rows.shape[1],
        tuple(int(at.size) for at in flipped),
        sum(_returns(rows, step, at) for step, at in enumerate(flipped)),
        {each: _union(rows, flipped, each) for each in intervals(len(flipped))},
        None if layout is None else _by_exponent(rows, flipped, layout),
    )


def _returns(rows: Rows, step: int, at: npt.NDArray[np.intp]) -> int:
    """How many elements get bits in a step that they had before it."""
    now = rows[step + 1, at]
    seen = np.zeros(at.size, bool)
    for version in range(step):
        seen |= rows[version, at] == now
    return int(np.count_nonzero(seen))


def _union(rows: Rows, flipped: list[npt.NDArray[np.intp]], each: int) -> Union:
    windows = len(flipped) // each
    changed = touched = 0
    for first in range(0, windows * each, each):
        changed += int(np.count_nonzero(rows[first] != rows[first + each]))
        hit = np.zeros(rows.shape[1], bool)
        for at in flipped[first : first + each]:
            hit[at] = True
        touched += int(np.count_nonzero(hit))
    return Union(windows, changed, touched)


def _by_exponent(rows: Rows, flipped: list[npt.NDArray[np.intp]], layout: FloatLayout) -> Exponents:
    present = np.bincount(layout.field(rows[0]), minlength=layout.exponents)
    weights, flips = np.zeros_like(present), np.zeros_like(present)
    distances = np.zeros(DISTANCES, np.int64)
    away = towards = across = 0
    for step, at in enumerate(flipped):
        old, new = rows[step, at], rows[step + 1, at]
        hit = np.bincount(layout.field(old), minlength=layout.exponents)
        weights += present
        flips += hit
        present = present - hit + np.bincount(layout.field(new), minlength=layout.exponents)
        before, after = layout.ordinals(old), layout.ordinals(new)
        crossed = (old ^ new) & old.dtype.type(layout.sign) != 0
        grown = np.abs(after) > np.abs(before)
        across += int(np.count_nonzero(crossed))
        away += int(np.count_nonzero(grown & ~crossed))
        towards += int(np.count_nonzero(~grown & ~crossed))
        distances += np.bincount(classes(before, after), minlength=DISTANCES)
    return Exponents(weights, flips, distances, away, towards, across)


def classes(before: Counts, after: Counts) -> npt.NDArray[np.int64]:
    """The class of each distance: 0 for 1 (or none, between the two zeros), 1 for 2, 2 for 3–4, 3 for 5–8, …"""
    # Unsigned: two F64 may be almost 2⁶⁴ apart.
    apart = np.maximum(before, after).astype(np.uint64) - np.minimum(before, after).astype(np.uint64)
    rest = np.maximum(apart, np.uint64(1)) - np.uint64(1)
    found = np.zeros(rest.shape, np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        large = rest >> np.uint64(shift) > 0
        found += large * shift
        rest = np.where(large, rest >> np.uint64(shift), rest)
    return found + (rest > 0)
