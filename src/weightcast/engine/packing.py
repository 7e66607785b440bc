"""Parameters that an engine packs for its kernels: the same elements in another order, block by block.

To learn a packing, the engine packs *numbers* instead of weights. Most packings split rows or columns into groups; then
every n-th row and column is still evenly spaced, and a part becomes a few parts with steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from weightcast.engine.layout import Layout, Part
from weightcast.format.boxes import Box, Range

_GROUPS = (1, 2, 4, 8, 16, 32, 64)
_MOST = 128
"""Parts that one part may become."""
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Packing:
    """How each matrix of a stack is packed: an element is at ``first`` of its group, plus a number of ``steps``."""

    shape: tuple[int, int]
    groups: tuple[int, int]
    first: Places
    steps: tuple[int, int]
    """From a row, or a column, to the next one of its group."""

    def through(self, part: Part) -> list[Part] | None:
        """Where a part of the unpacked stack is after packing; None unless it has rows and columns as the stack has.

        The tensor's last two dimensions are the stack's rows and columns, or its columns and rows.
        """
        rows, columns = self.shape
        size = rows * columns
        strides = [stride if one.count > 1 else 0 for one, stride in zip(part.box.ranges, part.strides, strict=True)]
        if len(strides) < 2 or any(stride % size for stride in strides[:-2]):
            return None
        fitting = [
            (down, across)
            for down, across in ((-2, -1), (-1, -2))
            if strides[down] in (0, columns) and strides[across] in (0, 1)
        ]
        if not fitting:
            return None
        axes = fitting[0]
        matrix, inside = divmod(part.offset, size)
        at = divmod(inside, columns)
        ranges, sides = part.box.ranges, [part.box.ranges[axis] for axis in axes]
        found = []
        for group in product(range(self.groups[0]), range(self.groups[1])):
            skipped = [(g - a) % n for g, a, n in zip(group, at, self.groups, strict=True)]
            counts = [-(-(one.count - i) // n) for one, i, n in zip(sides, skipped, self.groups, strict=True)]
            if min(counts) <= 0:
                continue
            grouped = [
                Range(one.start + i * one.step, count, one.step * n)
                for one, i, count, n in zip(sides, skipped, counts, self.groups, strict=True)
            ]
            tail, steps = dict(zip(axes, grouped, strict=True)), dict(zip(axes, self.steps, strict=True))
            hops = [(a + i) // n for a, i, n in zip(at, skipped, self.groups, strict=True)]
            place = self.first[group] + sum(hop * step for hop, step in zip(hops, self.steps, strict=True))
            box, packed = Box((*ranges[:-2], tail[-2], tail[-1])), (*part.strides[:-2], steps[-2], steps[-1])
            found.append(replace(part, box=box, offset=matrix * size + int(place), strides=packed))
        return found


def packing_of(places: Places) -> Packing | None:
    """The packing that moves the element of each row and column to ``places``; None if it is not evenly spaced."""
    for rows, columns in sorted(product(_GROUPS, _GROUPS), key=lambda groups: groups[0] * groups[1]):
        if places.shape[0] % rows or places.shape[1] % columns or rows * columns > _MOST:
            continue
        first = places[:rows, :columns]
        steps = (
            int(places[rows, 0] - places[0, 0]) if places.shape[0] > rows else 0,
            int(places[0, columns] - places[0, 0]) if places.shape[1] > columns else 0,
        )
        down, across = (np.arange(n) // g * s for n, g, s in zip(places.shape, (rows, columns), steps, strict=True))
        tiled = np.tile(first, (places.shape[0] // rows, places.shape[1] // columns))
        if np.array_equal(places, tiled + down[:, None] + across[None, :]):
            return Packing((places.shape[0], places.shape[1]), (rows, columns), first, steps)
    return None


def probed(shape: tuple[int, int], pack: Callable[[npt.NDArray[np.uint16]], npt.NDArray[np.uint16]]) -> Places | None:
    """Where ``pack`` moves each 16-bit element of a matrix; None if it does more than move them."""
    numbers = np.arange(shape[0] * shape[1])
    halves = [pack((numbers >> shift).astype(np.uint16).reshape(shape)).reshape(-1) for shift in (0, 16)]
    source = halves[0].astype(np.int64) | halves[1].astype(np.int64) << 16
    if not np.array_equal(np.sort(source), numbers):
        return None
    places = np.empty_like(numbers)
    places[source] = numbers
    return places.reshape(shape)


def repacked(layout: Layout, parameters: Iterable[str], packing: Packing) -> Layout:
    """The layout after some parameters have been packed."""
    chosen, parts, unknown = set(parameters), [], dict(layout.unknown)
    for part in layout:
        moved = packing.through(part) if part.parameter in chosen else [part]
        if moved is None:
            unknown[part.name] = "the engine packs it after loading"
        else:
            parts += moved
    return Layout(layout.table, parts, unknown, layout.uncovered, layout.broken)
