"""`weightcast attach URL --sglang http://host:port`, `weightcast attach URL --command CMD`"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.channel import policy as policies
from weightcast.channel.policy import Policy
from weightcast.channel.trust import Trust
from weightcast.cli.attaching import bring_once, follow
from weightcast.cli.channels import version_named
from weightcast.cli.console import uninterrupted
from weightcast.cli.engines import read_secret
from weightcast.cli.event_file import event_sinks
from weightcast.cli.following import print_event
from weightcast.cli.listening import Listener
from weightcast.cli.settings import settings
from weightcast.cli.trusting import open_trusted
from weightcast.cli.wording import size
from weightcast.engine.reload.agent import ReloadAgent, Reloaded
from weightcast.engine.reload.command import CommandEngine
from weightcast.engine.reload.engine import ReloadEngine
from weightcast.engine.reload.sglang import SGLangEngine
from weightcast.errors import UsageError
from weightcast.follow.heartbeat_sender import default_replica
from weightcast.follow.mirror_folder import default_mirror

if TYPE_CHECKING:
    from weightcast.events.event import Sink


def engine_that_reloads(
    sglang: str | None, command: str | None, api_key_file: Path | None, *, clear_cache: bool
) -> ReloadEngine:
    """The engine that the options name; `UsageError` unless they name one."""
    if sglang is not None and command is not None:
        raise UsageError("--sglang and --command each name the engine", hint="Leave one of them out.")
    if sglang is not None:
        key = read_secret(api_key_file) if api_key_file is not None else None
        return SGLangEngine(sglang, api_key=key, clear_cache=clear_cache)
    assert command is not None, "the caller has checked that one of them is given"
    if api_key_file is not None or not clear_cache:
        raise UsageError("--api-key-file and --keep-cache are for engines with an address", hint="Leave them out.")
    return CommandEngine(command, stdout=2 if settings.as_json else None, starting=uninterrupted)


@dataclass(frozen=True)
class Opening:
    """What an agent follows, and where, as the command line says it."""

    url: str
    mirror: Path | None
    version: str | None
    every_version: bool
    replica: str | None
    events: Path | None
    near: tuple[str, ...] = ()
    trust: Trust | None = None
    sign: str | None = None

    def agent(self, engine: ReloadEngine, sinks: Sequence[Sink]) -> ReloadAgent:
        chain = open_trusted(self.url, self.trust, self.mirror, near=self.near)
        folder = self.mirror or default_mirror(chain.channel.id)
        policy: Policy = policies.Every() if self.every_version else policies.Newest()
        if self.version is not None:
            known = open_trusted(
                self.url, self.trust, folder, near=self.near
            )  # the default one may have recorded a key
            policy = policies.Pinned(version_named(known, self.version))
        replica = self.replica or default_replica(folder)
        return ReloadAgent(
            chain.store,
            engine,
            folder,
            policy=policy,
            replica=replica,
            on_event=sinks,
            trust=self.trust,
            sign=self.sign,
        )


def attach_reload(
    engine: ReloadEngine, opening: Opening, *, once: bool, every: float, listen: str | None, token_file: Path | None
) -> None:
    """Keep an engine that loads folders at a channel's versions, once or until it is interrupted."""
    with ExitStack() as opened:
        listener = Listener(listen, token_file) if listen is not None and not once else None
        sinks = event_sinks(opening.events, opened) + ([listener.metrics] if listener else [])
        agent = opened.enter_context(opening.agent(engine, sinks))
        if once:
            bring_once(agent, _print)
            return
        watch = listener.serve(agent, opened) if listener else None
        url, folder = agent.subscriber.chain.store.url, agent.subscriber.mirror.folder
        fields = {"channel": url, "engine": engine.url, "mirror": str(folder), "replica": agent.replica}
        line = f"following {url} for {engine.url}, with a mirror in {folder}, as {agent.replica}"
        print_event("begin", line, **fields)
        follow(agent, watch, every, _print)


def _print(update: Reloaded) -> None:
    fetched = f"{size(update.nbytes):>10} fetched  loaded in {update.load:8.2f} s"
    print_event("version", f"version {update.position.version:<6} {fetched}", **update.as_json())
