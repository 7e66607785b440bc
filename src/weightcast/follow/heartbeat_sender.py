"""A replica's heartbeats: reports to the bucket, sent now and then, and less often where the bucket refuses them."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import delete_heartbeat, heartbeat_of, put_heartbeat
from weightcast.channel.keys import Position, check_name
from weightcast.channel.records import Heartbeat
from weightcast.disk.durable import replacing
from weightcast.errors import AccessError, StoreError, UnsupportedError, WeightcastError
from weightcast.format.cut import Cut
from weightcast.store.backoff import CLOCK, Backoff, Clock

BEAT_EVERY, BEAT_MOST = 30.0, 5.0
"""Seconds between two heartbeats when nothing is new, and when something is."""

FRESH = 90.0
"""Seconds for which a heartbeat counts: three of an idle replica."""

_LONGEST = 3600.0
"""Seconds between two attempts at most, where the bucket refuses heartbeats."""

_NOTHING: Mapping[str, float] = {}

_log = logging.getLogger("weightcast")


class HeartbeatSender:
    """Reports under one name. No reader needs a heartbeat, so errors of the bucket are not raised."""

    def __init__(self, replica: str, instance_file: Path | None = None, clock: Clock = CLOCK):
        """``instance_file`` remembers the process before this one, which is not taken for a rival."""
        self.replica = check_name(replica, "replica")
        self.instance = uuid.uuid4().hex
        self._instance_file = instance_file
        self._clock = clock
        self._sent: tuple[Position, str | None, int | None] | None = None
        """Position, error and command's version of the last heartbeat, if it was sent."""
        self._error: str | None = None
        self._ours = {self.instance}
        self._rivals: set[str] = set()
        self._last: float | None = None
        self._checked: float | None = None
        self._refusals = Backoff(BEAT_EVERY, _LONGEST)
        self._not_before = clock.now()

    def report(
        self,
        chain: Chain,
        position: Position,
        *,
        error: str | None = None,
        pause: float | None = None,
        ran: int | None = None,
        cuts: tuple[Cut, ...] = (),
        seconds: Mapping[str, float] = _NOTHING,
        at_once: bool = False,
    ) -> None:
        """Send a heartbeat if one is due: every half minute, or 5 s after the last one if something is new.

        A new ``error``, or the end of one, is sent at once; with ``at_once`` any news is.
        """
        now, news = self._clock.now(), (position, error, ran)
        every = BEAT_EVERY if news == self._sent else 0.0 if at_once else BEAT_MOST
        is_young = self._last is not None and now - self._last < every
        if now < self._not_before or (is_young and error == self._error):
            return
        self._warn_of_rivals(chain, now)
        self._last, self._sent, self._error = now, None, error
        try:
            beat = Heartbeat(self.replica, position, time.time(), error, pause, self.instance, ran, cuts, seconds)
            put_heartbeat(chain, beat)
        except UnsupportedError:
            self._not_before = float("inf")  # a bucket that can only be read, as over http
        except AccessError:
            self._not_before = now + self._refusals.failed()
        except StoreError:
            pass  # the next one may succeed
        else:
            self._sent = news
            self._refusals.succeeded()

    def withdraw(self, chain: Chain) -> None:
        """Delete our heartbeat, so that trainers stop waiting for it; not a successor's under the same name."""
        if self._sent is None:
            return
        with suppress(StoreError):  # then it grows old
            found = heartbeat_of(chain, self.replica)
            if found is not None and found.instance == self.instance:
                delete_heartbeat(chain, self.replica)

    def _warn_of_rivals(self, chain: Chain, now: float) -> None:
        """Warn if another process reports under our name: the slower of the two is invisible, to `gc` too."""
        first = self._checked is None
        if self._checked is not None and now - self._checked < BEAT_EVERY:
            return
        self._checked = now
        if first and self._instance_file is not None:
            with suppress(OSError):  # then a restart may be taken for a rival: one warning too many
                self._ours |= _exchange(self._instance_file, self.instance)
        found = None
        with suppress(StoreError):
            found = heartbeat_of(chain, self.replica)
        if found is None or found.instance in self._ours | self._rivals:
            return
        if not first or abs(time.time() - found.time) < FRESH:
            self._rivals.add(found.instance)
            _log.warning(
                "another process reports as replica %s, or did a moment ago: `status` and `gc` see only one of them. "
                "Give each a name of its own with --replica.",
                self.replica,
            )


def _exchange(file: Path, instance: str) -> set[str]:
    """Replace the instance that ``file`` remembers; returns the one before."""
    before = set()
    with suppress(FileNotFoundError):
        before = {file.read_text("ascii", "replace")[:32]}
    with replacing(file) as out:
        out.write(instance.encode())
    return before


def error_text(error: WeightcastError) -> str:
    """An error as one line of bounded length, for a heartbeat."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown[:500] or type(error).__name__


def default_replica(folder: Path | None = None) -> str:
    """A name for a replica: this host's, and a few digits that tell its folders apart."""
    host = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname()).strip("-.")[:80] or "replica"
    if folder is None:
        return host
    return f"{host}-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}"
