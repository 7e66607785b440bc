"""Events as metrics for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weightcast.events.event import Event

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Seconds."""


class Metrics:
    """A sink that keeps metrics, under the same names for trainers, followers and engines. Needs `prometheus_client`.

    `weightcast_phase_seconds` and `weightcast_phase_bytes_total` have the labels ``phase`` and ``role``;
    `weightcast_committed_version` and `weightcast_committed_time_seconds` are of the last commit by this process,
    `weightcast_applied_version`, by ``role``, of the last version that became live in it.

    >>> metrics = Metrics()
    >>> publisher = wc.Publisher(url, model, on_event=metrics)                          # doctest: +SKIP
    >>> prometheus_client.start_http_server(9464, "127.0.0.1", metrics.registry)        # doctest: +SKIP
    """

    def __init__(self, registry: CollectorRegistry | None = None):
        """The metrics go into ``registry``, such as `prometheus_client.REGISTRY`; by default one of their own."""
        self.registry = CollectorRegistry() if registry is None else registry
        by, registry = ["phase", "role"], self.registry
        self._seconds = Histogram(
            "weightcast_phase_seconds", "Seconds that a phase of a version took", by, registry=registry, buckets=BUCKETS
        )
        self._bytes = Counter("weightcast_phase_bytes_total", "Bytes of a phase", by, registry=registry)
        self._committed = Gauge("weightcast_committed_version", "The newest version committed here", registry=registry)
        self._committed_at = Gauge(
            "weightcast_committed_time_seconds", "When it was committed, in seconds since 1970", registry=registry
        )
        self._applied = Gauge(
            "weightcast_applied_version", "The newest version that is live here", ["role"], registry=registry
        )

    def __call__(self, event: Event) -> None:
        self._seconds.labels(event.phase, event.role).observe(event.seconds)
        if event.nbytes:
            self._bytes.labels(event.phase, event.role).inc(event.nbytes)
        if event.phase == "commit":
            self._committed.set(event.version)
            self._committed_at.set(event.began + event.seconds)
        elif event.phase in ("apply", "load"):
            self._applied.labels(event.role).set(event.version)
