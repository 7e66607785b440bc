"""How long to wait after a failure: twice as long each time, up to a limit, spread so that replicas do not coincide."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

LONGEST = 60.0
"""Seconds between two attempts at most, unless the caller's own interval is longer."""

_MOST_DOUBLINGS = 32
"""Enough for any interval to reach the limit; a float overflows at 1,024."""


class Clock:
    """Monotonic time, and waiting that a stop ends early. Tests pass one of their own."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970, which may jump: for people, never to measure or decide by."""
        return time.time()

    def wait(self, stopped: threading.Event, seconds: float) -> None:
        """Return after ``seconds``, or as soon as ``stopped`` is set."""
        stopped.wait(seconds)


CLOCK = Clock()


class Backoff:
    """Counts failures in a row and gives the seconds to wait before the next attempt."""

    def __init__(
        self, every: float, longest: float = LONGEST, random: Callable[[float, float], float] = random.uniform
    ):
        """``every`` is the interval without failures; ``random(low, high)`` spreads the attempts of many replicas."""
        self._every = every
        self._longest = max(every, longest)
        self._random = random
        self.failures = 0

    def failed(self) -> float:
        """Count a failure; returns the seconds to wait."""
        self.failures += 1
        doublings = min(self.failures, _MOST_DOUBLINGS)
        return self._spread(min(self._every * 2.0**doublings, self._longest))

    def succeeded(self) -> None:
        """Forget all failures."""
        self.failures = 0

    def idle(self) -> float:
        """The seconds to wait when nothing failed and nothing was new."""
        return self._spread(self._every)

    def _spread(self, seconds: float) -> float:
        return seconds * self._random(0.8, 1.2)
