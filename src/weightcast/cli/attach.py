"""`weightcast attach URL --engine http://host:port`"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.policy import Every, Newest, Pinned, Policy
from weightcast.cli.console import Url, fields_of, open_chain, say, tell, warn, working
from weightcast.cli.versions import NAMES, version_named
from weightcast.engine.agent import Agent
from weightcast.engine.client import HttpEngine
from weightcast.engine.update import EngineUpdate
from weightcast.errors import MisfitError, UsageError, VersionError, WeightcastError
from weightcast.follow.heartbeat_sender import default_replica
from weightcast.follow.mirror_folder import default_mirror

_FATAL = (UsageError, VersionError, MisfitError)
"""Errors that trying again does not cure."""


def attach(
    url: Url,
    engine: Annotated[str, typer.Option(metavar="URL", help="The engine: http://host:port of a vLLM server.")],
    mirror: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the weights are kept for the engine; else in the user's cache."),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", metavar="VERSION", help=f"Hold the engine at this version: {NAMES}.")
    ] = None,
    every_version: Annotated[
        bool, typer.Option("--every-version", help="Skip no version that is still there.")
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Digest all live parameters after every update, before the engine goes on.")
    ] = False,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Keep prefixes that were computed with old weights.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Bring the engine to the version and leave.")] = False,
    every: Annotated[float, typer.Option(min=0.01, metavar="SECONDS", help="How often to look.")] = 1.0,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve /status, /metrics and /wait; on 127.0.0.1 unless HOST is given."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Whoever asks at --listen must know what is in it.")
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Report to the bucket as NAME; else as this host, with digits for the mirror."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead of text.")] = False,
) -> None:
    """Keep a running engine at the channel's newest weights; it is paused only while they are written."""
    with working(None, as_json) as (_, _report), ExitStack() as opened:
        chain = open_chain(url)
        folder = mirror or default_mirror(chain.channel.id)
        agent = opened.enter_context(
            Agent(
                chain.store,
                HttpEngine(engine),
                folder,
                policy=_policy(None if version is None else version_named(chain, version), every_version),
                prove=prove,
                clear_cache=not keep_cache,
                replica=replica or default_replica(folder),
            )
        )
        if once:
            update = agent.step()
            _tell(update, as_json) if update else _tell_there(agent, as_json)
            if agent.short is not None:
                _warn(agent.short, as_json)
            return
        watch = _watched(agent, listen, token_file, opened)
        with suppress(KeyboardInterrupt):
            _follow(agent, watch, every, as_json)
        if as_json:
            tell({"event": "end", "version": agent.position.version if agent.position else None})


def _policy(version: int | None, every_version: bool) -> Policy:
    if version is not None and every_version:
        raise UsageError("--version holds one version, --every-version takes them all")
    return Pinned(version) if version is not None else Every() if every_version else Newest()


def _watched(agent: Agent, listen: str | None, token_file: Path | None, opened: ExitStack) -> Any:
    """Imports Prometheus' library only if --listen is given."""
    if listen is None:
        return None
    from weightcast.engine.endpoint import Endpoint, Watch

    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{listen!r} is no address", hint="Write a port, or HOST:PORT.")
    token = _token(token_file) if token_file else None
    watch = Watch(agent)
    opened.enter_context(closing(Endpoint(watch, host.strip("[]") or "127.0.0.1", int(port), token)))
    return watch


def _token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the token: {error}", file=str(file)) from error
    if len(token) < 16:
        raise UsageError("the token is too short", file=str(file), hint="16 characters at least.")
    return token


def _follow(agent: Agent, watch: Any, every: float, as_json: bool) -> None:
    reported: set[str] = set()

    def trouble(error: WeightcastError) -> None:
        """One line for an outage, however many attempts it lasts."""
        if isinstance(error, _FATAL):
            raise error
        if watch is not None:
            watch.failed()
        if agent.trouble is None:
            reported.clear()
        if str(error) not in reported:
            _warn(error, as_json)
        reported.add(str(error))

    for update in agent.follow(every, trouble):
        if agent.trouble is None:
            reported.clear()
        if watch is not None:
            watch.took(update)
        _tell(update, as_json)


def _warn(error: WeightcastError, as_json: bool) -> None:
    tell({"event": "warning", **fields_of(error)}) if as_json else warn(str(error))


def _tell(update: EngineUpdate, as_json: bool) -> None:
    seconds = {phase: round(value, 4) for phase, value in update.seconds.items()}
    if as_json:
        values = {"version": update.position.version, "digest": update.position.digest, "changed": update.changed}
        more = {"reloaded": update.reloaded, "unproven": list(update.unproven), "pause": round(update.pause, 4)}
        tell({"event": "version", "time": round(time.time(), 3), **values, **more, "seconds": seconds})
        return
    loaded = f"  {update.reloaded:,} tensors reloaded" if update.reloaded else ""
    doubts = f"  {len(update.unproven):,} unproven" if update.unproven else ""
    spent = 1000 * update.pause
    line = (
        f"version {update.position.version:<6} {update.changed:>12,} elements  paused {spent:8.1f} ms{loaded}{doubts}"
    )
    say(f"{time.strftime('%H:%M:%S')}  {line}")


def _tell_there(agent: Agent, as_json: bool) -> None:
    version = agent.position.version if agent.position else None
    if as_json:
        tell({"event": "there", "version": version})
    else:
        say(f"the engine is at version {version} already")
