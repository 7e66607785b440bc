"""A simulated fleet: replicas that follow a channel in several buckets, fail, come back and join."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sim_bucket import Bucket, Copier, Upkeep, manifest_of, position
from sim_core import Bins, Flow, Server, Simulation

from weightcast.channel.edge import Edge
from weightcast.channel.keys import anchor_folder
from weightcast.channel.policy import NEWEST
from weightcast.channel.retention import Retention
from weightcast.channel.route import Route, route_bytes
from weightcast.store.backoff import Backoff

COMPARE_EVERY = 30.0
"""Seconds between two looks of a reader of copies at the home, as in `channel/nearest.py`."""


@dataclass(frozen=True)
class Group:
    """Replicas that read the same buckets in the same order; the home is the last."""

    name: str
    replicas: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Scenario:
    """All that a run depends on."""

    commits: tuple[tuple[float, int], ...]
    """When the upload of each version's delta begins, and its bytes."""
    model_bytes: int
    squash_bytes: Callable[[int], int]
    """Of a squash over so many versions."""
    compute: Callable[[Edge], float]
    """Seconds of a replica for an edge that it has fetched."""
    groups: tuple[Group, ...]
    capacities: dict[str, float]
    """Bytes per second that each bucket serves at most, the home first."""
    up: float
    """From the trainer to the home, all ranks together."""
    upkeep: float
    """Of the link of whoever cuts squashes and anchors."""
    between: float
    """From the home to a copy."""
    links: tuple[tuple[float, float], ...]
    """Shares of the replicas, and the bytes per second of their links."""
    horizon: float
    objects: int = 1
    """Of a delta."""
    every: float = 1.0
    """Seconds between two questions of a replica, and of a copy."""
    copy_every: float = 1.0
    levels: tuple[int, ...] = (8, 64, 512)
    squash_every: float | None = None
    anchor_every: float | None = None
    collect_every: float | None = None
    retention: Retention = field(default_factory=Retention)
    joins: tuple[tuple[float, int], ...] = ()
    """When replicas join that hold nothing, and how many; they are the last of their groups."""
    join_spread: float = 60.0
    """Seconds in which they begin."""
    copies_are_begun: bool = True
    """Whether the copies have version 0 from the beginning."""
    mean_life: float | None = None
    """Seconds between two failures of a replica."""
    restart: float = 120.0
    loses_disk: float = 0.2
    """The share of failures after which nothing is left."""
    outages: tuple[tuple[str, float, float], ...] = ()
    """A bucket, when it goes away, and for how long."""
    seed: int = 1
    bin: float = 10.0


@dataclass(frozen=True)
class Joined:
    seconds: float
    nbytes: int
    requests: float
    versions: int
    """How many were committed meanwhile."""


