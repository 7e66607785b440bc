"""An engine has one owner: the agent that holds its lease. Only the owner may change the engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightcast.engine.messages import Owner
from weightcast.errors import EngineBusyError
from weightcast.store.backoff import CLOCK, Clock

SECONDS = 15.0
"""How long a lease lasts that is not renewed."""

RENEW_EVERY = 5.0
"""Seconds between two renewals: a busy host may delay a few."""


class Lease:
    """Who owns the engine at ``url``. An owner is known by a secret id; others see its name."""

    def __init__(self, url: str, clock: Clock = CLOCK, seconds: float = SECONDS):
        self._url, self._clock, self._seconds = url, clock, seconds
        self._lock = threading.Lock()
        self._owner = self._name = ""
        self._until = -math.inf
        self._kept = False

    def holder(self) -> Owner | None:
        """The owner, if there is one."""
        with self._lock:
            return self._holder()

    def _holder(self) -> Owner | None:
        left = self._seconds if self._kept else self._until - self._clock.now()
        return Owner(self._name, math.ceil(left)) if left > 0 else None

    def take(self, owner: str, name: str) -> None:
        """Take the lease, or renew it. `EngineBusyError` if another one holds it."""
        with self._lock:
            self._refuse_others(owner)
            self._owner, self._name, self._until = owner, name, self._clock.now() + self._seconds

    def renew(self, owner: str) -> None:
        """`EngineBusyError` if another one holds it by now; nothing happens if it is free."""
        with self._lock:
            self._refuse_others(owner)
            if self._holder() is not None:
                self._until = self._clock.now() + self._seconds

    def refuse_others(self, owner: str) -> None:
        """`EngineBusyError` if the lease is held, and not by this owner."""
        with self._lock:
            self._refuse_others(owner)

    def _refuse_others(self, owner: str) -> None:
        holder = self._holder()
        if holder is not None and owner != self._owner:
            hint = f"Stop that one, or wait: a lease that is not renewed ends, this one in {holder.seconds} s."
            raise EngineBusyError(f"{holder.name} updates this engine", url=self._url, holder=holder.name, hint=hint)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The lease does not end meanwhile: what its owner has begun may take longer than the owner lives."""
        self._kept = True
        try:
            yield
        finally:
            with self._lock:
                self._kept, self._until = False, self._clock.now() + self._seconds

    def is_held_by(self, owner: str) -> bool:
        with self._lock:
            return self._holder() is not None and owner == self._owner

    def release(self, owner: str) -> None:
        """Give the lease back, if this owner holds it."""
        with self._lock:
            if owner == self._owner:
                self._until = -math.inf
