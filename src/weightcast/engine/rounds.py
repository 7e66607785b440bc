"""What all agents of engines have in common: rounds of steps until they are stopped, and a heartbeat after each."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from weightcast.channel.keys import Position
from weightcast.errors import WeightcastError
from weightcast.follow.loop import OnError, rounds
from weightcast.store.backoff import Clock

_LONGEST = 30.0
"""Seconds between two attempts at most: an engine that restarts serves old weights until the agent reaches it."""

U = TypeVar("U")


class EngineAgent(ABC, Generic[U]):
    """Follows a channel for an engine. ``U`` is what it says of an update."""

    def __init__(self, clock: Clock):
        self.position: Position | None = None
        """The engine's, as far as the agent knows."""
        self.trouble: WeightcastError | None = None
        """The error of the last round of `follow`, if it had one."""
        self.short: WeightcastError | None = None
        """Why the last round went to an older version than the policy wants, or why the mirror cannot follow."""
        self._clock = clock
        self._stopped = threading.Event()

    @abstractmethod
    def step(self) -> U | None:
        """Bring the engine to the version that the policy wants; None if it is there already."""

    @abstractmethod
    def close(self) -> None:
        """End, and leave engine and mirror as they can be left."""

    @abstractmethod
    def _beat(self) -> None:
        """Send a heartbeat if one is due."""

    def follow(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[U]:
        """Step until `stop`, and yield each update. An error ends it, unless ``on_error`` is given and returns.

        ``on_error`` also gets the reason if the newest version cannot be reached and the engine follows an older one,
        or if the engine follows and the mirror cannot.
        """
        return (update for update in self.rounds(every, on_error) if update is not None)

    def rounds(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[U | None]:
        """As `follow`, and yield None for a round that failed or found nothing."""

        def report(error: WeightcastError | None) -> None:
            if error is not None and on_error is not None:
                on_error(error)
            self.trouble = error
            self._beat()

        def step() -> U | None:
            update = self.step()
            report(self.short)
            return update

        handler = None if on_error is None else report
        return rounds(step, every=every, stopped=self._stopped, on_error=handler, clock=self._clock, longest=_LONGEST)

    def stop(self) -> None:
        """End `follow`, from any thread."""
        self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