class Replica:
    """A follower: the project's policy says where to, its planner by which route."""

    def __init__(self, fleet: Fleet, group: Group, link: float):
        self._fleet, self._simulation, self.group, self._link = fleet, fleet.simulation, group, link
        self._sources = [fleet.buckets[name] for name in group.sources]
        self.at: int | None = 0
        self.is_up, self._is_busy = False, False
        self._life = 0
        """Which life it is: what was planned in an earlier one is void."""
        self._idle_at: Bucket | None = None
        self._since = 0.0
        self._until = dict.fromkeys(group.sources[:-1], float("-inf"))
        self._wanted = dict.fromkeys(group.sources[:-1], -1)
        self._backoffs = {name: Backoff(1.0, random=fleet.random.uniform) for name in group.sources[:-1]}
        self._newest, self._lagging_at = 0, -1
        self._flow: tuple[Bucket, Flow] | None = None
        self._begun: tuple[float, int, float] = 0.0, 0, 0.0
        """Of the update that is under way, or of the join: when, bytes, requests."""

    def start(self) -> None:
        self.is_up = True
        self._life += 1
        self._begun = self._simulation.now, 0, 0.0
        self._wake(self._life)
        if len(self._sources) > 1:
            life = self._life
            self._simulation.after(self._fleet.random.uniform(0, COMPARE_EVERY), lambda: self._compare(life))

    def fail(self, loses_disk: bool) -> None:
        self._rest_ends()
        self._flow_ends()
        self.is_up = self._is_busy = False
        self._life += 1
        self._begun = self._simulation.now, 0, 0.0
        if loses_disk:
            self.at = None

    # -- one update ----------------------------------------------------------------------------------------------------

    def _wake(self, life: int) -> None:
        """Ask for news, and go where the policy says."""
        if life != self._life or self._is_busy:
            return
        self._rest_ends()
        bucket = self._source()
        self._newest = max(self._newest, bucket.head)
        goal = None if bucket.is_away else NEWEST.goal(self.at, bucket.head)
        if self.at is None:
            bucket.ask("other", 4)  # the channel's record, the hint, listings of versions and of anchors
        bucket.ask("manifests", 1 if goal is None else 2)
        if goal is None:
            self._idle_at, self._since = bucket, self._simulation.now
            bucket.sleepers[self] = None
            return
        if self.at is not None and goal > self.at + 1:
            bucket.ask("other")
            bucket.ask("manifests", 2)
        self._is_busy = True
        if self.at is not None:
            self._begun = self._simulation.now, 0, 0.0
        route = bucket.route(self.at, goal)
        requests = bucket.ask_for(route, goal)
        began, nbytes, asked = self._begun
        self._begun = began, nbytes + route_bytes(route), asked + requests
        self._fetch(bucket, route, goal, float(max(1, route_bytes(route))), requests)

    def _fetch(self, bucket: Bucket, route: Route, goal: int, nbytes: float, requests: float) -> None:
        began, life = self._simulation.now, self._life
        flow = bucket.server.start(nbytes, self._link, lambda: self._fetched(life, route, goal, began, nbytes))
        self._flow = bucket, flow
        self._underway = route, goal, began, requests

    def _flow_ends(self) -> float:
        """The transfer is over, or is ended; returns the bytes that it lacks."""
        if self._flow is None:
            return 0.0
        (bucket, flow), (_, _, began, requests) = self._flow, self._underway
        self._flow = None
        left = bucket.server.cancel(flow)
        bucket.asked_since(began, requests * (1 - left / flow.nbytes))
        self._fleet.received += flow.nbytes - left
        return left

    def _fetched(self, life: int, route: Route, goal: int, began: float, nbytes: float) -> None:
        """What was decoded while the rest was fetched is done already, but for the last edge."""
        self._flow_ends()
        work = [self._fleet.scenario.compute(edge) for edge in route]
        left = max(work[-1], sum(work) - (self._simulation.now - began))
        self._simulation.after(left, lambda: self._applied(life, goal))

    def _applied(self, life: int, goal: int) -> None:
        if life != self._life:
            return
        fleet, now, before = self._fleet, self._simulation.now, self.at
        self.at, self._is_busy = goal, False
        if before is None:
            began, nbytes, requests = self._begun
            versions = sum(began <= when <= now for when in fleet.committed.values())
            fleet.joined.append(Joined(now - began, nbytes, requests, versions))
        elif goal == before + 1:
            fleet.delays.append(now - fleet.committed[goal])
        self._wake(life)

    # -- where to read -------------------------------------------------------------------------------------------------

    def _source(self) -> Bucket:
        """The first copy that is not left, or the home."""
        for bucket in self._sources[:-1]:
            if self._simulation.now < self._until[bucket.name]:
                continue
            if bucket.is_away or not bucket.has_first or bucket.head < self._wanted[bucket.name]:
                self._leave(bucket)
                continue
            self._wanted[bucket.name] = -1
            self._backoffs[bucket.name].succeeded()
            return bucket
        return self._sources[-1]

    def _leave(self, bucket: Bucket, more: int = 0) -> None:
        """Read elsewhere for a while; then it must have what is the newest version now."""
        self._until[bucket.name] = self._simulation.now + self._backoffs[bucket.name].failed()
        self._wanted[bucket.name] = self._newest + more
        life = self._life
        self._simulation.at(self._until[bucket.name], lambda: self._wake(life))

    def _compare(self, life: int) -> None:
        """Look at the home now and then: whether the copy that is read lags."""
        if life != self._life:
            return
        self._simulation.after(COMPARE_EVERY, lambda: self._compare(life))
        bucket, home = self._idle_at, self._sources[-1]
        if bucket is None or bucket is home or home.is_away:
            return
        home.ask("other")
        home.ask("manifests")
        newest, behind = self._newest, home.head > self._newest
        if behind and newest == self._lagging_at:
            self._leave(bucket, 1)
            self._wake(life)
        elif not behind:
            home.ask("other")  # a listing, since the next version is not there
        self._lagging_at = newest if behind else -1

    def told(self) -> None:
        """There is a new version where it rests: seen at the next question."""
        every, life = self._fleet.scenario.every, self._life
        passed = self._simulation.now - self._since
        self._simulation.at(self._since + (int(passed / every) + 1) * every, lambda: self._wake(life))

    def lost(self, bucket: Bucket) -> None:
        """A bucket goes away: a download continues elsewhere, and a question is not answered."""
        if self._flow is not None and self._flow[0] is bucket:
            route, goal, _, requests = self._underway
            nbytes = self._flow[1].nbytes
            left = self._flow_ends()
            self._fetch(self._source(), route, goal, left, requests * left / nbytes)
        elif self._idle_at is bucket:
            self.told()

    def settle(self) -> None:
        """Count what is under way at the end of a run."""
        self._rest_ends()
        self._flow_ends()

    def _rest_ends(self) -> None:
        if self._idle_at is not None:
            self._idle_at.sleepers.pop(self, None)
            self._idle_at.polled(self._since, self._fleet.scenario.every)
            self._idle_at = None


