"""`weightcast reset URL`"""

import sys
from typing import Annotated

import typer

from weightcast import collect
from weightcast.cli.console import AsJson, Url, facts, open_chain, warn, working
from weightcast.cli.wording import one_line
from weightcast.errors import UsageError


def reset(
    url: Url,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a channel with all its versions, so that another can begin in its place."""
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        if not yes:
            head = chain.head()
            last = f"all its versions, up to {head.position.version}" if head else "no version"
            _ask(f"Delete the channel at {one_line(chain.store.url)} with {last}?")
        facts({"channel": chain.store.url, "id": chain.channel.id, "deleted": collect.reset(chain.store)}, as_json)


def _ask(question: str) -> None:
    """Go on only after a yes."""
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask", hint="Say --yes to delete the channel.")
    if not typer.confirm(question, err=True):
        warn("nothing was deleted")
        raise typer.Exit(1)
