"""What replicas report, and how long after its commit each version was live, as far as that was watched."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeat_at
from weightcast.channel.keys import REPLICAS, Position
from weightcast.channel.records import Heartbeat, Manifest
from weightcast.store.base import Listed
from weightcast.view.journal import Journal, short

MOST_READ, MOST_SHOWN = 1000, 200
"""Replicas whose heartbeats are read, and which are shown: failing ones first, then those that are furthest behind."""

MOST_ARRIVALS = 200
"""Versions of which is kept when they became live."""

_LARGEST = 1 << 22
"""Bytes of a heartbeat that is read."""

Commits = Callable[[int], Manifest | None]
"""The commit of a version, if it is known."""


class ReplicaWatch:
    """Reads heartbeats that are new, and keeps the others."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._seen: dict[str, tuple[Listed, int, Heartbeat | None]] = {}
        self._arrivals: dict[int, list[float]] = {}
        self._looked = False

    def look(self, chain: Chain, pool: Executor, head: int | None, commits: Commits) -> None:
        if chain.guard is not None:
            chain.guard.refresh()  # replicas' keys come and go
        listing = chain.store.list(REPLICAS)
        listed = {one.key: one for one in islice(listing, MOST_READ)}
        more = sum(1 for _ in islice(listing, 100_000))
        due = [one for one in listed.values() if self._is_due(one) and one.size <= _LARGEST]
        for one, beat in zip(due, pool.map(partial(heartbeat_at, chain), [one.key for one in due]), strict=True):
            _, reads, before = self._seen.get(one.key, (None, 0, None))
            again = reads + 1 if self._seen.get(one.key, (None,))[0] == one else 0
            beat = beat and replace(beat, cuts=())  # they can be large, and are not shown
            self._seen[one.key] = one, again, beat
            if beat is not None:
                self._compare(before, beat, commits)
        for key in self._seen.keys() - listed.keys():
            _, _, gone = self._seen.pop(key)
            if gone is not None:
                self._journal.tell("", "reports no more", gone.replica)
        self._looked = True
        self._write(head, more, commits)

    def _is_due(self, listed: Listed) -> bool:
        """Whether to read it: it is new, or was when it was read last, within the resolution of the store's clock."""
        known = self._seen.get(listed.key)
        return known is None or known[0] != listed or known[1] < 1

    def _compare(self, before: Heartbeat | None, beat: Heartbeat, commits: Commits) -> None:
        if beat.error and (before is None or before.error != beat.error):
            self._journal.tell("bad", f"fails: {short(beat.error)}", beat.replica)
        elif before is not None and before.error and not beat.error:
            self._journal.tell("good", "works again", beat.replica)
        if not self._looked:
            return
        if before is None:
            self._journal.tell("", f"joined at version {beat.position.version}", beat.replica)
        elif before.position != beat.position and (after := _after_commit(beat, commits)) is not None:
            self._arrivals.setdefault(beat.position.version, []).append(after)

    def _write(self, head: int | None, more: int, commits: Commits) -> None:
        beats = [(beat, listed.modified) for listed, _, beat in self._seen.values() if beat is not None]
        rows = [_row(beat, heard, head, commits) for beat, heard in beats]
        rows.sort(key=lambda row: (row["error"] is None, -(row["behind"] or 0), row["name"]))
        behind = [row["behind"] for row in rows if row["behind"] is not None]
        self._journal.put(
            "replicas",
            {
                "rows": rows[:MOST_SHOWN],
                "total": len(rows),
                "unread": more,
                "upToDate": sum(versions == 0 for versions in behind),
                "failing": sum(row["error"] is not None for row in rows),
                "worst": max(behind, default=None),
            },
        )
        for version in sorted(self._arrivals)[:-MOST_ARRIVALS]:
            del self._arrivals[version]

    def arrivals(self) -> list[list[float]]:
        """Of each version: how many replicas reported it, and the least, the median and the most seconds after commit.

        Replicas report a new version at once or, if they have just reported another one, some seconds later.
        """
        return [spread(version, found) for version, found in sorted(self._arrivals.items())]


def _after_commit(beat: Heartbeat, commits: Commits) -> float | None:
    """Seconds from a commit to a heartbeat, by two clocks."""
    manifest = commits(beat.position.version)
    if manifest is None or manifest.position != beat.position:
        return None
    return beat.time - manifest.time


def spread(version: int, found: Iterable[float]) -> list[float]:
    seconds = sorted(found)
    return [version, len(seconds), *(round(x, 3) for x in (seconds[0], statistics.median(seconds), seconds[-1]))]


def _since(beat: Heartbeat, head: int, commits: Commits) -> int:
    """How many versions were committed after a heartbeat, by the clocks of writer and replica."""
    for version in range(head, beat.position.version, -1):
        manifest = commits(version)
        if manifest is None or manifest.time <= beat.time:
            return head - version
    return max(0, head - beat.position.version)


def _row(beat: Heartbeat, heard: float, head: int | None, commits: Commits) -> dict[str, Any]:
    position: Position = beat.position
    seconds: Mapping[str, float] = beat.seconds
    return {
        "name": short(beat.replica),
        "version": position.version,
        "lag": None if head is None else head - position.version,
        "behind": None if head is None else max(0, head - position.version - _since(beat, head, commits)),
        "heard": round(heard, 3),
        "pause": beat.pause,
        "seconds": [[short(phase), took] for phase, took in seconds.items()],
        "ran": beat.ran,
        "error": short(beat.error),
    }
