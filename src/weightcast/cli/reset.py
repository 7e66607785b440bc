"""`weightcast reset URL`"""

import sys
from typing import Annotated

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.cli.channels import open_bucket
from weightcast.cli.console import say, tell, warn
from weightcast.cli.options import Url
from weightcast.cli.wording import count, one_line
from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.follow.mirror_folder import cache_folder
from weightcast.store.base import Store
from weightcast.upkeep import collect


def reset(
    url: Url,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
) -> None:
    """Delete a channel with all its versions, so that another can begin in its place.

    Mirrors and replicas keep what they hold; they are named.
    """
    store = open_bucket(url)
    chain = _channel(store)
    if not yes:
        _ask(f"Delete the channel at {one_line(store.url)} with {_last(chain)}?")
    identity = chain.channel.id if chain else None
    replicas = [beat.replica for beat, _ in heartbeats(chain)] if chain else []
    deleted, mirror = collect.reset(store), cache_folder() / identity if identity else None
    left = str(mirror) if mirror is not None and mirror.is_dir() else None
    values = {"channel": store.url, "id": identity, "deleted": deleted}
    tell(values | {"mirror_left": left, "replicas_left": replicas})
    say(f"{count(deleted, 'object')} deleted from {store.url}")
    if left is not None:
        say(f"a mirror of it is left in {left}; delete that folder if nothing needs it")
    if replicas:
        say(f"{count(len(replicas), 'replica')} reported and may hold its weights: {', '.join(replicas)}")


def _channel(store: Store) -> Chain | None:
    """The channel; None for one whose own record is damaged or lost, so that it cannot be opened."""
    try:
        return Chain.open(store)
    except VersionError:
        raise  # of a newer release: not damaged
    except FormatError:
        return None


def _last(chain: Chain | None) -> str:
    if chain is None:
        return "all its versions, though its record is damaged (`weightcast repair` may restore it)"
    try:
        head = chain.head()
    except FormatError:
        return "all its versions, though its newest is damaged"
    return f"all its versions, up to {head.position.version}" if head else "no version"


def _ask(question: str) -> None:
    """Continue only after a yes."""
    if not sys.stdin.isatty():
        raise UsageError("reset asks first, and there is no terminal to ask on", hint="Say --yes to delete it.")
    if not typer.confirm(question, err=True):
        warn("nothing was deleted")
        raise typer.Exit(1)
