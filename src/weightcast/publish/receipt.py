"""What `publish` returns at once: a promise of the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from weightcast.channel.records import Manifest


class Receipt:
    """The outcome of a `publish`: `result` waits for the commit that carries it, and so does `await`.

    Where nothing had changed there is no new version: the result is the head that has these weights, and `is_new`
    is False.
    """

    def __init__(self, step: int | None = None, label: str | None = None, on_raise: Callable[[], None] = lambda: None):
        """``on_raise`` is called when the caller learns that it failed."""
        self.step = step
        self.label = label
        self.is_new: bool | None = None
        """Whether a version was committed for it; None until that is known."""
        self._on_raise = on_raise
        self._future: Future[Manifest] = Future()
        self._future.set_running_or_notify_cancel()  # a task that awaits it may be cancelled, the commit may not

    def result(self, timeout: float | None = None) -> Manifest:
        """The commit; raises what prevented it, or `TimeoutError`."""
        try:
            return self._future.result(timeout)
        finally:
            self._call_if_failed()

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Manifest]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:
            self._call_if_failed()

    def succeed(self, manifest: Manifest, is_new: bool = True) -> None:
        """Called by the publisher, once."""
        self.is_new = is_new
        self._future.set_result(manifest)

    def fail(self, error: BaseException) -> None:
        """Called by the publisher; a receipt that is done does not change."""
        if not self._future.done():
            self._future.set_exception(error)

    def _call_if_failed(self) -> None:
        if self._future.done() and self._future.exception() is not None:
            self._on_raise()