class Fleet:
    """A run of a scenario."""

    def __init__(self, scenario: Scenario):
        self.scenario, self.simulation = scenario, Simulation()
        self.random = random.Random(scenario.seed)
        self.buckets = {name: self._bucket(name, capacity) for name, capacity in scenario.capacities.items()}
        self.home = next(iter(self.buckets.values()))
        self.committed = {0: 0.0}
        self.delays: list[float] = []
        """Seconds from a commit until a replica that lacked only this version holds it."""
        self.joined: list[Joined] = []
        self.received = 0.0
        """Bytes that replicas got."""
        self.behind: list[tuple[float, list[float]]] = []
        """At some times, for each replica that is up, how long ago the first version was committed that it lacks."""
        self.stored: list[tuple[float, int]] = []
        """Bytes in the home."""
        self.replicas = [Replica(self, group, self._link()) for group in scenario.groups for _ in range(group.replicas)]

    def _bucket(self, name: str, capacity: float) -> Bucket:
        bins = Bins(self.scenario.bin)
        server = Server(self.simulation, capacity, bins)
        bucket = Bucket(self.simulation, name, server, self.scenario.objects, Bins(self.scenario.bin))

        def tell() -> None:
            for replica in list(bucket.sleepers):
                replica.told()

        bucket.watchers.append(tell)
        return bucket

    def _begin_channel(self) -> None:
        """Version 0 is an anchor."""
        at = position(0)
        anchor = Edge("anchor", None, 0, self.scenario.model_bytes, anchor_folder(at, "0" * 16), at.digest[:16])
        for bucket in self.buckets.values():
            bucket.has_first = bucket is self.home or self.scenario.copies_are_begun
            if bucket.has_first:
                bucket.add(anchor)

    def _link(self) -> float:
        """A link for a replica, by the shares."""
        draw, links = self.random.random(), self.scenario.links
        for share, rate in links[:-1]:
            if draw < share:
                return rate
            draw -= share
        return links[-1][1]

    def run(self) -> None:
        self._begin_channel()
        self._begin_upkeep()
        one = self.scenario
        copies = list(self.buckets.values())[1:]
        self.copiers = [Copier(self.simulation, self.home, copy, one.between, one.copy_every) for copy in copies]
        for copier in self.copiers:
            copier.begin()
        self._begin_replicas()
        for name, when, seconds in self.scenario.outages:
            self.simulation.at(when, lambda name=name: self._away(self.buckets[name]))  # type: ignore[misc]
            self.simulation.at(when + seconds, lambda name=name: self._back(self.buckets[name]))  # type: ignore[misc]
        self._publish(0, 0.0)
        self.simulation.after(self.scenario.bin, self._watch)
        self.simulation.run(self.scenario.horizon)
        for replica in self.replicas:
            replica.settle()
        for copier in self.copiers:
            copier.settle()

    def _begin_upkeep(self) -> None:
        one, after = self.scenario, self.simulation.after
        buckets = list(self.buckets.values())
        upkeep = Upkeep(self.simulation, buckets, one.upkeep, one.squash_bytes, one.model_bytes, one.levels)
        if one.squash_every:
            after(one.squash_every, lambda: upkeep.squash(one.squash_every or 0))
        if one.anchor_every:
            after(one.anchor_every, lambda: upkeep.anchor(one.anchor_every or 0))
        if one.collect_every:
            every = one.collect_every
            after(every, lambda: upkeep.collect(every, one.retention, self._heartbeats))

    def _heartbeats(self) -> tuple[tuple[int, float], ...]:
        return tuple((replica.at, 0.0) for replica in self.replicas if replica.is_up and replica.at is not None)

    def _begin_replicas(self) -> None:
        """Those that join are drawn from all groups; the others start within a few seconds."""
        draws = list(self.replicas)
        self.random.shuffle(draws)
        for when, number in self.scenario.joins:
            for replica in (draws.pop() for _ in range(number)):
                replica.at = None
                self.simulation.at(when + self.random.uniform(0, self.scenario.join_spread), replica.start)
                self._plan_failure(replica, when)
        for replica in draws:
            self.simulation.at(self.random.uniform(0, 5), replica.start)
            self._plan_failure(replica, 0.0)

    def _plan_failure(self, replica: Replica, start: float) -> None:
        if self.scenario.mean_life is None:
            return

        def fail() -> None:
            if replica.is_up:
                replica.fail(self.random.random() < self.scenario.loses_disk)
                self.simulation.after(self.scenario.restart, replica.start)
            self._plan_failure(replica, self.simulation.now + self.scenario.restart)

        self.simulation.at(start + self.random.expovariate(1 / self.scenario.mean_life), fail)

    def _publish(self, number: int, free: float) -> None:
        """Upload one delta after the other; what is not uploaded when the next is made waits."""
        if number == len(self.scenario.commits):
            return
        when, nbytes = self.scenario.commits[number]
        done = max(when, free) + nbytes / self.scenario.up

        def commit() -> None:
            self.committed[number + 1] = self.simulation.now
            self.home.ask("puts", 3 + self.scenario.objects)
            self.home.ask("other", 1)
            self.home.commit(manifest_of(number + 1, nbytes, self.scenario.objects))
            self._publish(number + 1, done)

        self.simulation.at(done, commit)

    def _away(self, bucket: Bucket) -> None:
        bucket.is_away = True
        for replica in self.replicas:
            replica.lost(bucket)

    def _back(self, bucket: Bucket) -> None:
        bucket.is_away = False

    def _watch(self) -> None:
        """Note how far behind the replicas are that have begun."""
        now, newest = self.simulation.now, max(self.committed)
        ages = [
            0.0 if replica.at == newest else now - self.committed[replica.at + 1]
            for replica in self.replicas
            if replica.is_up and replica.at is not None
        ]
        self.behind.append((now, sorted(ages)))
        self.stored.append((now, self.home.nbytes))
        self.simulation.after(self.scenario.bin, self._watch)
