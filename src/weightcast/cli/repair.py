"""`weightcast repair URL`"""

from weightcast.cli.channels import open_bucket
from weightcast.cli.console import say, tell
from weightcast.cli.options import Url
from weightcast.upkeep.repair import repair as restore


def repair(url: Url) -> None:
    """Restore a channel's damaged or missing channel.json from the copy in an anchor."""
    store = open_bucket(url)
    source = restore(store)
    tell({"channel": store.url, "restored_from": source})
    say(f"channel.json restored from {source}" if source else "nothing to repair: channel.json is intact")
