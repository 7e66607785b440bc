"""The cheapest route between versions, and the squashes to cut: pure functions of a listing's edges."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from weightcast.channel.edge import Edge

LEVELS = (8, 64, 512, 4096, 32768)
"""How many versions a squash spans: a replica that lags far takes a few of the widest, then of each narrower kind."""

Route = tuple[Edge, ...]


def cheapest_route(edges: Iterable[Edge], start: int | None, goal: int) -> Route | None:
    """The route of fewest bytes, then of fewest objects; ``start`` is None for a replica that holds nothing."""
    if start == goal:
        return ()
    leaving: dict[int | None, list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.result <= goal:
            leaving[edge.base].append(edge)
    # A replica may also drop its weights and begin at an anchor: "no base" costs nothing to reach.
    best: dict[int | None, tuple[int, int]] = {start: (0, 0), None: (0, 0)}
    by: dict[int | None, Edge] = {}
    ahead: list[tuple[int, int, int]] = []
    at: int | None
    for at in {start, None}:
        _relax(leaving[at], (0, 0), best, by, ahead)
    while ahead:
        nbytes, objects, at = heapq.heappop(ahead)
        if at == goal:
            return _walked(by, start, goal)
        if best[at] == (nbytes, objects):
            _relax(leaving[at], (nbytes, objects), best, by, ahead)
    return None


def _relax(
    edges: list[Edge],
    cost: tuple[int, int],
    best: dict[int | None, tuple[int, int]],
    by: dict[int | None, Edge],
    ahead: list[tuple[int, int, int]],
) -> None:
    for edge in edges:
        through = (cost[0] + edge.nbytes, cost[1] + 1)
        if edge.result not in best or through < best[edge.result]:
            best[edge.result], by[edge.result] = through, edge
            heapq.heappush(ahead, (*through, edge.result))


def _walked(by: dict[int | None, Edge], start: int | None, goal: int) -> Route:
    route, at = [], goal
    while at is not None and at != start:
        edge = by[at]
        route.append(edge)
        at = edge.base  # type: ignore[assignment]
    return tuple(reversed(route))


def reachable(edges: Iterable[Edge], start: int | None = None) -> set[int]:
    """The versions that can be reached from ``start``, or from nothing."""
    leaving: dict[int | None, list[int]] = defaultdict(list)
    for edge in edges:
        leaving[edge.base].append(edge.result)
    found: set[int] = set()
    ahead = [*leaving[None], *leaving[start]]
    while ahead:
        at = ahead.pop()
        if at not in found:
            found.add(at)
            ahead += leaving[at]
    return found


def route_bytes(route: Route) -> int:
    return sum(edge.nbytes for edge in route)


def squashes_due(
    first: int, head: int, have: Collection[tuple[int, int]], levels: Iterable[int] = LEVELS
) -> Iterator[tuple[int, int]]:
    """(base, result) of the squashes to cut, narrow ones first, since wide ones are made from them.

    ``first`` is the oldest version that can still be reached.
    """
    for level in levels:
        for base in range(-(-first // level) * level, head - level + 1, level):
            if (base, base + level) not in have:
                yield base, base + level
