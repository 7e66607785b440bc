"""`weightcast pin URL VERSION`, `weightcast unpin URL VERSION`"""

from typing import Annotated

import typer

from weightcast.channel import pins
from weightcast.cli.console import AsJson, Url, commit_of, facts, open_chain, working

Version = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Its number, as `log` shows it.")]


def pin(url: Url, version: Version, as_json: AsJson = False) -> None:
    """Keep a version for ever: `gc` leaves all that leads to it."""
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        commit_of(chain, version)
        before = version in pins.pins(chain)
        if not before:
            pins.pin(chain, version)
        facts({"version": version, "pinned": True, "changed": not before}, as_json)


def unpin(url: Url, version: Version, as_json: AsJson = False) -> None:
    """Let `gc` collect a version again."""
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        before = version in pins.pins(chain)
        if before:
            pins.unpin(chain, version)
        facts({"version": version, "pinned": False, "changed": before}, as_json)
