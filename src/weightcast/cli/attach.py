"""`weightcast attach URL --engine http://host:port`"""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel import policy as policies
from weightcast.channel.policy import Policy
from weightcast.cli.channels import open_chain, version_named
from weightcast.cli.console import say, tell
from weightcast.cli.following import Outage, print_end, print_event, print_warning
from weightcast.cli.options import NAMES, Every, Url
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
        typer.Option(metavar="FOLDER", help="Where the weights are kept for the engine; in your cache by default."),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", metavar="VERSION", help=f"Hold the engine at this version: {NAMES}.")
    ] = None,
    every_version: Annotated[
        bool, typer.Option("--every-version", help="Skip no version that is still there.")
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Digest all live parameters after every update, before the engine resumes.")
    ] = False,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Keep prefixes that were computed with old weights.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Bring the engine to the version and exit.")] = False,
    every: Every = 1.0,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve /status, /metrics and /wait; on 127.0.0.1 unless HOST is given."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A token that clients of --listen must send.")
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Report to the bucket under this name; by default the host's, with digits for the mirror.",
        ),
    ] = None,
) -> None:
    """Keep a running engine at the channel's newest weights; it is paused only while they are written."""
    if version is not None and every_version:
        raise UsageError("--version holds one version, --every-version takes them all", hint="Leave one of them out.")
    with ExitStack() as opened:
        chain = open_chain(url)
        folder = mirror or default_mirror(chain.channel.id)
        name = replica or default_replica(folder)
        policy: Policy = policies.Every() if every_version else policies.Newest()
        if version is not None:
            policy = policies.Pinned(version_named(chain, version))
        agent = opened.enter_context(
            Agent(
                chain.store,
                HttpEngine(engine),
                folder,
                policy=policy,
                prove=prove,
                clear_cache=not keep_cache,
                replica=name,
            )
        )
        if once:
            _bring_once(agent)
            return
        watch = _watched(agent, listen, token_file, opened)
        fields = {"channel": chain.store.url, "engine": engine, "mirror": str(folder), "replica": name}
        line = f"following {chain.store.url} for {engine}, with a mirror in {folder}, as {name}"
        print_event("begin", line, **fields)
        with suppress(KeyboardInterrupt):
            _follow(agent, watch, every)
        print_end(agent.position.version if agent.position else None)


def _bring_once(agent: Agent) -> None:
    update = agent.step()
    if update is not None:
        _print(update)
    else:
        version = agent.position.version if agent.position else None
        tell({"event": "there", "version": version})
        say(f"the engine is at version {version} already")
    if agent.short is not None:
        print_warning(agent.short)


def _watched(agent: Agent, listen: str | None, token_file: Path | None, opened: ExitStack) -> Any:
    """Imports Prometheus' library only if --listen is given."""
    if listen is None:
        return None
    from weightcast.engine.endpoint import Endpoint, Watch

    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{listen!r} is not an address", hint="Write a port, or HOST:PORT.")
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


def _follow(agent: Agent, watch: Any, every: float) -> None:
    outage = Outage(_FATAL)

    def failed(error: WeightcastError) -> None:
        outage.failed(error)
        if watch is not None:
            watch.failed()

    for update in agent.rounds(every, failed):
        outage.round_ended()
        if update is not None:
            if watch is not None:
                watch.updated(update)
            _print(update)


def _print(update: EngineUpdate) -> None:
    loaded = f"  {update.reloaded:,} tensors reloaded" if update.reloaded else ""
    doubts = f"  {len(update.unproven):,} unproven" if update.unproven else ""
    changed = f"{update.changed:>12,} elements  paused {1000 * update.pause:8.1f} ms"
    print_event(
        "version",
        f"version {update.position.version:<6} {changed}{loaded}{doubts}",
        **update.as_json(),
    )
