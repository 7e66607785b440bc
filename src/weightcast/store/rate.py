"""A limit on the bytes per second that go to and from a store."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping

from weightcast.errors import UsageError
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Data, Listed, Store, Stored, debris, delete_all, discard_debris, put_all, size_of

_NEVER = threading.Event()
_LONGEST = 3600.0
"""Seconds of one wait: Python refuses waits of centuries, which a large object at a low rate adds up to."""


class Allowance:
    """A budget of bytes that grows with time. It may be overdrawn; callers wait until it is not."""

    def __init__(self, rate: float, clock: Clock = CLOCK):
        """``rate`` is in bytes per second."""
        if not 1 <= rate < float("inf"):
            raise UsageError(f"cannot limit the rate to {rate} bytes per second", hint="Use a rate of at least 1.")
        self._rate = rate
        self._clock = clock
        self._guard = threading.Lock()
        self._paid_until = clock.now()
        """When all bytes that were moved are paid for."""

    def spend(self, nbytes: int) -> None:
        """Take ``nbytes``, even if the budget has fewer."""
        with self._guard:
            self._paid_until = max(self._paid_until, self._clock.now()) + nbytes / self._rate

    def wait(self) -> None:
        """Return once all bytes that were taken are paid for."""
        while True:
            with self._guard:
                seconds = self._paid_until - self._clock.now()
            if seconds <= 0:
                return
            self._clock.wait(_NEVER, min(seconds, _LONGEST))


class Limited:
    """A store that moves ``rate`` bytes per second on average, uploads and downloads together.

    A call waits until the calls before it are paid for, and then runs at the speed of the link: downloads, which are
    made of many ranges, keep close to the rate, while a large object that is uploaded is followed by a pause. It wraps
    `Patient`, so that waiting does not count against the time that a call may take.
    """

    def __init__(self, store: Store, rate: float, clock: Clock = CLOCK):
        self.store = store
        self._allowance = Allowance(rate, clock)

    @property
    def url(self) -> str:
        return self.store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._allowance.wait()
        data = self.store.get(key, start, length)
        self._allowance.spend(len(data))
        return data

    def put(self, key: str, data: Data) -> None:
        self._pay_for(data)
        self.store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._pay_for(data)
        return self.store.create(key, data)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return self.store.list(prefix, after)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def put_all(self, objects: Mapping[str, Data], stored: Stored) -> None:
        self._pay_for(*objects.values())
        put_all(self.store, objects, stored)

    def delete_all(self, keys: Collection[str]) -> None:
        delete_all(self.store, keys)

    def debris(self) -> Iterator[Listed]:
        return iter(debris(self.store))

    def discard_debris(self, keys: Collection[str]) -> None:
        discard_debris(self.store, keys)

    def _pay_for(self, *data: Data) -> None:
        """Wait for earlier calls, and take the bytes now: calls that begin during this one wait for them."""
        self._allowance.wait()
        self._allowance.spend(sum(map(size_of, data)))
