"""The command of `pull --exec`: run until it succeeds, at least once for every version that is not overtaken."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.cli.console import tell, uninterrupted, warn
from weightcast.cli.settings import settings
from weightcast.disk.durable import disk_errors
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
            code = execute(self._text, self._folder, arrival)
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


def execute(command: str, folder: Path, arrival: Arrival) -> int:
    """Run a command in the shell with the version in its environment; its exit code.

    It has a session of its own, so that a signal to us reaches it through us, and it is waited for.
    """
    values = {
        "WEIGHTCAST_VERSION": str(arrival.position.version),
        "WEIGHTCAST_STEP": "" if arrival.step is None else str(arrival.step),
        "WEIGHTCAST_FOLDER": str(folder.absolute()),
        "WEIGHTCAST_DIGEST": arrival.position.digest,
    }
    # Standard output is for JSON alone if there is any; no other file of ours is open in the child.
    child = None
    try:
        with uninterrupted():  # a signal right after the fork would leave a child that is never waited for
            child = subprocess.Popen(
                command,
                shell=True,
                env=os.environ | values,
                stdin=subprocess.DEVNULL,
                stdout=2 if settings.as_json else None,
                start_new_session=True,
            )
        code = child.wait()
    except KeyboardInterrupt:
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
        raise
    return code if code >= 0 else 128 - code
