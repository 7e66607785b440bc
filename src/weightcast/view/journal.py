"""What is known of a channel, in parts that have revision numbers: a page asks only for what is new."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

_MOST_NEWS = 100
_MOST_TEXT = 300
"""Characters of a text from outside."""


def short(text: str | None) -> str | None:
    """A text from outside, cut to what a page shows of one."""
    return text if text is None or len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


class Journal:
    """Parts by name, rows by version, and news. Any thread may write and read."""

    def __init__(self, wall: Callable[[], float]):
        self._wall = wall
        self._looked = wall()
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._epoch, self._revision = secrets.token_hex(8), 0
        self._parts: dict[str, tuple[int, Any]] = {}
        self._rows: dict[str, dict[int, tuple[int, Any]]] = {}
        self._oldest: dict[str, int] = {}
        self._news: list[tuple[int, dict[str, Any]]] = []

    def begin_again(self) -> None:
        """Forget everything: it is another channel."""
        with self._lock:
            self._clear()

    def looked(self) -> None:
        """A look at the channel has ended, well or not."""
        self._looked = self._wall()

    def put(self, name: str, value: Any) -> None:
        with self._lock:
            if name not in self._parts or self._parts[name][1] != value:
                self._parts[name] = self._next(), value

    def put_row(self, name: str, version: int, value: Any) -> None:
        with self._lock:
            rows = self._rows.setdefault(name, {})
            if version not in rows or rows[version][1] != value:
                rows[version] = self._next(), value

    def keep_rows(self, name: str, oldest: int) -> None:
        """Forget the rows of older versions."""
        with self._lock:
            self._oldest[name] = oldest
            rows = self._rows.get(name, {})
            for version in [version for version in rows if version < oldest]:
                del rows[version]

    def tell(self, tone: str, text: str, subject: str | None = None) -> None:
        """News: ``text`` is ours, ``subject`` may come from outside; tone is good, warn, bad or empty."""
        with self._lock:
            item = {"time": round(self._wall(), 3), "tone": tone, "text": text, "subject": short(subject)}
            self._news = [*self._news, (self._next(), item)][-_MOST_NEWS:]

    def _next(self) -> int:
        self._revision += 1
        return self._revision

    def since(self, epoch: str = "", revision: int = 0) -> dict[str, Any]:
        """What is newer than a revision; everything if that is of another epoch."""
        with self._lock:
            whole = epoch != self._epoch or revision > self._revision
            after = 0 if whole else revision
            return {
                "epoch": self._epoch,
                "revision": self._revision,
                "whole": whole,
                "now": round(self._wall(), 3),
                "looked": round(self._looked, 3),
                "parts": {name: value for name, (at, value) in self._parts.items() if at > after},
                "rows": {
                    name: {"oldest": self._oldest.get(name, 0), "new": found}
                    for name, rows in self._rows.items()
                    if (found := [[version, value] for version, (at, value) in sorted(rows.items()) if at > after])
                },
                "news": [item for at, item in self._news if at > after],
            }
