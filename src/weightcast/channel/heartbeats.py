"""Heartbeats in the bucket: the last report of each replica. Readers never need one."""

from __future__ import annotations

from contextlib import suppress

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.keys import REPLICAS, replica_key
from weightcast.channel.records import Heartbeat, heartbeat_from_json, heartbeat_to_json, readable
from weightcast.errors import FormatError, MissingError


def put_heartbeat(chain: Chain, heartbeat: Heartbeat) -> None:
    chain.store.put(replica_key(heartbeat.replica), heartbeat_to_json(heartbeat))


def delete_heartbeat(chain: Chain, replica: str) -> None:
    """Delete a replica's heartbeat, so that trainers stop waiting for it and no version is kept for it."""
    chain.store.delete(replica_key(replica))


def heartbeat_of(chain: Chain, replica: str) -> Heartbeat | None:
    """The last heartbeat of a replica; None if there is none that can be read."""
    with suppress(MissingError, FormatError):
        return readable(read_record(chain.store, replica_key(replica)), heartbeat_from_json)
    return None


def heartbeats(chain: Chain) -> list[tuple[Heartbeat, float]]:
    """The last heartbeat of each replica, and when the store received it."""
    found = []
    for listed in chain.store.list(REPLICAS):
        with suppress(MissingError, FormatError):
            heartbeat = readable(read_record(chain.store, listed.key), heartbeat_from_json)
            if heartbeat is not None:
                found.append((heartbeat, listed.modified))
    return found
