"""`weightcast reset URL`"""

import sys
from typing import Annotated

import typer

from weightcast.channel.chain import Chain
from weightcast.cli.console import AsJson, Url, facts, open_bucket, warn, working
from weightcast.cli.wording import one_line
from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.store.base import Store
from weightcast.upkeep import collect


def reset(
    url: Url,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a channel with all its versions, so that another can begin in its place."""
    with working(1, as_json, kernels=False):
        store = open_bucket(url)
        chain = _channel(store)
        if not yes:
            _ask(f"Delete the channel at {one_line(store.url)} with {_last(chain)}?")
        identity = chain.channel.id if chain else None
        facts({"channel": store.url, "id": identity, "deleted": collect.reset(store)}, as_json)


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
    head = chain.head()
    return f"all its versions, up to {head.position.version}" if head else "no version"


def _ask(question: str) -> None:
    """Go on only after a yes."""
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask", hint="Say --yes to delete the channel.")
    if not typer.confirm(question, err=True):
        warn("nothing was deleted")
        raise typer.Exit(1)
