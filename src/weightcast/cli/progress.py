"""Progress bars on standard error. rich is imported when the first one is drawn."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from weightcast.cli.settings import settings

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from weightcast.cli.terminal import Terminal


class Bars:
    """Bars on standard error, there only while something takes long: output never lands among them."""

    _PATIENCE = 0.3
    """Seconds: what is done sooner needs no bar."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if settings.quiet or not sys.stderr.isatty():
                return
            self._begun = self._begun or time.monotonic()
            if self._progress is None and time.monotonic() - self._begun < self._PATIENCE:
                return
            if self._progress is None:
                from weightcast.cli.terminal import err

                self._progress = progress_on(err)
                self._progress.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=total)
            self._progress.update(self._tasks[stage], completed=done, total=total)

    def clear(self) -> None:
        """Clear the screen's line; the next report starts from the beginning."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
            self._progress, self._tasks, self._begun = None, {}, 0.0


def progress_on(console: Terminal) -> Progress:
    """Bars with their stage, percentage and time left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    stage, percent = TextColumn("{task.description:>8}", markup=False), TextColumn("{task.percentage:>3.0f} %")
    return Progress(stage, BarColumn(), percent, TimeRemainingColumn(), console=console, transient=True)


bars = Bars()
