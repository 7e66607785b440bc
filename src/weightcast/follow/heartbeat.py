"""Heartbeats: a replica's reports to the bucket, sent rarely, and retried later where they are refused."""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position, check_name
from weightcast.channel.notes import beat, heartbeat_of
from weightcast.channel.records import Heartbeat
from weightcast.disk.durable import replacing
from weightcast.errors import AccessError, StoreError, UnsupportedError, WeightcastError
from weightcast.store.backoff import CLOCK, Backoff, Clock

BEAT_EVERY, BEAT_MOST = 30.0, 5.0
"""Seconds between two heartbeats when nothing is new, and when something is."""

_FRESH = 90.0
"""Seconds: three heartbeats of a replica that has nothing to do."""

_LONGEST = 3600.0
"""Seconds between two attempts at most, where the bucket refuses heartbeats."""

_log = logging.getLogger("weightcast")


class Pulse:
    """Reports under one name. Nobody needs a heartbeat, so no error of the bucket gets out of here."""

    def __init__(self, replica: str, note: Path | None = None, clock: Clock = CLOCK):
        """``note`` is a file that remembers the process before this one: it is not taken for a rival."""
        self.replica = check_name(replica, "replica")
        self.instance = uuid.uuid4().hex
        self.told: Position | None = None
        """The position in the last heartbeat, if that got through."""
        self._error: str | None = None
        self._note = note
        self._clock = clock
        self._ours = {self.instance}
        self._rivals: set[str] = set()
        self._last: float | None = None
        self._looked: float | None = None
        self._refusals = Backoff(BEAT_EVERY, _LONGEST)
        self._not_before = clock.now()

    def beat(
        self,
        chain: Chain,
        position: Position,
        *,
        error: str | None = None,
        pause: float | None = None,
        ran: int | None = None,
        every: float = BEAT_EVERY,
    ) -> bool:
        """Report, unless the last report is younger than ``every`` seconds and had the same ``error``, or none.

        Whether a report got through.
        """
        now = self._clock.now()
        is_young = self._last is not None and now - self._last < every
        if now < self._not_before or (is_young and error == self._error):
            return False
        self._look_for_rivals(chain, now)
        self._last, self.told, self._error = now, None, error
        try:
            beat(chain, Heartbeat(self.replica, position, time.time(), error, pause, self.instance, ran))
        except UnsupportedError:
            self._not_before = float("inf")  # a bucket that is only read, as over http
        except AccessError:
            self._not_before = now + self._refusals.failed()
        except StoreError:
            pass  # nobody misses one; the next may get through
        else:
            self.told = position
            self._refusals.succeeded()
        return self.told is not None

    def _look_for_rivals(self, chain: Chain, now: float) -> None:
        """Warn if another process reports under our name: the slower of the two is invisible, to `gc` too."""
        first = self._looked is None
        if self._looked is not None and now - self._looked < BEAT_EVERY:
            return
        self._looked = now
        if first and self._note is not None:
            with suppress(OSError):  # then a restart may be taken for a rival: a warning too many
                self._ours |= _exchange(self._note, self.instance)
        found = None
        with suppress(StoreError):
            found = heartbeat_of(chain, self.replica)
        if found is None or found.instance in self._ours | self._rivals:
            return
        if not first or abs(time.time() - found.time) < _FRESH:
            self._rivals.add(found.instance)
            _log.warning(
                "another process reports as replica %s, or did a moment ago: `status` and `gc` see only one of them. "
                "Give each a name of its own with --replica.",
                self.replica,
            )


def _exchange(note: Path, instance: str) -> set[str]:
    """Remember this process in the place of the one before it, which is given out."""
    before = set()
    with suppress(FileNotFoundError):
        before = {note.read_text("ascii", "replace")[:32]}
    with replacing(note) as file:
        file.write(instance.encode())
    return before


def error_text(error: WeightcastError) -> str:
    """An error as one line of bounded length, for a heartbeat."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown[:500] or type(error).__name__
