"""An agent's HTTP endpoint: its status, metrics for Prometheus, and a wait for a version to be live.

    GET /status                         JSON
    GET /metrics                        Prometheus
    GET /wait?version=41&seconds=30     200 once the engine serves version 41 or a later one, else 503

It listens on the loopback interface by default, and elsewhere only with a token. Waiting requests are bounded, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from weightcast.channel.keys import Position
from weightcast.engine.bounded_http import ARRIVAL, BoundedRequests, BoundedServer, is_number
from weightcast.errors import WeightcastError
from weightcast.events.metrics import BUCKETS, Metrics
from weightcast.follow.subscriber import Subscriber

_LONGEST = 600.0

_WAITING = 32
"""Connections that may be inside `/wait`: waiting clients leave slots to others."""


class WatchedEngine(Protocol):
    """What is shown of an engine."""

    @property
    def url(self) -> str: ...


class WatchedUpdate(Protocol):
    """What is counted of an update."""

    @property
    def pause(self) -> float: ...
    @property
    def changed(self) -> int: ...
    def as_json(self) -> dict[str, Any]: ...


class WatchedAgent(Protocol):
    """What is shown of an agent, of whatever kind its engine is."""

    @property
    def engine(self) -> WatchedEngine: ...
    @property
    def subscriber(self) -> Subscriber: ...
    @property
    def position(self) -> Position | None: ...
    @property
    def lag(self) -> int | None: ...
    @property
    def unproven(self) -> Sequence[str] | None: ...
    @property
    def last(self) -> WatchedUpdate | None: ...
    @property
    def trouble(self) -> WeightcastError | None: ...


class Watch(Collector):
    """Counts an agent's updates and errors, and wakes clients that wait for a version."""

    def __init__(self, agent: WatchedAgent, metrics: Metrics):
        """``metrics`` are those that the agent's events go to; what is counted here is added to them."""
        self._agent = agent
        self._changed = threading.Condition()
        self.registry = metrics.registry
        self.registry.register(self)
        counter = partial(Counter, registry=self.registry)
        self._pauses = Histogram(
            "weightcast_pause_seconds",
            "Seconds that an update paused the engine",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._updates = counter("weightcast_updates_total", "Versions that became live")
        self._elements = counter("weightcast_written_elements_total", "Elements written by updates")
        self._errors = counter("weightcast_errors_total", "Rounds that ended in an error")

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by Prometheus' library, for every scrape."""
        version, lag, unproven = self._version, self._agent.lag, self._agent.unproven
        for name, meaning, value in (
            ("version", "The live version; -1 if none", -1 if version is None else version),
            (
                "lag_versions",
                "From the live one to the mirror's newest; NaN if unknown",
                math.nan if lag is None else lag,
            ),
            (
                "unproven_tensors",
                "Tensors whose live bits cannot be read back; NaN if none is read",
                math.nan if unproven is None else len(unproven),
            ),
        ):
            yield GaugeMetricFamily(f"weightcast_{name}", meaning, value)

    def updated(self, update: WatchedUpdate) -> None:
        self._pauses.observe(update.pause)
        self._updates.inc()
        self._elements.inc(update.changed)
        with self._changed:
            self._changed.notify_all()

    def failed(self) -> None:
        self._errors.inc()

    @property
    def _version(self) -> int | None:
        position = self._agent.position  # once: the agent's thread may change it
        return None if position is None else position.version

    def status(self) -> dict[str, Any]:
        agent, position, last, error = self._agent, self._agent.position, self._agent.last, self._agent.trouble
        return {
            "engine": agent.engine.url,
            "channel": agent.subscriber.chain.store.url,
            "version": position.version if position else None,
            "digest": position.digest if position else None,
            "lag": agent.lag,
            "unproven": None if agent.unproven is None else list(agent.unproven),
            "error": str(error) if error else None,
            "last": last.as_json() if last else None,
        }

    def wait(self, version: int, seconds: float) -> bool:
        """Whether the engine serves that version or a later one within so many seconds."""
        end = time.monotonic() + min(seconds, _LONGEST)
        with self._changed:
            while (live := self._version) is None or live < version:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))
        return True


class Endpoint(BoundedServer):
    """Serves a `Watch` until it is closed."""

    def __init__(self, watch: Watch, host: str, port: int, token: str | None, *, arrival: float = ARRIVAL):
        """``arrival`` is how many seconds a request may take to arrive."""
        self.watch = watch
        self.waiting = threading.BoundedSemaphore(_WAITING)
        super().__init__((host, port), _Requests, token, arrival=arrival)


class _Requests(BoundedRequests):
    server: Endpoint

    def do_GET(self) -> None:  # noqa: N802 -- http.server calls it
        watch, url = self.server.watch, urlsplit(self.path)
        if not self.let_in():
            return
        if url.path == "/status":
            self.answer(200, watch.status())
        elif url.path == "/metrics":
            self.send(200, "text/plain; version=0.0.4", generate_latest(watch.registry))
        elif url.path == "/wait":
            self._wait(parse_qs(url.query))
        else:
            self.answer(404, {"error": "there are /status, /metrics and /wait"})

    def _wait(self, query: dict[str, list[str]]) -> None:
        version, seconds = (query.get(key, [""])[0] for key in ("version", "seconds"))
        if not is_number(version, 12) or not is_number(seconds or "0", 4):
            self.answer(400, {"error": "version and seconds are numbers"})
            return
        if not self.server.waiting.acquire(blocking=False):
            self.answer(503, {"error": f"{_WAITING} requests wait already"})
            return
        try:
            there = self.server.watch.wait(int(version), float(seconds or 0))
        finally:
            self.server.waiting.release()
        self.answer(200 if there else 503, self.server.watch.status())
