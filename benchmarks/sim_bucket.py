"""Buckets of a simulated channel, and who fills them: the trainer, `weightcast copy`, and upkeep.

What a bucket holds are the project's own records and edges, without bytes. Which route a reader takes, which squashes
are due, what a copy lacks and what is deleted is decided by the project's own functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, cast

from sim_core import Bins, Flow, Server, Simulation

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge, edge_of
from weightcast.channel.keys import Position, anchor_folder, delta_key, squash_key
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.channel.retention import Inventory, Kept, Retention, collectable
from weightcast.channel.route import Route, cheapest_route, route_bytes, squashes_due
from weightcast.estimate.model import FETCH_PART
from weightcast.follow.bad_edges import BadEdges
from weightcast.follow.planner import Planner
from weightcast.upkeep.copy_plan import Contents, Step, apart, missing

PAGE = 1000
"""Keys that a listing gives per request."""
LIST_EVERY = 30.0
"""Seconds between two listings of a copy, as in `upkeep/copy.py`."""


def position(version: int) -> Position:
    return Position(version, f"{version:064x}")


def manifest_of(version: int, nbytes: int, objects: int) -> Manifest:
    """The commit of a version. Several objects count as one that lies in a folder."""
    at = position(version)
    key = delta_key(at, "0" * 64, "0" * 16 if objects > 1 else None)
    base = position(version - 1)
    return Manifest("c" * 32, at, base, (ObjectRef(key, nbytes, "0" * 64),), "banded", 0, version, 0.0, "trainer")


@dataclass(eq=False)
class Bucket:
    """What is in a bucket, and what it has served."""

    simulation: Simulation
    name: str
    server: Server
    objects: int
    """Of a delta."""
    requests: Bins
    is_away: bool = False
    manifests: dict[int, tuple[Manifest, float]] = field(default_factory=dict)
    """With the time of their arrival."""
    held: dict[str, tuple[Edge, float]] = field(default_factory=dict)
    """Edges by key, with the time of their arrival."""
    head: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Requests, by what was asked for."""
    served: Counter[str] = field(default_factory=Counter)
    """Bytes of objects that were asked for, by kind of edge."""
    watchers: list[Callable[[], None]] = field(default_factory=list)
    """Called when there is a new version."""
    sleepers: dict[Any, None] = field(default_factory=dict)
    """Replicas that ask here for the next version, in the order in which they came."""
    has_first: bool = True
    """Whether it has version 0."""
    _routes: dict[tuple[int | None, int], Route] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._planner = Planner(cast(Chain, self), BadEdges())

    def ask(self, what: str, number: float = 1) -> None:
        self.asked[what] += ceil(number)
        self.requests.add(self.simulation.now, number)

    def asked_since(self, began: float, number: float) -> None:
        """So many requests of a transfer were sent from then on."""
        now = self.simulation.now
        if now > began:
            self.requests.spread(began, now, number / (now - began))
        else:
            self.requests.add(now, number)

    def polled(self, since: float, every: float) -> None:
        """Somebody has asked for the next version from then on."""
        now = self.simulation.now
        self.asked["manifests"] += int((now - since) / every)
        self.requests.spread(since, now, 1 / every)

    def add(self, edge: Edge) -> None:
        self.held[edge.key] = edge, self.simulation.now
        self._routes.clear()

    def commit(self, manifest: Manifest) -> None:
        """A version appears."""
        self.add(edge_of(manifest))
        self.manifests[manifest.position.version] = manifest, self.simulation.now
        self.head = max(self.head, manifest.position.version)
        for told in self.watchers:
            told()

    def route(self, at: int | None, goal: int) -> Route:
        """The route that the project's planner takes; without a listing where the next delta is all of it."""
        manifest = self.manifests.get(goal)
        if manifest is not None:
            quick = self._planner.next_delta(None if at is None else position(at), manifest[0])
            if quick is not None:
                return quick
        if (at, goal) not in self._routes:
            self._routes[at, goal] = self._planner.route(at, goal)
        keys = self.objects * (self.head - (at or 0)) + len(self.held)
        self.ask("other", 3 + ceil(keys / PAGE))
        return self._routes[at, goal]

    def ask_for(self, route: Route, goal: int) -> float:
        """Count the requests and bytes of a route's objects; returns the requests, which take as long as the bytes."""
        number = 0.0
        for edge in route:
            parts = self.objects if edge.kind == "delta" else 1
            ranges = parts * max(1, ceil(edge.nbytes / parts / FETCH_PART))
            record = edge.base is None or (edge.kind == "delta" and edge.result != goal)
            self.asked[{"anchor": "anchors", "squash": "squashes", "delta": "deltas"}[edge.kind]] += ranges
            self.asked["anchors" if edge.base is None else "manifests"] += record
            self.served[edge.kind] += edge.nbytes
            number += ranges + record
        return number

    # -- what the planner asks of a channel ----------------------------------------------------------------------------

    @property
    def store(self) -> Bucket:
        return self

    @property
    def url(self) -> str:
        return self.name

    def listed(self) -> list[Edge]:
        return [edge for edge, _ in self.held.values()]

    def edges(self, start: int | None, goal: int) -> list[Edge]:
        anchors = [edge for edge in self.listed() if edge.base is None]
        first = start if start is not None else min((edge.result for edge in anchors), default=0)
        return [
            edge
            for edge in self.listed()
            if first <= (edge.result if edge.base is None else edge.base) and edge.result <= goal
        ]

    def reference_edges(self) -> list[Edge]:
        return []

    def references(self) -> list[object]:
        return []

    # -- upkeep --------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return sum(edge.nbytes for edge, _ in self.held.values())

    def contents(self) -> Contents:
        """For `copy_plan`: versions, and the edges that are not deltas."""
        others = tuple(edge for edge in self.listed() if edge.kind != "delta")
        return Contents(frozenset({0, *self.manifests} if self.has_first else ()), others)

    def collect(self, retention: Retention, replicas: tuple[tuple[int, float], ...]) -> None:
        """Delete what the project's retention gives up."""
        now = self.simulation.now
        ages = {0: now} | {version: now - when for version, (_, when) in self.manifests.items()}
        kept = tuple(Kept(edge, now - when) for edge, when in self.held.values())
        garbage = collectable(Inventory(self.head, ages, kept, (), frozenset(), replicas), retention)
        if garbage.unreachable:
            raise AssertionError(f"{self.name}: versions {garbage.unreachable} cannot be reached any more")
        for version in garbage.manifests:
            self.manifests.pop(version, None)
        for edge in garbage.edges:
            self.held.pop(edge.key, None)
        self._routes.clear()


