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
    last = cheapest_edges((edge for edge in edges if edge.result <= goal), start)
    route: list[Edge] = []
    at: int | None = goal
    while at != start and at is not None:
        if at not in last:
            return None
        route.append(last[at])
        at = last[at].base
    return tuple(reversed(route))


def cheapest_edges(edges: Iterable[Edge], start: int | None = None) -> dict[int, Edge]:
    """The last edge of the cheapest route to each version that can be reached from ``start``, or from nothing."""
    leaving: dict[int | None, list[Edge]] = defaultdict(list)
    for edge in edges:
        leaving[edge.base].append(edge)
    best: dict[int | None, tuple[int, int]] = {start: (0, 0)}
    last: dict[int, Edge] = {}
    ahead: list[tuple[int, int, int]] = []

    def leave(at: int | None, nbytes: int, objects: int) -> None:
        for edge in leaving[at]:
            cost = (nbytes + edge.nbytes, objects + 1)
            if edge.result not in best or cost < best[edge.result]:
                best[edge.result], last[edge.result] = cost, edge
                heapq.heappush(ahead, (*cost, edge.result))

    leave(start, 0, 0)
    leave(None, 0, 0)  # a replica may also drop its weights and begin at an anchor
    while ahead:
        nbytes, objects, at = heapq.heappop(ahead)
        if best[at] == (nbytes, objects):
            leave(at, nbytes, objects)
    return last


class Reached:
    """The versions that edges lead to from ``start``, or from nothing, while edges are added."""

    def __init__(self, start: int | None = None):
        self.versions: set[int] = set()
        self._starts = {start, None}
        self._leaving: dict[int | None, list[int]] = defaultdict(list)

    def add(self, edges: Iterable[Edge]) -> None:
        ahead = []
        for edge in edges:
            self._leaving[edge.base].append(edge.result)
            if edge.base in self._starts or edge.base in self.versions:
                ahead.append(edge.result)
        while ahead:
            at = ahead.pop()
            if at not in self.versions:
                self.versions.add(at)
                ahead += self._leaving[at]


def reachable(edges: Iterable[Edge], start: int | None = None) -> set[int]:
    """The versions that can be reached from ``start``, or from nothing."""
    reached = Reached(start)
    reached.add(edges)
    return reached.versions


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
