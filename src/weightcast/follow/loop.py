"""The loop of every follower: a step, then a pause; longer pauses while steps fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from weightcast.errors import WeightcastError
from weightcast.store.backoff import CLOCK, LONGEST, Backoff, Clock

T = TypeVar("T")

OnError = Callable[[WeightcastError], None]
"""Called with each error of a step. The loop goes on when it returns, and ends with whatever it raises."""


def rounds(
    step: Callable[[], T | None],
    *,
    every: float,
    stopped: threading.Event,
    on_error: OnError | None = None,
    clock: Clock = CLOCK,
    longest: float = LONGEST,
) -> Iterator[T | None]:
    """Call ``step`` until ``stopped`` is set; yield each result, and None for a round that failed or found nothing.

    After a result the next round begins at once. After None it begins ``every`` seconds later; after failures in a row
    twice as long each time, up to ``longest`` seconds. Without ``on_error`` the first error ends the loop.
    """
    backoff = Backoff(every, longest)
    while not stopped.is_set():
        result = None
        try:
            result = step()
        except WeightcastError as error:
            if on_error is None:
                raise
            on_error(error)
            pause = backoff.failed()
        else:
            backoff.succeeded()
            pause = backoff.idle()
        yield result
        if result is None:
            clock.wait(stopped, pause)
