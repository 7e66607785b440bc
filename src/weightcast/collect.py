"""Deleting what nobody needs: take stock, decide (`retention`), delete in an order that no reader can notice.

A manifest goes first. Its objects are written on a list that ages by the store's clock, and go once the list is a grace
period old: whoever read the manifest just before has that long to fetch them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from weightcast.chain import Chain, read_record
from weightcast.container import parse_json
from weightcast.errors import AccessError, ChannelError, FormatError, MissingError, UnsupportedError
from weightcast.keys import (
    ANCHORS,
    CHANNEL,
    DELTAS,
    DOOMED,
    HEAD,
    INDEX,
    MANIFESTS,
    PINS,
    RECORD,
    REPLICAS,
    SQUASHES,
    WRITER,
    read_anchor_key,
    read_delta_key,
    read_manifest_key,
    read_squash_key,
)
from weightcast.notes import heartbeats, pins, write_index
from weightcast.plan import Edge
from weightcast.retention import Garbage, Inventory, Kept, Retention, collectable
from weightcast.store.base import Listed, Store
from weightcast.store.probe import clock

PROBES = "probe/"


@dataclass(frozen=True)
class Collected:
    """What a run deleted, or would."""

    versions: tuple[int, ...]
    objects: tuple[str, ...]
    doomed: tuple[str, ...]
    """Objects that follow in a run a grace period later."""
    nbytes: int
    """Freed now."""


def take_stock(chain: Chain, now: float) -> tuple[Inventory, dict[str, int]]:
    """What the bucket holds, with ages, and the size of every object that might go."""
    head = chain.head()
    if head is None:
        raise ChannelError("the channel has no version yet", file=chain.store.url)
    newest = head.position.version
    manifests: dict[int, float] = {}
    for listed in chain.store.list(MANIFESTS):
        found = read_manifest_key(listed.key)
        if found:
            manifests[found[0]] = now - listed.modified
    kept, orphans, sizes = [], [], {}
    for listed in (*chain.store.list(DELTAS), *chain.store.list(SQUASHES)):
        sizes[listed.key] = listed.size
        edge = _edge(listed)
        if edge is not None and edge.result <= newest and (edge.base is None or not _stray(chain, edge, manifests)):
            kept.append(Kept(edge, now - listed.modified))
        else:
            orphans.append((listed.key, now - listed.modified))
    for edge, age, keys in _anchors(chain, now, sizes):
        if edge is not None and edge.result <= newest:
            kept.append(Kept(edge, age))
        else:
            orphans += [(key, age) for key in keys]
    replicas = tuple((beat.position.version, now - when) for beat, when in heartbeats(chain))
    stock = Inventory(newest, manifests, tuple(kept), tuple(orphans), frozenset(pins(chain)), replicas)
    return stock, sizes


def _edge(listed: Listed) -> Edge | None:
    delta, squash = read_delta_key(listed.key), read_squash_key(listed.key)
    if delta:
        return Edge(delta[0] - 1, delta[0], listed.size, listed.key, delta[1])
    return Edge(squash[0], squash[1], listed.size, listed.key, squash[2]) if squash else None


def _stray(chain: Chain, edge: Edge, manifests: dict[int, float]) -> bool:
    """A delta that was uploaded and never committed: by a writer that died, or that another outran."""
    if not edge.key.startswith(DELTAS) or edge.result not in manifests:
        return False
    rivals = sum(1 for _ in chain.store.list(f"{DELTAS}{edge.result:012d}-"))
    return rivals > 1 and chain.manifest(edge.result).object.key != edge.key


def _anchors(chain: Chain, now: float, sizes: dict[str, int]) -> Iterator[tuple[Edge | None, float, list[str]]]:
    """Each anchor (None: its record never came), the age of its youngest file, its keys."""
    folders: dict[str, list[Listed]] = {}
    for listed in chain.store.list(ANCHORS):
        place = read_anchor_key(listed.key)
        sizes[listed.key] = listed.size
        folders.setdefault(place.folder if place else listed.key, []).append(listed)
    for folder, files in folders.items():
        place = read_anchor_key(files[0].key)
        whole = any(listed.key.endswith(f"/{RECORD}") for listed in files)
        nbytes = sum(listed.size for listed in files)
        edge = Edge(None, place.version, nbytes, folder, place.digest) if place and whole else None
        yield edge, min(now - listed.modified for listed in files), [listed.key for listed in files]


def collect(chain: Chain, policy: Retention, *, dry_run: bool = False) -> Collected:
    """Delete what nobody needs any more; with ``dry_run`` only say what that is."""
    now = _now(chain, dry_run)
    inventory, sizes = take_stock(chain, now)
    garbage = collectable(inventory, policy)
    objects = _keys_of(garbage, sizes)
    lists = _doomed(chain)
    ripe = {key for listed, keys in lists.items() if now - listed.modified >= policy.grace for key in keys}
    # A list is as old as the listing it was made from: only what is still garbage goes.
    gone = tuple(dict.fromkeys([key for key in objects if key in ripe] + list(garbage.orphans)))
    waiting = tuple(key for key in objects if key not in ripe)
    if not dry_run:
        listed_before = {key for keys in lists.values() for key in keys}
        emptied = [listed.key for listed, keys in lists.items() if not set(keys) - set(gone) & sizes.keys()]
        _delete(chain, garbage, [key for key in waiting if key not in listed_before], gone, emptied)
    return Collected(garbage.manifests, gone, waiting, sum(sizes.get(key, 0) for key in gone))


def _delete(chain: Chain, garbage: Garbage, objects: list[str], gone: tuple[str, ...], lists: list[str]) -> None:
    if objects:
        chain.store.put(f"{DOOMED}{uuid.uuid4().hex}.json", json.dumps(objects).encode())
    for version in garbage.manifests:
        for listed in list(chain.store.list(f"{MANIFESTS}{version:012d}")):
            chain.store.delete(listed.key)
    # An anchor without its record is none: the record goes first.
    for key in sorted(gone, key=lambda key: not key.endswith(f"/{RECORD}")):
        chain.store.delete(key)
    for key in lists:
        chain.store.delete(key)
    if objects or gone or garbage.manifests:
        write_index(chain)


def _keys_of(garbage: Garbage, sizes: dict[str, int]) -> list[str]:
    keys = []
    for edge in garbage.edges:
        keys += [key for key in sizes if key.startswith(edge.key)] if edge.base is None else [edge.key]
    return keys


def _doomed(chain: Chain) -> dict[Listed, list[str]]:
    """The lists of what is to go, each with its keys."""
    lists = {}
    for listed in chain.store.list(DOOMED):
        try:
            keys = parse_json(read_record(chain.store, listed.key), "list")
        except (MissingError, FormatError):
            continue
        lists[listed] = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    return lists


def _now(chain: Chain, dry_run: bool) -> float:
    """The store's time. Where we may not write, and need not, the time of its newest commit, which is no later."""
    try:
        return clock(chain.store)
    except (AccessError, UnsupportedError):
        if not dry_run:
            raise
        return max((listed.modified for listed in chain.store.list(MANIFESTS)), default=0.0)


def reset(store: Store) -> int:
    """Delete a channel, so that another can begin in its place; what says there is one goes last. Returns how much."""
    count = 0
    for prefix in (MANIFESTS, PINS, REPLICAS, DOOMED, SQUASHES, DELTAS, ANCHORS, PROBES, HEAD, WRITER, INDEX, CHANNEL):
        for listed in list(store.list(prefix)):
            store.delete(listed.key)
            count += 1
    return count
