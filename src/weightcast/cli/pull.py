"""`weightcast pull URL FOLDER [--follow]`"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.policy import Newest, Pinned
from weightcast.cli.command import Arrival, Command
from weightcast.cli.console import Threads, Url, commit_of, fields_of, head_of, open_chain, say, tell, warn, working
from weightcast.cli.wording import size, span
from weightcast.errors import (
    ChannelError,
    FormatError,
    NoRouteError,
    StoreError,
    UsageError,
    VersionError,
    WeightcastError,
)
from weightcast.follow.heartbeat_sender import default_replica, error_text
from weightcast.follow.loop import OnError
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.subscriber import Subscriber
from weightcast.follow.update import Update

_FATAL = (UsageError, VersionError)
"""What does not pass by itself, nor is mended elsewhere while a follower goes on with what it has."""

SHORT = 13
"""Exit code: an older version than the newest was reached, since no intact route leads further."""


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
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run this in the shell for each new version, until it succeeds."),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Report to the bucket as NAME; with --follow, else by host and folder."),
    ] = None,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text; one a line with --follow.")
    ] = False,
) -> None:
    """Bring FOLDER to a version of the channel, once or for ever.

    Only what it lacks is fetched. CMD is told by WEIGHTCAST_VERSION, _STEP, _FOLDER and _DIGEST. The files do not
    change while it runs; a version for which it failed, or was killed, is tried again.
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
        name = replica or (default_replica(folder) if follow else None)
        with closing(
            Subscriber(chain.store, folder, policy, replica=name, threads=workers.threads, report=report)
        ) as subscriber:
            run = Command(command, folder, as_json) if command is not None else None
            if not follow:
                raise typer.Exit(_pull(subscriber, folder, run, as_json))
            with suppress(KeyboardInterrupt):
                _follow(subscriber, folder, every, run, as_json)
            if run is not None:  # a signal may have come after the command and before its report
                _report(subscriber, run)
        _leave(subscriber.chain, folder, as_json)


def _arrival(chain: Chain, position: Position, nbytes: int = 0, seconds: float = 0.0) -> Arrival:
    """What is said of a version that was taken; its commit is only for people, and not waited for."""
    now = time.time()
    try:
        commit = chain.manifest(position.version)
    except (StoreError, FormatError, ChannelError):
        return Arrival(position, None, nbytes, seconds, None)
    return Arrival(position, commit.step, nbytes, seconds, max(0.0, now - commit.time))


# -- once --------------------------------------------------------------------------------------------------------------


def _pull(subscriber: Subscriber, folder: Path, command: Command | None, as_json: bool) -> int:
    """Pull, fold, and run the command if it has not succeeded for this version; its exit code, or 0, or `SHORT`."""
    began = time.monotonic()
    update, reason = _sync(subscriber)
    _fold(subscriber, folder)
    position = subscriber.position
    assert position is not None
    arrival = _arrival(subscriber.chain, position, update.nbytes if update else 0, time.monotonic() - began)
    if as_json:
        short = None if reason is None else fields_of(reason)
        tell({"folder": str(folder), "new": update is not None, **_fields(arrival), "short": short})
    elif update is not None:
        say(_line(arrival, "age"))
    elif reason is None:
        say(f"version {position.version} is there already")
    if reason is not None and not as_json:
        warn(f"this is version {position.version}, not the newest: {reason}")
    return _run_once(subscriber, command, arrival) or (SHORT if reason is not None else 0)


def _sync(subscriber: Subscriber) -> tuple[Update | None, WeightcastError | None]:
    """The update, and why the folder is not at the newest version, if so."""
    try:
        update = subscriber.sync()
    except NoRouteError as error:
        if subscriber.position is None or isinstance(subscriber.policy, Pinned):
            raise
        return None, error
    return update, update.short if update else None


def _run_once(subscriber: Subscriber, command: Command | None, arrival: Arrival) -> int:
    channel = subscriber.chain.channel.id
    if command is None:
        return 0
    code = command.run(channel, arrival) if command.is_due(channel, arrival.position) else 0
    _report(subscriber, command)
    return code


# -- for ever ----------------------------------------------------------------------------------------------------------


def _follow(subscriber: Subscriber, folder: Path, every: float, command: Command | None, as_json: bool) -> None:
    told: set[str] = set()

    def trouble(error: WeightcastError) -> None:
        """One line for an outage, however often it is tried again meanwhile."""
        if isinstance(error, _FATAL):
            raise error
        if str(error) not in told:
            tell({"event": "warning", **fields_of(error)}) if as_json else warn(str(error))
        told.add(str(error))

    for update in subscriber.rounds(every, trouble):
        if update is not None:
            told.clear()
            arrival = _arrival(subscriber.chain, update.position, update.nbytes, update.total_seconds)
            if as_json:
                tell({"event": "version", "time": round(time.time(), 3), **_fields(arrival)})
            else:
                say(f"{time.strftime('%H:%M:%S')}  {_line(arrival, 'lag')}")
        if command is not None:
            _run_if_due(subscriber, folder, command, trouble)


def _run_if_due(subscriber: Subscriber, folder: Path, command: Command, on_error: OnError) -> None:
    """Run the command for the version that is held, unless it has succeeded for it, or failed a moment ago."""
    held, channel = subscriber.position, subscriber.chain.channel.id
    if held is None or not command.is_due(channel, held):
        return
    try:
        _fold(subscriber, folder)
        command.run(channel, _arrival(subscriber.chain, held), event=True)
    except WeightcastError as error:
        command.failed(held, error_text(error))
        on_error(error)
    _report(subscriber, command)


def _report(subscriber: Subscriber, command: Command) -> None:
    ran = command.ran(subscriber.chain.channel.id)
    subscriber.report_command(ran.version if ran else None, command.problem)


def _fold(subscriber: Subscriber, folder: Path) -> None:
    """Bring the files up to date; whoever waits is told for whom."""
    if not subscriber.fold(wait=False):
        warn(f"waiting for those who read {folder}")
        subscriber.fold()


def _leave(chain: Chain, folder: Path, as_json: bool) -> None:
    """Say where the mirror is. A signal may have come at any moment: what is on disk counts, as after a kill."""
    version = None
    if MirrorFolder(folder).position.exists():
        with closing(Mirror(folder, chain.channel.id, chain.channel.table, url=chain.store.url)) as mirror:
            if not mirror.fold(wait=False):
                warn(f"the files are at version {mirror.folded and mirror.folded.version}: somebody reads them")
            version = mirror.version
    if as_json:
        tell({"event": "end", "version": version})
    else:
        say(f"stopped at version {version}" if version is not None else "stopped; no version has come")


# -- what is said -----------------------------------------------------------------------------------------------------


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
