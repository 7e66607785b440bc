"""The writer's lease: who writes to a channel. Advisory; commits are fenced without it."""

from __future__ import annotations

from contextlib import suppress

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.keys import WRITER
from weightcast.channel.records import Lease, lease_from_json, lease_to_json, readable
from weightcast.errors import MissingError


def take_lease(chain: Chain, lease: Lease) -> None:
    chain.store.put(WRITER, lease_to_json(lease))


def lease(chain: Chain) -> Lease | None:
    """The last lease that was taken; None if there is none that can be read."""
    with suppress(MissingError):
        return readable(read_record(chain.store, WRITER), lease_from_json)
    return None
