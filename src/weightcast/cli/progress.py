"""Progress bars on standard error. rich is imported when the first one is drawn."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightcast.cli.settings import settings
from weightcast.cli.wording import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def _is_shown() -> bool:
    return sys.stderr.isatty() and not settings.quiet


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show ``text`` on standard error meanwhile, if that is a terminal."""
    if not _is_shown():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


class Bars:
    """Bars on standard error, there only while something takes long: output never lands among them."""

    def __init__(self, patience: float = 0.3) -> None:
        """What is done within ``patience`` seconds needs no bar."""
        self._patience = patience
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if not _is_shown():
                return
            self._begun = self._begun or time.monotonic()
            if self._progress is None:
                if time.monotonic() - self._begun < self._patience:
                    return
                self._progress = _progress()
                self._progress.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(one_line(stage), total=total)
            self._progress.update(self._tasks[stage], completed=done, total=total)

    def clear(self) -> None:
        """Clear the screen's line; the next report starts from the beginning."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
            self._progress, self._tasks, self._begun = None, {}, 0.0


def _progress() -> Progress:
    """Bars with their stage, percentage and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    stage, percent = TextColumn("{task.description:>8}", markup=False), TextColumn("{task.percentage:>3.0f} %")
    return Progress(stage, BarColumn(), percent, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


bars = Bars()
