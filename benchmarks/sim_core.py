"""Discrete events, and servers that transfers share: the core of `fleet_sim.py`. It knows nothing of channels.

Time is in seconds, data in bytes. Events at one time happen in the order in which they were planned, so a run with the
same seed is the same run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


class Simulation:
    """A clock and what is planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when: float, action: Action) -> None:
        """Plan an action; one in the past is done next."""
        self._count += 1
        heapq.heappush(self._planned, (max(when, self.now), self._count, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        """Do all that is planned before ``until``, and what that plans."""
        while self._planned and self._planned[0][0] < until:
            self.now, _, action = heapq.heappop(self._planned)
            action()
        self.now = until


class Bins:
    """Amounts by interval of time."""

    def __init__(self, width: float):
        self.width = width
        self._amounts: dict[int, float] = defaultdict(float)

    def add(self, when: float, amount: float) -> None:
        self._amounts[int(when / self.width)] += amount

    def spread(self, begin: float, end: float, rate: float) -> None:
        """An amount that grows steadily for a while."""
        at = begin
        while at < end:
            number = int(at / self.width)
            edge = min(end, (number + 1) * self.width)
            if edge <= at:  # rounding: the interval's end is where it begins
                edge = min(end, at + self.width)
            self._amounts[number] += rate * (edge - at)
            at = edge

    @property
    def total(self) -> float:
        return sum(self._amounts.values())

    def rates(self, until: float) -> list[float]:
        """The amount per second in each interval."""
        return [self._amounts.get(i, 0.0) / self.width for i in range(int(until / self.width))]


@dataclass(eq=False)
class Flow:
    """A transfer that shares a server."""

    nbytes: float
    done: Action
    kind: _Kind
    finish: float
    """The progress of its kind at which it is complete."""
    is_over: bool = False

    @property
    def left(self) -> float:
        return 0.0 if self.is_over else max(0.0, self.finish - self.kind.progress)


@dataclass(eq=False)
class _Kind:
    """Flows of one own limit: they all have the same rate, so one number says how far each has come."""

    limit: float
    rate: float = 0.0
    progress: float = 0.0
    count: int = 0
    flows: list[tuple[float, int, Flow]] = field(default_factory=list)


class Server:
    """Transfers that share a capacity fairly: each gets the same, unless its own limit is less (max-min fairness)."""

    def __init__(self, simulation: Simulation, capacity: float, bins: Bins):
        self._simulation, self._capacity = simulation, capacity
        self.bins = bins
        """Bytes by time: what was moved."""
        self._kinds: dict[float, _Kind] = {}
        self._moved_until = 0.0
        self._plan = 0
        self._count = 0

    @property
    def active(self) -> int:
        return sum(kind.count for kind in self._kinds.values())

    def start(self, nbytes: float, limit: float, done: Action) -> Flow:
        """Begin a transfer; ``done`` is called when its last byte is there."""
        self._advance()
        kind = self._kinds.setdefault(limit, _Kind(limit))
        flow = Flow(nbytes, done, kind, kind.progress + nbytes)
        self._count += 1
        heapq.heappush(kind.flows, (flow.finish, self._count, flow))
        kind.count += 1
        self._share()
        return flow

    def cancel(self, flow: Flow) -> float:
        """End a transfer early; returns the bytes that are left."""
        self._advance()
        left = flow.left
        if not flow.is_over:
            flow.is_over = True
            flow.kind.count -= 1
            self._share()
        return left

    def _advance(self) -> None:
        """Bring all flows to the present."""
        now, since = self._simulation.now, self._moved_until
        if now > since:
            for kind in self._kinds.values():
                if kind.count:
                    kind.progress += kind.rate * (now - since)
                    self.bins.spread(since, now, kind.rate * kind.count)
            self._moved_until = now

    def _share(self) -> None:
        """Give every flow its rate, and plan for the next one that ends."""
        left, flows = self._capacity, self.active
        soonest = float("inf")
        for kind in sorted(self._kinds.values(), key=lambda one: one.limit):
            if not kind.count:
                continue
            kind.rate = min(kind.limit, left / flows)
            left -= kind.rate * kind.count
            flows -= kind.count
            while kind.flows and kind.flows[0][2].is_over:
                heapq.heappop(kind.flows)
            soonest = min(soonest, (kind.flows[0][0] - kind.progress) / kind.rate)
        self._plan += 1
        if soonest < float("inf"):
            plan = self._plan
            self._simulation.after(max(0.0, soonest), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        """Complete the flows that are due, unless the rates were shared anew since this was planned."""
        if plan != self._plan:
            return
        self._advance()
        ended: list[Flow] = []
        for kind in self._kinds.values():
            while kind.flows and (
                kind.flows[0][2].is_over or kind.flows[0][0] - kind.progress <= max(1e-3, 1e-9 * kind.progress)
            ):
                flow = heapq.heappop(kind.flows)[2]
                if not flow.is_over:
                    flow.is_over = True
                    kind.count -= 1
                    ended.append(flow)
        self._share()
        for flow in ended:
            flow.done()
