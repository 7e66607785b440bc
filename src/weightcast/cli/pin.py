"""`weightcast pin URL VERSION`, `weightcast unpin URL VERSION`"""

from weightcast.channel import pins
from weightcast.cli.console import AsJson, Url, open_chain, say, tell, working
from weightcast.cli.versions import Version, is_number, version_named


def pin(url: Url, version: Version, as_json: AsJson = False) -> None:
    """Keep a version: `gc` deletes nothing that leads to it."""
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        number = version_named(chain, version)
        changed = number not in pins.pins(chain)
        if changed:
            pins.pin(chain, number)
        if as_json:
            tell({"version": number, "pinned": True, "changed": changed})
        else:
            say(f"version {number} is pinned{'' if changed else ' already'}")


def unpin(url: Url, version: Version, as_json: AsJson = False) -> None:
    """Let `gc` delete a version again."""
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        # The version itself may be gone: a pin can outlive it in a damaged channel.
        number = int(version) if is_number(version) else version_named(chain, version)
        changed = number in pins.pins(chain)
        if changed:
            pins.unpin(chain, number)
        if as_json:
            tell({"version": number, "pinned": False, "changed": changed})
        else:
            say(f"version {number} is {'no longer' if changed else 'not'} pinned")
