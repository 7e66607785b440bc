"""Time limits and retries for any store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from weightcast.errors import UnreachableError
from weightcast.store.backoff import Backoff
from weightcast.store.base import (
    Batching,
    Data,
    Listed,
    Store,
    Stored,
    check_prefix,
    check_range,
    debris,
    discard_debris,
    size_of,
)
from weightcast.store.threads import Outcome, begin

R = TypeVar("R")

_SLOWEST = 1e6
"""Bytes per second: a slower call is abandoned."""

_UNKNOWN = 64 << 20
"""Bytes that the time limit of a `get` without a length allows for."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 20.0
"""Seconds between two attempts, give or take a fifth."""

_HASTY = 10.0
"""Seconds for a call, where another store can be asked."""

_FIRST_PAGE, _LARGEST_PAGE = 16, 1024

_MOST_DELETED = 500
"""Objects in one attempt, which has a limited time."""

_MOST_ABANDONED = 16
"""Abandoned calls at most; each keeps a thread and its data until the system returns from it."""


class Patient:
    """A store that retries `UnreachableError`, and limits the time of each call and the number of calls at once.

    An attempt gets ``timeout`` seconds, and more for its bytes; None: as long as it takes, without another thread.
    An abandoned call may hang in the system without end, as on a mount whose server is gone. Once there are 16 of
    those, attempts fail at once until one of them returns.
    An abandoned `put` may still be carried out later, even after a newer one of the same key. An abandoned `create`
    may have succeeded, and the next attempt returns False: read the object back and compare.
    """

    def __init__(
        self,
        store: Store,
        *,
        attempts: int = 5,
        timeout: float | None = 60.0,
        concurrency: int = 16,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[float, float], float] = random.uniform,
    ):
        self.store = store
        self._attempts = attempts
        self._timeout = timeout
        self._slots = threading.BoundedSemaphore(concurrency)
        self._abandoned: list[Outcome[Any]] = []
        self._guard = threading.Lock()
        self._sleep = sleep
        self._random = random

    def hasty(self) -> Patient:
        """The same store with one attempt and little time for each call."""
        return Patient(self.store, attempts=1, timeout=None if self._timeout is None else _HASTY)

    @property
    def url(self) -> str:
        return self.store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        return self._try(lambda: self.store.get(key, start, length), _UNKNOWN if length is None else length, key)

    def put(self, key: str, data: Data) -> None:
        return self._try(lambda: self.store.put(key, data), size_of(data), key)

    def create(self, key: str, data: Data) -> bool:
        return self._try(lambda: self.store.create(key, data), size_of(data), key)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return self._list(check_prefix(prefix, after), after)

    def delete(self, key: str) -> None:
        return self._try(lambda: self.store.delete(key), 0, key)

    def put_all(self, objects: Mapping[str, Data], stored: Stored) -> None:
        """One attempt for all of them where the store takes them together, else one for each."""
        store = self.store
        if isinstance(store, Batching):
            self._try(lambda: store.put_all(objects, stored), sum(map(size_of, objects.values())), None)
            return
        for key, data in objects.items():
            self.put(key, data)
            stored(key)

    def delete_all(self, keys: Collection[str]) -> None:
        store = self.store
        if not isinstance(store, Batching):
            for key in keys:
                self.delete(key)
            return
        for some in _batches(keys):
            self._try(partial(store.delete_all, some), 0, None)

    def debris(self) -> Iterator[Listed]:
        return iter(self._try(lambda: debris(self.store), 0, None))

    def discard_debris(self, keys: Collection[str]) -> None:
        for some in _batches(keys):
            self._try(partial(discard_debris, self.store, some), 0, None)

    def _list(self, prefix: str, after: str) -> Iterator[Listed]:
        """List page by page; a retry begins a new listing after the last key that was yielded."""
        kept: list[Iterator[Listed]] = []
        size = _FIRST_PAGE

        def page() -> tuple[list[Listed], Iterator[Listed]]:
            listing = kept.pop() if kept else self.store.list(prefix, after)
            return list(islice(listing, size)), listing

        while True:
            listed, listing = self._try(page, 0, None)
            yield from listed
            if len(listed) < size:
                return
            kept.append(listing)
            after = listed[-1].key
            size = min(2 * size, _LARGEST_PAGE)

    def _try(self, call: Callable[[], R], nbytes: int, key: str | None) -> R:
        backoff = Backoff(_FIRST_PAUSE / 2, _LONGEST_PAUSE, self._random)
        for _ in range(1, self._attempts):
            try:
                return self._once(call, nbytes, key)
            except UnreachableError:
                pause = backoff.failed()
            self._sleep(pause)
        return self._once(call, nbytes, key)

    def _once(self, call: Callable[[], R], nbytes: int, key: str | None) -> R:
        with self._slots:
            if self._timeout is None:
                return call()
            self._refuse_if_hung(key)
            limit = min(self._timeout + nbytes / _SLOWEST, threading.TIMEOUT_MAX)
            outcome = begin(call)
            if not outcome.wait(limit):
                with self._guard:
                    self._abandoned.append(outcome)
                hint = "Check the link, or allow more time."
                raise UnreachableError(f"no answer within {limit:.3g} s", url=self.url, key=key, hint=hint)
            return outcome.result()

    def _refuse_if_hung(self, key: str | None) -> None:
        with self._guard:
            self._abandoned = [outcome for outcome in self._abandoned if outcome.is_running()]
            hung = len(self._abandoned)
        if hung >= _MOST_ABANDONED:
            hint = "Check the mount or the link. Calls are accepted again once one of these returns."
            raise UnreachableError(f"{hung} earlier calls hang without an answer", url=self.url, key=key, hint=hint)


def hasty(store: Store) -> Store:
    """The store without retries and long waits, for a caller that can ask another one."""
    return store.hasty() if isinstance(store, Patient) else store


def _batches(keys: Collection[str]) -> Iterator[list[str]]:
    left = list(keys)
    for first in range(0, len(left), _MOST_DELETED):
        yield left[first : first + _MOST_DELETED]
