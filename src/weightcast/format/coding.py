"""How a publisher codes what changed: the codec, and the boxes that readers of parts of a tensor want (SPEC 5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

import numpy as np

from weightcast.format.boxes import Box, Indices, Place, natural_strides, place_of, whole
from weightcast.format.codec import CodecName
from weightcast.format.cut import Cut
from weightcast.format.patch import TensorPatch
from weightcast.format.spec import TensorSpec

MAX_BOXES = 64
"""Of one tensor: each costs a row of the table, and a block at least."""


@dataclass(eq=False)
class Cutting:
    """Which boxes the tensors of a detector are coded in. The cuts may be set from any thread; scans that begin later
    follow them.
    """

    cuts: tuple[Cut, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    """Where the detector's tensors are boxes of others: by their names, the place of each."""

    def __post_init__(self) -> None:
        self._known: tuple[tuple[Cut, ...], dict[str, tuple[Box, ...]]] = (self.cuts, {})

    def follow(self, cuts: tuple[Cut, ...]) -> None:
        """Set the cuts."""
        if cuts != self.cuts:
            self.cuts = cuts

    def boxes(self, spec: TensorSpec) -> tuple[Box, ...]:
        """The boxes of a detector's tensor, in order of their offsets; none if it is coded as it is."""
        cuts, known = self._known
        if cuts is not self.cuts:
            cuts, known = self._known = (self.cuts, {})
        if spec.name not in known:
            known[spec.name] = _boxes(self.places.get(spec.name) or place_of(spec, whole(spec.shape)), cuts)
        return known[spec.name]


def _boxes(place: Place, cuts: Sequence[Cut]) -> tuple[Box, ...]:
    """A box cut where its tensor is; by the first of the cuts alone where all of them would make too many boxes."""
    if place.spec.kind.per_value < 8 or not place.box.elements:
        return ()
    ranges = place.box.ranges
    edges: list[set[int]] = [set() for _ in ranges]
    for cut in cuts:
        if not cut.applies_to(place.spec):
            continue
        inside = ranges[cut.axis]
        begin, end = inside.start, inside.start + inside.count
        more = edges[cut.axis] | {at - begin for at in cut.edges(place.spec.shape[cut.axis]) if begin < at < end}
        others = prod(len(found) + 1 for axis, found in enumerate(edges) if axis != cut.axis)
        if others * (len(more) + 1) <= MAX_BOXES:
            edges[cut.axis] = more
    if not any(edges):
        return ()
    along = [list(pairwise([0, *sorted(found), one.count])) for found, one in zip(edges, ranges, strict=True)]
    return tuple(
        Box.of([begin for begin, _ in spans], [end - begin for begin, end in spans]) for spans in product(*along)
    )


@dataclass(frozen=True, eq=False)
class Coding:
    """What a detector prepares its changes for."""

    codec: CodecName
    cutting: Cutting = field(default_factory=Cutting)

    @property
    def is_banded(self) -> bool:
        return self.codec == "banded"

    def boxes(self, spec: TensorSpec) -> tuple[Box, ...]:
        """As of `Cutting`. Of a `gap` block a reader finds its own changes without the old bits of others."""
        return self.cutting.boxes(spec) if self.is_banded else ()


def cut_tensor(patch: TensorPatch, places: Sequence[Place]) -> list[tuple[Place, TensorPatch]]:
    """The parts of a tensor's patch that are in some boxes; those without changes are left out."""
    cells = _cells(places)
    of_change = _cell_of(patch.indices, patch.spec, places) if cells else None
    found = []
    for i, place in enumerate(places):
        mine = np.flatnonzero(of_change == cells[i]) if of_change is not None else np.arange(patch.changed)
        chosen, local = place.within(patch.indices[mine])
        chosen = mine[chosen]
        if chosen.size:
            old = None if patch.old is None else patch.old[chosen]
            found.append((place, TensorPatch(place.part, local, patch.new[chosen], old, patch.digest)))
    return found


def _starts(places: Sequence[Place]) -> list[list[int]]:
    """Where boxes begin, along each dimension."""
    return [sorted(set(along)) for along in zip(*(place.box.offset for place in places), strict=True)]


def _cells(places: Sequence[Place]) -> list[int]:
    """The cell of each box in the grid that all of their beginnings make; nothing unless each is in one of its own."""
    starts, found = _starts(places), []
    for place in places:
        cell = 0
        for along, one in zip(starts, place.box.ranges, strict=True):
            i = along.index(one.start)
            if i + 1 < len(along) and along[i + 1] < one.start + one.count:
                return []
            cell = cell * len(along) + i
        found.append(cell)
    return found if len(set(found)) == len(found) else []


def _cell_of(indices: Indices, spec: TensorSpec, places: Sequence[Place]) -> Indices:
    """The cell of each element: one pass for all boxes."""
    found = np.zeros(indices.size, np.int64)
    for along, size, stride in zip(_starts(places), spec.shape, natural_strides(spec.shape), strict=True):
        if len(along) > 1:
            rows = indices // stride
            found = found * len(along) + np.searchsorted(along, rows - rows // size * size, side="right") - 1
    return found


def place_within(outer: Place, box: Box) -> Place:
    """A box of a box, in the tensor."""
    offset = [one + other for one, other in zip(outer.box.offset, box.offset, strict=True)]
    return place_of(outer.spec, Box.of(offset, box.shape))
