"""Notes beside the chain: pins, heartbeats, the writer's lease, a listing for http. None says what the weights are."""

from __future__ import annotations

import json
from contextlib import suppress

from weightcast.channel.chain import Chain, read_record
from weightcast.channel.keys import (
    ANCHORS,
    DELTAS,
    INDEX,
    MANIFESTS,
    PINS,
    REPLICAS,
    SQUASHES,
    TAGS,
    WRITER,
    pin_key,
    read_pin_key,
    replica_key,
)
from weightcast.channel.records import (
    FORMAT,
    Heartbeat,
    Lease,
    heartbeat_from_json,
    heartbeat_to_json,
    lease_from_json,
    lease_to_json,
    readable,
)
from weightcast.errors import FormatError, MissingError


def write_index(chain: Chain) -> None:
    """Leave a listing for readers that cannot list: those over http."""
    kinds = (MANIFESTS, DELTAS, SQUASHES, ANCHORS, TAGS)
    objects = [[o.key, o.size, round(o.modified, 3)] for kind in kinds for o in chain.store.list(kind)]
    chain.store.put(INDEX, json.dumps({"format": FORMAT, "objects": objects}, separators=(",", ":")).encode())


def pins(chain: Chain) -> dict[int, float]:
    """Pinned versions, and when they were pinned by the store's clock."""
    found = ((read_pin_key(listed.key), listed.modified) for listed in chain.store.list(PINS))
    return {version: when for version, when in found if version is not None}


def pin(chain: Chain, version: int) -> None:
    chain.manifest(version)
    chain.store.put(pin_key(version), b"{}")


def unpin(chain: Chain, version: int) -> None:
    chain.store.delete(pin_key(version))


def beat(chain: Chain, heartbeat: Heartbeat) -> None:
    chain.store.put(replica_key(heartbeat.replica), heartbeat_to_json(heartbeat))


def fall_silent(chain: Chain, replica: str) -> None:
    """Delete a replica's heartbeat, so that nobody waits for it or keeps versions for it."""
    chain.store.delete(replica_key(replica))


def heartbeat_of(chain: Chain, replica: str) -> Heartbeat | None:
    """The last heartbeat under a name; None if there is none, or none that makes sense."""
    with suppress(MissingError, FormatError):
        return readable(read_record(chain.store, replica_key(replica)), heartbeat_from_json)
    return None


def heartbeats(chain: Chain) -> list[tuple[Heartbeat, float]]:
    """Each replica's last word, and when the store got it."""
    found = []
    for listed in chain.store.list(REPLICAS):
        with suppress(MissingError, FormatError):
            beat = readable(read_record(chain.store, listed.key), heartbeat_from_json)
            if beat is not None:
                found.append((beat, listed.modified))
    return found


def take_lease(chain: Chain, lease: Lease) -> None:
    chain.store.put(WRITER, lease_to_json(lease))


def lease(chain: Chain) -> Lease | None:
    with suppress(MissingError):
        return readable(read_record(chain.store, WRITER), lease_from_json)
    return None
