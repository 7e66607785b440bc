"""`weightcast forget URL REPLICA`"""

from typing import Annotated

import typer

from weightcast.channel.heartbeats import delete_heartbeat, heartbeat_of
from weightcast.channel.keys import check_name
from weightcast.cli.channels import open_chain
from weightcast.cli.console import say, tell
from weightcast.cli.options import Url
from weightcast.errors import UsageError


def forget(
    url: Url,
    replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Its name, as `weightcast status` shows it.")],
) -> None:
    """Delete the heartbeat of a replica that is gone, so that `gc` keeps no versions for it."""
    chain = open_chain(url)
    if heartbeat_of(chain, check_name(replica, "replica")) is None:
        hint = f"`weightcast status {chain.store.url}` lists the replicas."
        raise UsageError(f"there is no replica {replica!r}", file=chain.store.url, hint=hint)
    delete_heartbeat(chain, replica)
    tell({"forgotten": replica})
    say(f"replica {replica} forgotten")