class Copier:
    """`weightcast copy --follow` from the home to a copy: object by object, over one link.

    While an anchor is brought beside the versions, each of the two has half of the link.
    """

    def __init__(self, simulation: Simulation, home: Bucket, copy: Bucket, rate: float, every: float):
        self._simulation, self._home, self._copy = simulation, home, copy
        self._rate, self._every = rate, every
        self._steps: list[Step] = []
        self._is_busy = False
        self._since = simulation.now
        self._flow: Flow | None = None
        self._anchor: Flow | None = None
        self.received = 0.0
        """Bytes."""
        home.watchers.append(self._told)

    def begin(self) -> None:
        self._list()

    def _told(self) -> None:
        """The home has a new version: it is seen at the next question."""
        passed = self._simulation.now - self._since
        self._simulation.at(self._since + (int(passed / self._every) + 1) * self._every, self._look)

    def _list(self) -> None:
        """Every 30 s both buckets are listed: only that shows squashes and anchors."""
        self._simulation.after(LIST_EVERY, self._list)
        if self._is_busy or self._home.is_away or self._copy.is_away:
            return
        for bucket in (self._home, self._copy):
            bucket.ask("other", 4)
        steps = missing(self._home.contents(), self._copy.contents())
        deltas = [edge_of(manifest) for manifest, _ in self._home.manifests.values()]
        first, later = apart(steps, deltas, {*self._copy.manifests, *([0] if self._copy.has_first else [])})
        self._work(list(first))
        if self._anchor is None:
            self._bring_anchors(later)

    def _bring_anchors(self, steps: Sequence[Step]) -> None:
        """One after the other, beside the versions; those that were collected meanwhile are left out."""
        self._anchor = None
        if not steps:
            return
        step, began = steps[0], self._simulation.now
        route = tuple(edge for edge in step.edges if edge.key in self._home.held)
        nbytes, number = max(1, route_bytes(route)), self._home.ask_for(route, step.version)

        def arrived() -> None:
            self._home.asked_since(began, number)
            self.received += nbytes
            put()

        def put() -> None:
            if self._copy.is_away:  # it is put once the bucket is back
                self._simulation.after(1.0, put)
                return
            for edge in route:
                self._copy.add(edge)
            self._copy.ask("puts", len(route) + 2)
            self._bring_anchors(steps[1:])

        self._anchor = self._home.server.start(nbytes, self._rate / 2, arrived)

    def _look(self) -> None:
        following = self._copy.head + 1
        if not self._is_busy and following in self._home.manifests and not (self._home.is_away or self._copy.is_away):
            self._work([Step(following)])

    def _work(self, steps: list[Step]) -> None:
        if steps:
            self._home.polled(self._since, self._every)
            self._is_busy, self._steps = True, steps
            self._next()

    def _next(self) -> None:
        """Bring the next step; the version of a step that was collected meanwhile is left out."""
        if not self._steps:
            self._is_busy, self._since = False, self._simulation.now
            self._look()
            return
        step = self._steps[0]
        manifest = self._home.manifests.get(step.version)
        deltas = (edge_of(manifest[0]),) if step.commits and manifest else ()
        route = tuple(edge for edge in (*step.edges, *deltas) if edge.key in self._home.held)
        self._home.ask("manifests", bool(deltas))
        nbytes, began = max(1, route_bytes(route)), self._simulation.now
        number = self._home.ask_for(route, step.version)

        def arrived() -> None:
            self._home.asked_since(began, number)
            self._arrived(step, route)

        rate = self._rate if self._anchor is None else self._rate / 2
        self._flow = self._home.server.start(nbytes, rate, arrived)

    def _arrived(self, step: Step, route: Route) -> None:
        self.received += max(1, route_bytes(route))
        self._brought(step, route)

    def settle(self) -> None:
        """Count what is under way at the end of a run."""
        if self._is_busy and self._flow is not None and not self._flow.is_over:
            self.received += self._flow.nbytes - self._home.server.cancel(self._flow)
        elif not self._is_busy:
            self._home.polled(self._since, self._every)
        if self._anchor is not None and not self._anchor.is_over:
            self.received += self._anchor.nbytes - self._home.server.cancel(self._anchor)

    def _brought(self, step: Step, route: Route) -> None:
        if self._copy.is_away:  # it is put once the bucket is back
            self._simulation.after(1.0, lambda: self._brought(step, route))
            return
        for edge in route:
            if edge.kind != "delta":
                self._copy.add(edge)
        self._copy.ask("puts", len(route) + 2)
        manifest = self._home.manifests.get(step.version)
        self._steps.pop(0)
        if step.commits and manifest is not None:
            self._copy.commit(manifest[0])
        elif step.version == 0:
            self._copy.has_first = True
        self._next()


