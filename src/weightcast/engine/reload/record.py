"""What a mirror remembers of the engine that loads it: which version it has loaded, and whether a load is unfinished.

    begin ──▶ load ──▶ succeeded: the version counts
                  ├──▶ failed: none does
                  └──▶ killed, or no answer: the engine may still read the files, which must not change

It survives a kill: the next agent neither believes that a load succeeded, nor changes files that are being read.
"""

from __future__ import annotations

from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.disk.durable import disk_errors, remove, write_mark
from weightcast.follow.command_record import Ran, read_ran, write_ran
from weightcast.follow.mirror_folder import MirrorFolder


class LoadRecord:
    """The record of one engine, by its address; that of another one does not count."""

    def __init__(self, folder: Path, engine: str):
        self._folder, self._engine = folder, engine
        self._place = MirrorFolder(folder)

    @property
    def is_unfinished(self) -> bool:
        """Whether a load was begun, and is not known to have ended."""
        return self._place.loading.exists()

    def loaded(self, channel: str) -> Position | None:
        """The version of ``channel`` that the engine has loaded; None if that is not known."""
        ran = None if self.is_unfinished else read_ran(self._folder)
        if ran is None or ran != Ran.of(channel, self._engine, ran.position):
            return None
        return ran.position

    def begin(self) -> None:
        with disk_errors(self._folder):
            write_mark(self._place.loading)

    def succeeded(self, channel: str, position: Position) -> None:
        with disk_errors(self._folder):
            write_ran(self._folder, Ran.of(channel, self._engine, position))
            remove(self._place.loading)

    def failed(self) -> None:
        """The load has ended, and what the engine has now is not known."""
        with disk_errors(self._folder):
            remove(self._place.ran)
            remove(self._place.loading)
