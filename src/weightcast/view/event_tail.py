"""What phases took, from the lines that `--events` of other verbs and `JsonLines` write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weightcast.channel.keys import MAX_VERSION
from weightcast.errors import UsageError
from weightcast.events.event import FORMAT, PHASES, ROLES
from weightcast.view.journal import short
from weightcast.view.replica_watch import MOST_ARRIVALS, Commits, spread

_AT_ONCE = 1 << 20
_FIRST = 8 << 20
"""Bytes at the end of a file that are read when it is opened; what is before them is not."""

_VERSIONS, _ROWS, _SPANS, _LIVE = 16, 12, 32, 256
"""The newest versions that are kept, with so many names each, and phases of each; names with a version live."""

_WHO = {role: i for i, role in enumerate(ROLES)}
_WHAT = {phase: i for i, phase in enumerate(PHASES)}


class EventTail:
    """Follows a file of events, which may be cut off or replaced, and keeps the newest versions' phases."""

    def __init__(self, path: Path):
        """`UsageError` if there is no such file."""
        self._path, self._at, self._rest, self._file = path, 0, b"", (0, 0)
        self._phases: dict[int, dict[tuple[str, str], dict[str, list[Any]]]] = {}
        self._live: dict[int, dict[tuple[str, str], float]] = {}
        if not path.is_file():
            raise UsageError("there is no such file", file=str(path), hint="Name a file that --events writes.")

    def read(self, channel: str) -> bool:
        """Take in what was appended, at most a MB; whether there is more."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._at:
                    self._file, self._rest = (status.st_dev, status.st_ino), b""
                    self._at = max(0, status.st_size - _FIRST)
                file.seek(self._at)
                data = file.read(_AT_ONCE)
        except FileNotFoundError:
            return False  # it is being replaced
        self._at += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) < _AT_ONCE else b""
        for line in lines:
            self._take(line, channel)
        return len(data) == _AT_ONCE

    def _take(self, line: bytes, channel: str) -> None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return  # the end of a line of which the beginning was not read, or no event
        if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.get("channel") != channel:
            return
        phase, role, name = fields.get("phase"), fields.get("role"), fields.get("name")
        if not isinstance(phase, str) or not isinstance(role, str):
            return
        version, began, seconds = fields.get("version"), _time(fields.get("began")), _time(fields.get("seconds"))
        if phase not in _WHAT or role not in _WHO or not isinstance(name, str | None) or type(version) is not int:
            return
        if began is None or seconds is None or not 0 <= version <= MAX_VERSION:
            return
        rows = self._phases.setdefault(version, {})
        key = (role, short(name) or "")
        if key in rows or len(rows) < _ROWS:
            spans = rows.setdefault(key, {})
            if phase in spans or len(spans) < _SPANS:
                spans[phase] = [phase, began, seconds, _time(fields.get("bytes")) or 0]
        for old in sorted(self._phases)[:-_VERSIONS]:
            del self._phases[old]
        if phase in ("apply", "load") and role in ("replica", "engine"):
            live = self._live.setdefault(version, {})
            if key in live or len(live) < _LIVE:
                live.setdefault(key, began + seconds)
            for old in sorted(self._live)[:-MOST_ARRIVALS]:
                del self._live[old]

    def arrivals(self, commits: Commits) -> list[list[float]]:
        """Of each version that was committed: how many have it live, and the spread of seconds after its commit."""
        known = ((version, commits(version), live) for version, live in sorted(self._live.items()))
        return [
            spread(version, (when - manifest.time for when in live.values()))
            for version, manifest, live in known
            if manifest is not None
        ]

    def as_json(self) -> list[dict[str, Any]]:
        """The newest versions, each with the phases of everybody who told of it."""
        return [
            {
                "version": version,
                "rows": [
                    {"role": role, "name": name, "spans": sorted(spans.values(), key=lambda span: _WHAT[span[0]])}
                    for (role, name), spans in sorted(rows.items(), key=lambda item: (_WHO[item[0][0]], item[0][1]))
                ],
            }
            for version, rows in sorted(self._phases.items())
        ]


def _time(value: Any) -> float | None:
    """A number that can be one of seconds or bytes; None for anything else."""
    return value if type(value) in (int, float) and 0 <= value < 1e12 else None
