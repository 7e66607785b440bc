"""A clock for followers and agents: time passes only while somebody waits."""

from __future__ import annotations

import threading

from weightcast.store.backoff import Clock


class FakeClock(Clock):
    """`wait` returns at once, and that much time has passed; a test may set ``time``."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, stopped: threading.Event, seconds: float) -> None:
        self.time += seconds