class Upkeep:
    """`weightcast squash` and `gc`: squashes and anchors for the home, and retention for every bucket."""

    def __init__(
        self,
        simulation: Simulation,
        buckets: list[Bucket],
        rate: float,
        squash_bytes: Callable[[int], int],
        model_bytes: int,
        levels: tuple[int, ...],
    ):
        self._simulation, self._buckets, self._home = simulation, buckets, buckets[0]
        self._rate, self._squash_bytes, self._model_bytes = rate, squash_bytes, model_bytes
        self._levels = levels

    def squash(self, every: float) -> None:
        """Cut what is due, one after the other: each is read and written at the link's rate."""
        have = {(edge.base, edge.result) for edge in self._home.listed() if edge.kind == "squash"}
        first = min((edge.result for edge in self._home.listed() if edge.base is None), default=0)
        due = list(squashes_due(first, self._home.head, cast(set[tuple[int, int]], have), self._levels))
        busy = 0.0
        for base, result in due:
            route = cheapest_route(self._home.listed(), base, result)
            if route is None:
                continue  # what it is made of was collected
            self._home.requests.add(self._simulation.now, self._home.ask_for(route, result))
            nbytes = self._squash_bytes(result - base)
            busy += (route_bytes(route) + nbytes) / self._rate
            key = squash_key(base, position(result), f"{base:032x}{result:032x}")
            edge = Edge("squash", base, result, nbytes, key, position(result).digest[:16])
            self._simulation.after(busy, lambda edge=edge: self._home.add(edge))  # type: ignore[misc]
        self._simulation.after(max(every, busy), lambda: self.squash(every))

    def anchor(self, every: float) -> None:
        """Cut an anchor of the head, from a mirror that is there; it appears once it is uploaded."""
        at = position(self._home.head)
        edge = Edge("anchor", None, at.version, self._model_bytes, anchor_folder(at, "0" * 16), at.digest[:16])
        self._simulation.after(self._model_bytes / self._rate, lambda: self._home.add(edge))
        self._simulation.after(every, lambda: self.anchor(every))

    def collect(
        self, every: float, retention: Retention, replicas: Callable[[], tuple[tuple[int, float], ...]]
    ) -> None:
        """Heartbeats are in the home alone."""
        for bucket in self._buckets:
            if not bucket.is_away:
                bucket.collect(retention, replicas() if bucket is self._home else ())
        self._simulation.after(every, lambda: self.collect(every, retention, replicas))
