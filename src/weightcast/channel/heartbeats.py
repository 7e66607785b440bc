"""Heartbeats in the bucket: the last report of each replica. Readers never need one."""

from __future__ import annotations

from functools import partial

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_hint
from weightcast.channel.keys import REPLICAS, replica_key
from weightcast.channel.records import Heartbeat, dump_record, load_record
from weightcast.channel.signed import signed
from weightcast.errors import TrustError

_parse = partial(load_record, Heartbeat)


def put_heartbeat(chain: Chain, heartbeat: Heartbeat) -> None:
    """Report, signed if the chain has a private key."""
    if chain.signing.signer is not None:
        heartbeat = signed(heartbeat, chain.channel.id, chain.signing.signer)
    chain.store.put(replica_key(heartbeat.replica), dump_record(heartbeat))


def delete_heartbeat(chain: Chain, replica: str) -> None:
    """Delete a replica's heartbeat, so that trainers stop waiting for it and no version is kept for it."""
    chain.store.delete(replica_key(replica))


def heartbeat_of(chain: Chain, replica: str) -> Heartbeat | None:
    """The last heartbeat of a replica; None if there is none that can be read."""
    return read_hint(chain.store, replica_key(replica), _parse)


def heartbeats(chain: Chain) -> list[tuple[Heartbeat, float]]:
    """The last heartbeat of each replica, and when the store received it; with a trusted key only signed ones."""
    if chain.guard is not None:
        chain.guard.refresh()  # a trainer waits for days: replicas' keys come and go meanwhile
    found = ((heartbeat_at(chain, listed.key), listed.modified) for listed in chain.store.list(REPLICAS))
    return [(heartbeat, when) for heartbeat, when in found if heartbeat is not None]


def heartbeat_at(chain: Chain, key: str) -> Heartbeat | None:
    """The heartbeat under a key; None if none can be read there, or the trusted key does not vouch for it."""
    heartbeat = read_hint(chain.store, key, _parse)
    return heartbeat if heartbeat is not None and _counts(chain, heartbeat, key) else None


def _counts(chain: Chain, heartbeat: Heartbeat, key: str) -> bool:
    if key != replica_key(heartbeat.replica):
        return False  # else whoever may write there makes many replicas of one that signs
    if chain.guard is None:
        return True
    try:
        chain.guard.check_heartbeat(heartbeat, f"{chain.store.url}/{replica_key(heartbeat.replica)}")
    except TrustError:
        return False
    return True
