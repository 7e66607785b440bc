"""Calls in threads that can be abandoned: one that hangs does not keep the process alive."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")

IDLE_SECONDS = 30.0
"""How long a thread waits for its next call before it ends."""


class Outcome(Generic[R]):
    """The outcome of a call in another thread: wait for it once, then take the result."""

    def __init__(self, call: Callable[[], R]):
        self._call = call
        self._result: list[R] = []
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self.thread: threading.Thread | None = None

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the call ended within ``seconds``."""
        return self._done.acquire(timeout=-1 if seconds is None else seconds)

    def is_running(self) -> bool:
        """Whether the thread of an abandoned call is still in it. In a forked child no thread is."""
        return self.thread is not None and self.thread.is_alive() and not self.wait(0)

    def result(self) -> R:
        """What the call returned; raises what it raised."""
        if self._error is None:
            return self._result.pop()
        try:
            raise self._error
        finally:
            self._error = None  # or the error and its traceback keep each other alive

    def run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the caller's thread
            self._error = error

    def announce(self) -> None:
        self._done.release()


class _Caller(threading.Thread):
    """A thread for one call at a time, which waits a while for the next."""

    def __init__(self, idle: float) -> None:
        super().__init__(name="weightcast-call", daemon=True)
        self.idle = idle
        self.inbox: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                outcome = self.inbox.get(timeout=self.idle)
            except queue.Empty:
                if _leave(self):
                    return
                continue
            outcome.run()
            with _guard:
                _idle.append(self)
            outcome.announce()  # after the line above, so that the next call finds this thread
            del outcome


_idle: list[_Caller] = []
_guard = threading.Lock()


def begin(call: Callable[[], R], *, idle: float = IDLE_SECONDS) -> Outcome[R]:
    """Start a call in a thread that is idle, or in a new one, which ends after ``idle`` seconds without a call."""
    outcome = Outcome(call)
    with _guard:
        caller = _idle.pop() if _idle else None
    if caller is None:
        caller = _Caller(idle)
        caller.start()
    outcome.thread = caller
    caller.inbox.put(outcome)
    return outcome


def _leave(caller: _Caller) -> bool:
    """Whether ``caller`` may end: not if another thread is about to give it a call."""
    with _guard:
        if caller in _idle:
            _idle.remove(caller)
            return True
    return False


def _forget() -> None:
    """In a forked child, which has none of the threads."""
    global _guard
    _guard = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
