"""A store in which one request, by its number, fails, is cut short, delayed or repeated, or is the last one.

`FaultyStore` numbers every request, so that a clean run says how many there are to try (`faults_of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripted_store import Request, ScriptedStore

from weightcast.channel.keys import HEAD
from weightcast.errors import MissingError, UnreachableError
from weightcast.store.base import Data, Listed, Store

INJECTED: Counter[str] = Counter()
"""Faults injected in this session by the operation they hit; conftest.py prints it."""


class Crash(BaseException):
    """The process ends here: nothing catches it, and nothing that still runs has an effect."""


READ_FAULTS = ("refuse", "cut", "delay", "twice", "die")
WRITE_FAULTS = ("refuse", "lose", "cut", "delay", "twice", "die", "die-after")
READS = ("get", "list")
HOUR = 3600.0


class FaultyStore(ScriptedStore):
    """A store in which one request, the ``at``-th, meets a ``fault``.

    ``refuse``: it fails and had no effect. ``lose``: it took effect, the answer is lost. ``cut``: half of the bytes or
    of the listing arrives; a write fails midway, so it has no effect. ``delay``: a write is given up, and takes effect
    after the requests that follow; the answer to a read arrives after an hour by the store's clock. ``twice``: it is
    made twice, the second answer counts. ``stale``: listings lack their last keys, and the head hint is missing or an
    older one. ``die``, ``die-after``: the process ends before or after it, and no later request gets through. ``part``,
    ``part-after``: likewise, but the process lives on.
    """

    def __init__(self, store: Store, fault: str | None = None, at: int = 0, lacking: int = 2):
        super().__init__(store)
        self.fault, self.at, self.lacking = fault, at, lacking
        self.at_request: tuple[str, str] | None = None
        """In place of ``at``: the first request with this verb and key."""
        self.dead = False
        self.old_head: bytes | None = None
        self._late: list[Callable[[], object]] = []
        self.on("", "", self._meet)

    @property
    def hit(self) -> bool:
        return self.fault == "stale" or (self.fault is not None and len(self.calls) >= self.at)

    def put(self, key: str, data: Data) -> None:
        super().put(key, data.read_bytes() if isinstance(data, Path) else data)  # the file may be gone if it is late

    def settle(self) -> None:
        """Writes that were delayed take effect now."""
        with self._lock:
            late, self._late = self._late, []
        for effect in late:
            effect()

    def _meet(self, request: Request, proceed: Callable[[], Any]) -> Any:
        if self.dead:
            raise self._unreachable(request) if self.fault in ("part", "part-after") else Crash
        if self.at_request == (request.verb, request.key):
            self.at, self.at_request = request.number, None
        if request.number > self.at + 1:
            self.settle()
        if self.fault == "stale":
            return self._stale(request, proceed)
        return self._fail(request, proceed) if self.fault is not None and request.number == self.at else proceed()

    def _stale(self, request: Request, proceed: Callable[[], Any]) -> Any:
        if request.key == HEAD and request.verb == "get":
            if self.old_head is None:
                raise MissingError("no such object", url=self.url, key=HEAD)
            return self.old_head
        answer = proceed()
        return answer[: max(0, len(answer) - self.lacking)] if request.verb == "list" else answer

    def _fail(self, request: Request, proceed: Callable[[], Any]) -> Any:
        reads = request.verb in READS
        match self.fault:
            case "lose" if not reads:
                proceed()
            case "twice":
                proceed()
                return proceed()
            case "cut" if reads:
                answer = proceed()
                half = answer[: len(answer) // 2]
                return half if request.verb == "get" else self._broken_off(half, request)
            case "delay" if reads:
                answer = proceed()
                self._let_pass(HOUR)
                return answer
            case "delay":
                self._late.append(proceed)
            case "die" | "die-after" | "part" | "part-after":
                if self.fault.endswith("after"):
                    proceed()
                self.dead = True
                if self.fault.startswith("die"):
                    raise Crash
        raise self._unreachable(request)

    def _let_pass(self, seconds: float) -> None:
        assert isinstance(self.store, ScriptedStore)
        assert self.store.now is not None
        self.store.now += seconds

    def _broken_off(self, listing: list[Listed], request: Request) -> Iterator[Listed]:
        yield from listing
        raise self._unreachable(request)

    def _unreachable(self, request: Request) -> UnreachableError:
        return UnreachableError(f"injected: {self.fault}", url=self.url, key=request.key)


def faults_of(calls: list[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    """Every (number, fault) that makes sense for the requests of a clean run."""
    for i, (verb, _) in enumerate(calls, 1):
        for fault in READ_FAULTS if verb in READS else WRITE_FAULTS:
            yield i, fault
