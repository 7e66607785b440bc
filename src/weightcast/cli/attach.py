"""`weightcast attach URL --engine http://host:port`"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from weightcast.channel import policy as policies
from weightcast.channel.policy import Policy
from weightcast.cli.attach_reload import Opening, attach_reload, engine_that_reloads
from weightcast.cli.attaching import bring_once, follow
from weightcast.cli.channels import version_named
from weightcast.cli.engines import engine_named
from weightcast.cli.event_file import event_sinks
from weightcast.cli.following import print_event
from weightcast.cli.listening import Listener
from weightcast.cli.options import NAMES, AllowRollback, Events, Every, MaxAge, Near, Sign, TrustedKey, Url
from weightcast.cli.trusting import open_trusted, refuse_default_mirror, trust_of
from weightcast.engine.agent import Agent
from weightcast.engine.update import EngineUpdate
from weightcast.errors import UsageError
from weightcast.follow.heartbeat_sender import default_replica
from weightcast.follow.mirror_folder import default_mirror

_NONE = Path("none")
"""A folder of that name is named by its absolute path."""


def attach(
    url: Url,
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The engine: http://127.0.0.1:PORT. Not needed if this host has only one."),
    ] = None,
    engine_token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of an engine elsewhere, behind TLS: its token. --engine is https://… then."),
    ] = None,
    sglang: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The engine: http://host:port of an SGLang server, which loads the mirror."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Any other engine: what makes it load the mirror, run in the shell."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="--sglang: the server's --admin-api-key, or --api-key.")
    ] = None,
    mirror: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|none",
            help="Where the weights are kept for the engine; in your cache by default. `none`: nowhere.",
        ),
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
    allow_partial: Annotated[
        bool,
        typer.Option("--allow-partial", help="Follow a channel that has more tensors than the engine, or fewer."),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Bring the engine to the version and exit.")] = False,
    every: Every = 1.0,
    near: Near = None,
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
    events: Events = None,
    trust: TrustedKey = None,
    allow_rollback: AllowRollback = False,
    max_age: MaxAge = None,
    sign: Sign = None,
) -> None:
    """Keep a running engine at the channel's newest weights.

    vLLM is paused only while they are written. With --mirror none, it has to hold a version of the channel when it
    starts, and its workers have to hold all that is needed to decode the next ones: nothing can be reloaded.

    Other engines load the mirror's folder for each version: SGLang when it is asked, any other by CMD, which gets
    WEIGHTCAST_VERSION, _STEP, _FOLDER and _DIGEST.
    """
    if version is not None and every_version:
        raise UsageError("--version holds one version, --every-version takes them all", hint="Leave one of them out.")
    kept = None if mirror == _NONE else mirror
    trusted = trust_of(trust, kept, allow_rollback=allow_rollback, max_age=max_age)
    refuse_default_mirror(trusted, mirror)
    if sglang is not None or command is not None:
        if engine is not None or engine_token is not None:
            raise UsageError("--engine, --sglang and --command each name the engine", hint="Leave two of them out.")
        if mirror == _NONE:
            raise UsageError("such an engine loads the mirror for each version", hint="Name a folder with --mirror.")
        if prove:
            raise UsageError("--prove reads live parameters, which only vLLM's plug-in can do", hint="Leave it out.")
        loader = engine_that_reloads(sglang, command, api_key_file, clear_cache=not keep_cache)
        opening = Opening(url, mirror, version, every_version, replica, events, tuple(near or ()), trusted, sign)
        attach_reload(loader, opening, once=once, every=every, listen=listen, token_file=token_file)
        return
    if api_key_file is not None:
        raise UsageError("--api-key-file is for --sglang", hint="Leave it out.")
    with ExitStack() as opened:
        chain = open_trusted(url, trusted, kept, near=near or ())
        folder = None if mirror == _NONE else mirror or default_mirror(chain.channel.id)
        name = replica or default_replica(folder)
        policy: Policy = policies.Every() if every_version else policies.Newest()
        if version is not None:
            known = open_trusted(url, trusted, folder, near=near or ())  # the default mirror may have recorded a key
            policy = policies.Pinned(version_named(known, version))
        listener = Listener(listen, token_file) if listen is not None and not once else None
        sinks = event_sinks(events, opened) + ([listener.metrics] if listener else [])
        reached = engine_named(engine, engine_token, folder)
        agent = opened.enter_context(
            Agent(
                chain.store,
                reached,
                folder,
                policy=policy,
                prove=prove,
                clear_cache=not keep_cache,
                allow_partial=allow_partial,
                replica=name,
                on_event=sinks,
                trust=trusted,
                sign=sign,
            )
        )
        if once:
            bring_once(agent, _print)
            return
        watch = listener.serve(agent, opened) if listener else None
        where = None if folder is None else str(folder)
        fields = {"channel": chain.store.url, "engine": reached.url, "mirror": where, "replica": name}
        with_mirror = "without a mirror" if where is None else f"with a mirror in {where}"
        line = f"following {chain.store.url} for {reached.url}, {with_mirror}, as {name}"
        print_event("begin", line, **fields)
        follow(agent, watch, every, _print)


def _print(update: EngineUpdate) -> None:
    loaded = f"  {update.reloaded:,} tensors reloaded" if update.reloaded else ""
    doubts = f"  {len(update.unproven):,} unproven" if update.unproven else ""
    changed = f"{update.changed:>12,} elements  paused {1000 * update.pause:8.1f} ms"
    print_event(
        "version",
        f"version {update.position.version:<6} {changed}{loaded}{doubts}",
        **update.as_json(),
    )
