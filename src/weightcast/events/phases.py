"""Timing phases: each moment belongs to one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from weightcast.store.backoff import CLOCK, Clock

_NONE: Mapping[str, int] = {}


@dataclass(frozen=True)
class Span:
    """A phase that has ended. Of which version it was may not be known yet."""

    phase: str
    began: float
    """Seconds since 1970."""
    seconds: float
    nbytes: int = 0


class Phases:
    """Adds up seconds by phase, of one thread. A phase that begins inside another interrupts it."""

    def __init__(self, clock: Clock = CLOCK):
        self.seconds: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._read, self._since_1970 = clock.now, clock.wall() - clock.now()
        self._now: str | None = None
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._now
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, name: str | None) -> None:
        """From here on it is another phase, until the next call or the end of the block of `phase`."""
        now = self._read()
        if self._now is not None:
            self.seconds[self._now] += now - self._since
        if name is not None and name not in self.seconds:
            self.seconds[name], self._began[name] = 0.0, self._since_1970 + now
        self._now, self._since = name, now

    def spans(self, nbytes: Mapping[str, int] = _NONE) -> tuple[Span, ...]:
        """What has ended, with the bytes of some phases."""
        return tuple(
            Span(phase, began, self.seconds[phase], nbytes.get(phase, 0)) for phase, began in self._began.items()
        )
