"""`weightcast unpin URL VERSION`"""

from weightcast.channel import pins
from weightcast.cli.channels import is_number, open_chain, version_named
from weightcast.cli.console import say, tell
from weightcast.cli.options import Url, Version


def unpin(url: Url, version: Version) -> None:
    """Let `gc` delete a version again."""
    chain = open_chain(url)
    # The version itself may be gone: a pin can outlive it in a damaged channel.
    number = int(version) if is_number(version) else version_named(chain, version)
    changed = number in pins.pins(chain)
    if changed:
        pins.unpin(chain, number)
    tell({"version": number, "pinned": False, "changed": changed})
    say(f"version {number} is {'no longer' if changed else 'not'} pinned")
