"""`weightcast forget URL REPLICA`"""

from typing import Annotated

import typer

from weightcast.channel.heartbeats import delete_heartbeat, heartbeat_of
from weightcast.channel.keys import check_name
from weightcast.cli.console import AsJson, Url, open_chain, say, tell, working
from weightcast.errors import UsageError


def forget(
    url: Url,
    replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Its name, as `weightcast status` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Delete the heartbeat of a replica that is gone, so that `gc` keeps no versions for it."""
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        if heartbeat_of(chain, check_name(replica, "replica")) is None:
            hint = f"`weightcast status {chain.store.url}` lists the replicas."
            raise UsageError(f"there is no replica {replica!r}", file=chain.store.url, hint=hint)
        delete_heartbeat(chain, replica)
        tell({"forgotten": replica}) if as_json else say(f"replica {replica} forgotten")
