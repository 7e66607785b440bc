"""The command of `pull --exec`: run until it succeeds, at least once for every version that is not overtaken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.cli.console import tell, uninterrupted, warn
from weightcast.cli.settings import settings
from weightcast.disk.durable import disk_errors
from weightcast.follow.command import run_command
from weightcast.follow.command_record import Ran, read_ran, write_ran
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.store.backoff import CLOCK, Backoff, Clock


@dataclass(frozen=True)
class Arrival:
    """A version that the mirror has reached."""

    position: Position
    step: int | None
    nbytes: int
    """Fetched for it."""
    seconds: float
    lag: float | None
    """Seconds since it was committed, by two clocks; None if that cannot be known now."""


class Command:
    """Remembers in the mirror for which version it succeeded, and when to try again if it failed."""

    def __init__(self, text: str, folder: Path, clock: Clock = CLOCK):
        self._text, self._folder, self._clock = text, folder, clock
        self._ran = read_ran(folder)
        self._backoff = Backoff(1.0)
        self._failed: Position | None = None
        self._not_before = clock.now()
        self.problem: str | None = None
        """What went wrong the last time; None if it succeeded."""

    def ran(self, channel: str) -> Position | None:
        """The version of ``channel`` for which this very command last succeeded."""
        if self._ran is None or self._ran != Ran.of(channel, self._text, self._ran.position):
            return None
        return self._ran.position

    def is_due(self, channel: str, position: Position) -> bool:
        """Whether it has not succeeded for ``position``, and has waited long enough if it failed."""
        if self.ran(channel) == position:
            return False
        return self._failed != position or self._clock.now() >= self._not_before

    def run(self, channel: str, arrival: Arrival, event: bool = False) -> int:
        """Run it now; its exit code. The mirror's files do not change meanwhile."""
        with MirrorFolder(self._folder).shared():
            code = run_command(
                self._text,
                self._folder,
                arrival.position,
                arrival.step,
                stdout=2 if settings.as_json else None,  # standard output is for JSON alone if there is any
                starting=uninterrupted,
            )
        if code:
            self.failed(arrival.position, f"the command ended with exit code {code}")
        else:
            ran = Ran.of(channel, self._text, arrival.position)
            with disk_errors(self._folder):
                write_ran(self._folder, ran)
            self._ran, self._failed, self.problem = ran, None, None
            self._backoff.succeeded()
        if settings.as_json and event:
            tell({"event": "command", "version": arrival.position.version, "exit_code": code})
        elif code:
            warn(f"the command ended with exit code {code}")
        return code

    def failed(self, position: Position, problem: str) -> None:
        """Try again later, unless another version comes first."""
        if position != self._failed:
            self._backoff.succeeded()
        self._failed, self.problem = position, problem
        self._not_before = self._clock.now() + self._backoff.failed()
