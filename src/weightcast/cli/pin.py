"""`weightcast pin URL VERSION`"""

from weightcast.channel import pins
from weightcast.cli.channels import open_chain, version_named
from weightcast.cli.console import say, tell
from weightcast.cli.options import Url, Version


def pin(url: Url, version: Version) -> None:
    """Keep a version: `gc` deletes nothing that leads to it."""
    chain = open_chain(url)
    number = version_named(chain, version)
    changed = number not in pins.pins(chain)
    if changed:
        pins.pin(chain, number)
    tell({"version": number, "pinned": True, "changed": changed})
    say(f"version {number} is pinned{'' if changed else ' already'}")
