"""What `attach` does with an agent, whatever its engine is: bring it to the version once, or follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from weightcast.cli.console import say, tell
from weightcast.cli.following import Outage, print_end, print_event, print_warning
from weightcast.errors import MisfitError, UsageError, VersionError, WeightcastError

if TYPE_CHECKING:
    from weightcast.engine.endpoint import Watch, WatchedUpdate
    from weightcast.engine.rounds import EngineAgent

U = TypeVar("U", bound="WatchedUpdate")

_FATAL = (UsageError, VersionError, MisfitError)
"""Errors that trying again does not cure."""


def bring_once(agent: EngineAgent[U], show: Callable[[U], None]) -> None:
    """Bring the engine to the version that is wanted; ``show`` prints the update."""
    update = agent.step()
    if update is not None:
        show(update)
    else:
        version = agent.position.version if agent.position else None
        tell({"event": "there", "version": version})
        say(f"the engine is at version {version} already")
    if agent.short is not None:
        print_warning(agent.short)


def follow(agent: EngineAgent[U], watch: Watch | None, every: float, show: Callable[[U], None]) -> None:
    """Follow until it is interrupted."""
    with suppress(KeyboardInterrupt):
        _follow(agent, watch, every, show)
    print_end(agent.position.version if agent.position else None)


def _follow(agent: EngineAgent[U], watch: Watch | None, every: float, show: Callable[[U], None]) -> None:
    outage = Outage(_FATAL)

    def failed(error: WeightcastError) -> None:
        outage.failed(error)
        if watch is not None:
            watch.failed()

    said = False
    for update in agent.rounds(every, failed):
        outage.round_ended()
        if update is None and agent.position is not None and not said:
            version = agent.position.version
            print_event("there", f"version {version:<6} is live already", version=version)
        said = said or agent.position is not None
        if update is not None:
            if watch is not None:
                watch.updated(update)
            show(update)
