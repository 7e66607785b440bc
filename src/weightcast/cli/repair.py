"""`weightcast repair URL`"""

from weightcast.cli.console import AsJson, Url, open_bucket, say, tell, working
from weightcast.upkeep.repair import repair as restore


def repair(url: Url, as_json: AsJson = False) -> None:
    """Restore a channel's damaged or missing channel.json from the copy in an anchor."""
    with working(1, as_json, kernels=False):
        store = open_bucket(url)
        source = restore(store)
        if as_json:
            tell({"channel": store.url, "restored_from": source})
        else:
            say(f"channel.json restored from {source}" if source else "nothing to repair: channel.json is intact")
