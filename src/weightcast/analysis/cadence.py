"""What squashes and anchors cost and save on a channel like this one, by how often they are cut. An estimate.

A channel of `HORIZON` versions is made of the measured sizes, and the project's own functions decide what is fetched
(`cheapest_route`), cut (`squashes_due`) and kept (`collectable`). Nothing is encoded for that: the sizes of the deltas
repeat, and squashes wider than those that were measured continue the growth of the widest two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcast.channel.edge import Edge
from weightcast.channel.retention import Inventory, Kept, Retention, collectable
from weightcast.channel.route import LEVELS, cheapest_edges, squashes_due

HORIZON = 512
"""Versions of the channel that is estimated; costs are those of its second half, once there is something to skip."""

SQUASHES: tuple[tuple[int, ...], ...] = ((), (4, 32, 256), LEVELS[:2], (16, 128))
"""Levels of squashes, each eight times as wide as the one before; 8 and 64 are those of `weightcast squash`."""

ANCHORS: tuple[int | None, ...] = (None, 256, 64, 16)
"""Versions from one anchor to the next; None for version 0 alone."""

_STARTS = 16
"""Versions that replicas are away at, in the estimate of what coming back costs."""


@dataclass(frozen=True)
class Fleet:
    """Who reads the channel, and how: an assumption."""

    replicas: int = 8
    """Each follows every version."""
    joins: float = 1.0
    """How often, in a hundred versions, each begins with nothing, and how often it comes back to a channel that is
    up to a hundred versions ahead."""


@dataclass(frozen=True)
class Cadence:
    """What one way to cut squashes and anchors costs, in bytes for each version."""

    levels: tuple[int, ...]
    anchor_every: int | None
    uploaded: float
    """Deltas, squashes and anchors."""
    downloaded: float
    """By all replicas: deltas, joins and returns."""
    join: float
    """One replica that begins with nothing, in the mean."""
    back: float
    """One replica that comes back, in the mean."""
    stored: int
    """In the bucket after a collection that keeps the last hundred versions."""

    @property
    def moved(self) -> float:
        return self.uploaded + self.downloaded


def squash_bytes(windows: Mapping[int, Sequence[int]], span: int, most: int) -> float:
    """The size of a squash over ``span`` versions: measured, or as the growth of the widest two continues."""
    means = {each: sum(sizes) / len(sizes) for each, sizes in windows.items() if sizes}
    if span in means:
        return float(min(means[span], most))
    widest = max(means)
    growth = math.log2(means[widest] / means[widest // 2]) if widest > 1 and means[widest // 2] else 1.0
    return float(min(means[widest] * (span / widest) ** min(max(growth, 0.0), 1.0), most))


def cadences(
    deltas: Sequence[int], windows: Mapping[int, Sequence[int]], model_bytes: int, fleet: Fleet
) -> list[Cadence]:
    """Every way to cut that is considered, the one that moves the fewest bytes first."""
    found = [_cadence(deltas, windows, model_bytes, fleet, levels, every) for levels in SQUASHES for every in ANCHORS]
    return sorted(found, key=lambda one: (one.moved, one.stored))


def _cadence(
    deltas: Sequence[int],
    windows: Mapping[int, Sequence[int]],
    model_bytes: int,
    fleet: Fleet,
    levels: tuple[int, ...],
    anchor_every: int | None,
) -> Cadence:
    edges = list(_edges(deltas, windows, model_bytes, levels, anchor_every))
    late = range(HORIZON // 2, HORIZON)
    follow = _mean(edge.nbytes for edge in edges if edge.kind == "delta" and edge.result in late)
    uploaded = sum(edge.nbytes for edge in edges if edge.result in late) / len(late)
    from_nothing = _costs(edges, None)
    join = _mean(from_nothing[goal] for goal in late)
    back = _mean(_returns(edges))
    read = fleet.replicas * (follow + fleet.joins / 100 * (join + back))
    return Cadence(levels, anchor_every, uploaded, read, join, back, _stored(edges))


def _edges(
    deltas: Sequence[int],
    windows: Mapping[int, Sequence[int]],
    model_bytes: int,
    levels: tuple[int, ...],
    anchor_every: int | None,
) -> Iterable[Edge]:
    anchors = range(0, HORIZON, anchor_every) if anchor_every else (0,)
    for version in anchors:
        yield Edge("anchor", None, version, model_bytes, f"anchors/{version}")
    for version in range(1, HORIZON):
        yield Edge("delta", version - 1, version, deltas[(version - 1) % len(deltas)], f"deltas/{version}")
    sizes = {level: math.ceil(squash_bytes(windows, level, model_bytes)) for level in levels}
    for base, result in squashes_due(0, HORIZON - 1, (), levels):
        yield Edge("squash", base, result, sizes[result - base], f"squashes/{base}-{result}")


def _costs(edges: Sequence[Edge], start: int | None) -> dict[int, int]:
    """Bytes of the cheapest route to each version from ``start``, or from nothing."""
    last = cheapest_edges(edges, start)
    costs: dict[int, int] = {}
    for goal in sorted(last):
        edge = last[goal]
        costs[goal] = edge.nbytes + (0 if edge.base is None or edge.base == start else costs[edge.base])
    return costs


def _returns(edges: Sequence[Edge]) -> Iterable[int]:
    """What replicas fetch that come back after 1 to 100 versions, for some versions that they may be at."""
    for i in range(_STARTS):
        start = HORIZON // 2 + i * (HORIZON // 2 - 100) // _STARTS
        costs = _costs(edges, start)
        yield from (costs[goal] for goal in range(start + 1, start + 101))


def _stored(edges: Sequence[Edge]) -> int:
    """Bytes that a collection leaves; the clock counts versions."""
    head = HORIZON - 1
    kept = tuple(Kept(edge, float(head - edge.result)) for edge in edges)
    ages = {version: float(head - version) for version in range(HORIZON)}
    garbage = collectable(
        Inventory(head, ages, kept, (), frozenset(), ()), Retention(window=100.0, grace=1.0, patience=100.0)
    )
    gone = {edge.key for edge in garbage.edges}
    return sum(edge.nbytes for edge in edges if edge.key not in gone)


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some) if some else 0.0
