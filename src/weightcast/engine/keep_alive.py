"""Threads that keep an agent's lease and its heartbeats alive, also while the agent is busy for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from weightcast.engine.lease import RENEW_EVERY
from weightcast.errors import WeightcastError


class KeepAlive:
    """Calls some functions every few seconds, each from a thread of its own, from `start` to `stop`.

    A bucket that does not answer must not cost the lease.
    """

    def __init__(self, *acts: Callable[[], None], every: float = RENEW_EVERY):
        self._acts, self._every = acts, every
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if self._threads:
            return
        for act in self._acts:
            thread = threading.Thread(target=self._run, args=(act,), name="weightcast-keep-alive", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stopped.set()
        end = time.monotonic() + self._every
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))  # what does not answer holds it up for longer

    def _run(self, act: Callable[[], None]) -> None:
        while not self._stopped.wait(self._every):
            with suppress(WeightcastError):  # the agent's next round meets the same error, and reports it
                act()
