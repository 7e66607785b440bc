"""What `pull --follow` and `attach` print while they follow a channel: events, for people or programs."""

from __future__ import annotations

import time
from typing import Any

from weightcast.cli.console import caution, fields_of, say, tell
from weightcast.cli.wording import span
from weightcast.errors import SpaceError, WeightcastError
from weightcast.store.backoff import CLOCK, Clock


def print_event(event: str, line: str, **fields: Any) -> None:
    """Print an event: for people a line with the time of day, for programs its fields."""
    tell({"event": event, "time": round(time.time(), 3), **fields})
    say(f"{time.strftime('%H:%M:%S')}  {line}")


def print_end(version: int | None) -> None:
    """Print the version at which following ended."""
    tell({"event": "end", "version": version})
    say(f"stopped at version {version}" if version is not None else "stopped before any version came")


def print_warning(error: WeightcastError) -> None:
    """Print an error while following goes on."""
    tell({"event": "warning", **fields_of(error)})
    caution(str(error))


class Outage:
    """Warns once about each error of an outage, however often it is tried again, and says when it is over."""

    def __init__(self, fatal: tuple[type[WeightcastError], ...], clock: Clock = CLOCK):
        """``fatal`` errors do not pass, so they are raised."""
        self._fatal, self._clock = fatal, clock
        self._warned: set[str] = set()
        self._began: float | None = None
        self._failed = False

    def warn(self, error: WeightcastError) -> None:
        """Print an error once; raise one that does not pass."""
        if isinstance(error, self._fatal):
            raise error
        # The text of a full disk holds how much is free, which changes all the time.
        text = "the disk is full" if isinstance(error, SpaceError) else str(error)
        if text not in self._warned:
            print_warning(error)
        self._warned.add(text)

    def failed(self, error: WeightcastError) -> None:
        """A round failed."""
        self.warn(error)
        self._failed = True
        if self._began is None:
            self._began = self._clock.now()

    def round_ended(self) -> None:
        """Call it after every round: the first one that did not fail ends the outage."""
        if self._began is not None and not self._failed:
            lasted = self._clock.now() - self._began
            print_event("recovered", f"back to normal after {span(lasted)}", seconds=round(lasted, 3))
            self._began = None
            self._warned.clear()
        self._failed = False
