"""Edges that turned out to be bad: avoided for a while, then tried again, since objects can be repaired in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weightcast.channel.edge import Edge
from weightcast.errors import AccessError, MissingError, WeightcastError
from weightcast.store.backoff import CLOCK, Backoff, Clock

CHEAP = (MissingError, AccessError)
"""Errors that one small request shows: those edges are tried again at every poll."""

_FORGET = 3600.0
"""Seconds until an object that is not requested any more is forgotten."""


@dataclass
class _Bad:
    error: WeightcastError
    backoff: Backoff
    until: float


class BadEdges:
    """The keys of edges to avoid now. `begin` starts a poll: edges that are cheap to try, or waited enough, return."""

    def __init__(self, clock: Clock = CLOCK):
        self._clock = clock
        self._now: dict[str, WeightcastError] = {}
        self._bad: dict[str, _Bad] = {}

    def begin(self) -> None:
        """Start a poll."""
        now = self._clock.now()
        self._bad = {key: bad for key, bad in self._bad.items() if now < bad.until + _FORGET}
        self._now = {key: bad.error for key, bad in self._bad.items() if now < bad.until}

    def add(self, edge: Edge, error: WeightcastError) -> None:
        """Avoid this edge for the rest of the poll, and longer if it took a download to find out."""
        self._now[edge.key] = error
        if not isinstance(error, CHEAP):
            before = self._bad.get(edge.key)
            backoff = before.backoff if before else Backoff(1.0)
            self._bad[edge.key] = _Bad(error, backoff, self._clock.now() + backoff.failed())

    def __contains__(self, key: str) -> bool:
        return key in self._now

    @property
    def reason(self) -> WeightcastError | None:
        """Why a version cannot be reached: a refusal, which has the simplest remedy, or else the first error."""
        refused = (error for error in self._now.values() if isinstance(error, AccessError))
        return next(refused, next(iter(self._now.values()), None))

    def succeeded(self, edges: Iterable[Edge]) -> None:
        """These edges are good."""
        for edge in edges:
            self._bad.pop(edge.key, None)

    def clear(self) -> None:
        """Forget all: it was the weights held that were wrong, not the edges."""
        self._now, self._bad = {}, {}
