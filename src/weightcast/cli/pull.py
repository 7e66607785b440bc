"""`weightcast pull URL FOLDER [--follow]`"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.policy import Newest, Pinned
from weightcast.cli.channels import head_of, version_named
from weightcast.cli.command import Arrival, Command
from weightcast.cli.console import SHORT, caution, computing, fields_of, say, tell, warn
from weightcast.cli.event_file import event_sinks
from weightcast.cli.following import Outage, print_end, print_event
from weightcast.cli.options import (
    NAMES,
    AllowRollback,
    Events,
    Every,
    MaxAge,
    Near,
    Sign,
    Threads,
    TrustedKey,
    Url,
)
from weightcast.cli.trusting import open_trusted, trust_of
from weightcast.cli.wording import is_ahead, size, span
from weightcast.errors import (
    ChannelError,
    FormatError,
    NoRouteError,
    StoreError,
    TrustError,
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
from weightcast.store.backoff import CLOCK, Clock

_FATAL = (UsageError, VersionError)
"""Errors that neither time nor a repair of the channel removes."""


def pull(
    url: Url,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A new folder, a mirror, or the checkpoint of a version."),
    ],
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="VERSION", help=f"The version: {NAMES}; the newest by default."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue until SIGINT or SIGTERM; a second one exits at once.")
    ] = False,
    every: Every = 1.0,
    near: Near = None,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run this in the shell for each new version, until it succeeds."),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Report to the bucket under this name; --follow has a default from host and folder."
        ),
    ] = None,
    events: Events = None,
    threads: Threads = None,
    trust: TrustedKey = None,
    allow_rollback: AllowRollback = False,
    max_age: MaxAge = None,
    sign: Sign = None,
) -> None:
    """Bring FOLDER to a version of the channel, once or continuously.

    Only what it lacks is fetched. CMD gets WEIGHTCAST_VERSION, _STEP, _FOLDER and _DIGEST. The files do not change
    while it runs; if it fails or is killed, it runs again for that version.
    """
    if follow and version is not None:
        raise UsageError("--follow goes to the newest version and --version to one", hint="Leave one of them out.")
    with ExitStack() as opened, computing(threads) as (workers, progress):
        sinks = event_sinks(events, opened)
        trusted = trust_of(trust, folder, allow_rollback=allow_rollback, max_age=max_age)
        chain = open_trusted(url, trusted, folder, near=near or ())
        number = version_named(chain, version) if version is not None else None
        if number is None and not follow:
            head_of(chain)
        policy = Newest() if number is None else Pinned(number)
        name = replica or (default_replica(folder) if follow else None)
        with closing(
            Subscriber(
                chain.store,
                folder,
                policy,
                replica=name,
                threads=workers.threads,
                report=progress,
                on_event=sinks,
                trust=trusted,
                sign=sign,
            )
        ) as subscriber:
            run = Command(command, folder) if command is not None else None
            if not follow:
                raise typer.Exit(_pull(subscriber, folder, run))
            with suppress(KeyboardInterrupt):
                _begin(subscriber, folder, name)
                follow_channel(subscriber, folder, every, run)
            if run is not None:  # a signal may have come after the command and before its report
                _report(subscriber, run)
        _leave(subscriber.chain, folder)


def _arrival(chain: Chain, position: Position, nbytes: int = 0, seconds: float = 0.0) -> Arrival:
    """What is printed about a version. A commit that cannot be read only leaves gaps there."""
    now = time.time()
    try:
        commit = chain.manifest(position.version)
    except (StoreError, FormatError, ChannelError, TrustError):
        return Arrival(position, None, nbytes, seconds, None)
    return Arrival(position, commit.step, nbytes, seconds, now - commit.time)


# -- once --------------------------------------------------------------------------------------------------------------


def _pull(subscriber: Subscriber, folder: Path, command: Command | None) -> int:
    """Pull, fold, and run the command if it has not succeeded for this version; its exit code, or 0, or `SHORT`."""
    began = time.monotonic()
    update, reason = sync_as_far_as_possible(subscriber)
    _fold(subscriber, folder)
    position = subscriber.position
    assert position is not None
    arrival = _arrival(subscriber.chain, position, update.nbytes if update else 0, time.monotonic() - began)
    short = None if reason is None else fields_of(reason)
    tell({"folder": str(folder), "new": update is not None, **_fields(arrival), "short": short})
    if update is not None:
        say(_line(arrival, "age"))
    elif reason is None:
        say(f"version {position.version} is there already")
    if reason is not None:
        caution(f"this is version {position.version}, not the newest: {reason}")
    return _run_once(subscriber, command, arrival) or (SHORT if reason is not None else 0)


def sync_as_far_as_possible(subscriber: Subscriber) -> tuple[Update | None, WeightcastError | None]:
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


# -- continuously ------------------------------------------------------------------------------------------------------


def _begin(subscriber: Subscriber, folder: Path, replica: str | None) -> None:
    url, at = subscriber.chain.store.url, subscriber.position
    held = f"at version {at.version}" if at else "which has no version yet"
    fields = {"channel": url, "folder": str(folder), "replica": replica, "version": at.version if at else None}
    print_event("begin", f"following {url} into {folder}, {held}, as {replica}", **fields)


def follow_channel(
    subscriber: Subscriber, folder: Path, every: float, command: Command | None, clock: Clock = CLOCK
) -> None:
    """Print each version as it comes, and run the command for it, until the subscriber is stopped."""
    outage, command_trouble = Outage(_FATAL, clock), Outage(_FATAL, clock)
    for update in subscriber.rounds(every, outage.failed):
        outage.round_ended()
        if update is not None:
            command_trouble = Outage(_FATAL, clock)
            arrival = _arrival(subscriber.chain, update.position, update.nbytes, update.total_seconds)
            print_event("version", _line(arrival, "lag"), **_fields(arrival))
        if command is not None:
            _run_if_due(subscriber, folder, command, command_trouble.warn)


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
    """Bring the files up to date; say so if others must finish reading them first."""
    if not subscriber.fold(wait=False):
        warn(f"waiting for other processes that read {folder}")
        subscriber.fold()


def _leave(chain: Chain, folder: Path) -> None:
    """Print the mirror's version. A signal may have come at any moment: what is on disk counts, as after a kill."""
    version = None
    if MirrorFolder(folder).position.exists():
        with closing(Mirror(folder, chain.channel.id, chain.channel.table, url=chain.store.url)) as mirror:
            if not mirror.fold(wait=False):
                at = mirror.folded.version if mirror.folded else None
                warn(f"the files stay at version {at}: another process reads them")
            version = mirror.version
    print_end(version)


# -- what is printed ---------------------------------------------------------------------------------------------------


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
    lag = "" if arrival.lag is None else f"{since} {span(arrival.lag)}"
    if arrival.lag is not None and is_ahead(arrival.lag):
        lag = f"from the future by {span(-arrival.lag)}: check the clocks"
    version, nbytes = f"version {arrival.position.version}", size(arrival.nbytes)
    return f"{version:<13}  {step:<10}  {nbytes:>7}  {arrival.seconds:6.2f} s  {lag}".rstrip()
