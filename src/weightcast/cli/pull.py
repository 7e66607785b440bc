"""`weightcast pull URL FOLDER [--follow]`"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.chain import Chain
from weightcast.checkpoint import MIRROR
from weightcast.cli.console import Threads, Url, commit_of, fields_of, head_of, open_chain, say, tell, warn, working
from weightcast.cli.wording import size, span
from weightcast.errors import CheckpointError, StoreError, UsageError, VersionError, WeightcastError
from weightcast.files import Report
from weightcast.holder import Staged
from weightcast.keys import Position
from weightcast.mirror import POSITION, Mirror
from weightcast.policy import Newest, Pinned, Policy
from weightcast.subscriber import Subscriber, default_replica

_FATAL = (UsageError, CheckpointError, VersionError)
"""What does not pass by itself, nor is mended elsewhere while a follower goes on with what it has."""


def pull(
    url: Url,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Made if it is not there; else a mirror, or a version's checkpoint."),
    ],
    version: Annotated[
        int | None, typer.Option("--version", min=0, metavar="N", help="This version; else the newest.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until SIGINT or SIGTERM; a second leaves at once.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.01, metavar="SECONDS", help="How often --follow looks.")] = 1.0,
    command: Annotated[
        str | None, typer.Option("--exec", metavar="CMD", help="Run this in the shell after each new version.")
    ] = None,
    replica: Annotated[
        str | None, typer.Option(metavar="NAME", help="Report to the bucket as NAME; with --follow, as this host.")
    ] = None,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text; one a line with --follow.")
    ] = False,
) -> None:
    """Bring FOLDER to a version of the channel, once or for ever.

    Only what it lacks is fetched. CMD is told by WEIGHTCAST_VERSION, _STEP, _FOLDER and _DIGEST.
    """
    with working(threads, as_json) as (workers, report):
        if follow and version is not None:
            raise UsageError("--follow goes to the newest version, --version to one and no further")
        chain = open_chain(url)
        if version is not None:
            commit_of(chain, version)
        elif not follow:
            head_of(chain)
        policy = Newest() if version is None else Pinned(version)
        name = replica or (default_replica() if follow else None)
        with closing(_Timed(chain, folder, policy, name, workers.threads, report)) as subscriber:
            if not follow:
                raise typer.Exit(_pull(subscriber, folder, command, as_json))
            with suppress(KeyboardInterrupt):
                _follow(subscriber, folder, every, command, as_json)
        _leave(subscriber.chain, folder, as_json)


@dataclass(frozen=True)
class Arrival:
    """A version that was taken."""

    position: Position
    step: int | None
    nbytes: int
    """Fetched for it."""
    seconds: float
    lag: float | None
    """Seconds since it was committed, by two clocks; None if that cannot be known now."""


class _Timed(Subscriber):
    """Remembers how long the last version took, and what was fetched for it."""

    def __init__(self, chain: Chain, folder: Path, policy: Policy, replica: str | None, threads: int, report: Report):
        self._began = time.monotonic()
        self._fetched = 0
        super().__init__(chain.store, folder, policy, replica=replica, threads=threads, report=report)

    def poll(self) -> Staged | None:
        self._began = time.monotonic()
        return super().poll()

    def apply(self, staged: Staged) -> Position:
        self._fetched = staged.nbytes
        return super().apply(staged)

    def arrival(self, position: Position) -> Arrival:
        seconds, now = time.monotonic() - self._began, time.time()
        try:
            commit = self.chain.manifest(position.version)
        except StoreError:
            return Arrival(position, None, self._fetched, seconds, None)
        return Arrival(position, commit.step, self._fetched, seconds, max(0.0, now - commit.time))


# -- once --------------------------------------------------------------------------------------------------------------


def _pull(subscriber: _Timed, folder: Path, command: str | None, as_json: bool) -> int:
    """Pull, fold, and run the command if there was anything new; its exit code, or 0."""
    staged = subscriber.poll()
    if staged is not None:
        subscriber.apply(staged)
    _fold(subscriber, folder)
    position = subscriber.position
    assert position is not None
    arrival = subscriber.arrival(position)
    if as_json:
        tell({"folder": str(folder), "new": staged is not None, **_fields(arrival)})
    elif staged is None:
        say(f"version {position.version} is there already")
    else:
        say(_line(arrival, "age"))
    return run(command, folder, arrival, as_json) if command is not None and staged is not None else 0


# -- for ever ----------------------------------------------------------------------------------------------------------


def _follow(subscriber: _Timed, folder: Path, every: float, command: str | None, as_json: bool) -> None:
    told: set[str] = set()

    def trouble(error: WeightcastError) -> None:
        """One line for an outage, however often it is tried again meanwhile."""
        if isinstance(error, _FATAL):
            raise error
        if str(error) not in told:
            tell({"event": "warning", **fields_of(error)}) if as_json else warn(str(error))
        told.add(str(error))

    for position in subscriber.follow(every, trouble):
        told.clear()
        arrival = subscriber.arrival(position)
        if as_json:
            tell({"event": "version", "time": round(time.time(), 3), **_fields(arrival)})
        else:
            say(f"{time.strftime('%H:%M:%S')}  {_line(arrival, 'lag')}")
        if command is not None:
            _fold(subscriber, folder)
            run(command, folder, arrival, as_json, event=True)


def _fold(subscriber: Subscriber, folder: Path) -> None:
    """Bring the files up to date; whoever waits is told for whom."""
    if not subscriber.fold(wait=False):
        warn(f"waiting for those who read {folder}")
        subscriber.fold()


def _leave(chain: Chain, folder: Path, as_json: bool) -> None:
    """Fold what was taken. A signal may have come at any moment: what is on disk counts, as after a kill."""
    version = None
    if (folder / MIRROR / POSITION).exists():
        with closing(Mirror(folder, chain.channel.id, chain.channel.table)) as mirror:
            mirror.fold()
            version = mirror.version
    if as_json:
        tell({"event": "end", "version": version})
    else:
        say(f"stopped at version {version}" if version is not None else "stopped; no version has come")


# -- what is said and run ----------------------------------------------------------------------------------------------


def _fields(arrival: Arrival) -> dict[str, Any]:
    return {
        "version": arrival.position.version,
        "digest": arrival.position.digest,
        "step": arrival.step,
        "bytes": arrival.nbytes,
        "seconds": round(arrival.seconds, 3),
        "lag": None if arrival.lag is None else round(arrival.lag, 3),
    }


def _line(arrival: Arrival, since: str) -> str:
    step = f"step {arrival.step}" if arrival.step is not None else ""
    lag = f"{since} {span(arrival.lag)}" if arrival.lag is not None else ""
    version, nbytes = f"version {arrival.position.version}", size(arrival.nbytes)
    return f"{version:<13}  {step:<10}  {nbytes:>7}  {arrival.seconds:6.2f} s  {lag}".rstrip()


def run(command: str, folder: Path, arrival: Arrival, as_json: bool, event: bool = False) -> int:
    """Run a command in the shell with the version in its environment; reports a failure, returns its exit code.

    It has a session of its own, so that a signal to us reaches it through us, and it is waited for.
    """
    values = {
        "WEIGHTCAST_VERSION": str(arrival.position.version),
        "WEIGHTCAST_STEP": "" if arrival.step is None else str(arrival.step),
        "WEIGHTCAST_FOLDER": str(folder.absolute()),
        "WEIGHTCAST_DIGEST": arrival.position.digest,
    }
    # Standard output is for JSON alone if there is any.
    child = subprocess.Popen(
        command,
        shell=True,
        env=os.environ | values,
        stdin=subprocess.DEVNULL,
        stdout=2 if as_json else None,
        start_new_session=True,
    )
    try:
        code = child.wait()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    code = code if code >= 0 else 128 - code
    if as_json and event:
        tell({"event": "command", "version": arrival.position.version, "exit_code": code})
    elif code:
        warn(f"the command ended with exit code {code}")
    return code
