"""Deleting what nobody needs: take stock, decide (`retention`), delete in an order that no reader can notice.

A manifest goes first. Its objects are written on a list that ages by the store's clock, and go once the list is a grace
period old: whoever read the manifest just before has that long to fetch them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

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
    AnchorFile,
    read_anchor_key,
    read_delta_key,
    read_manifest_key,
    read_squash_key,
)
from weightcast.manifest import Manifest
from weightcast.notes import heartbeats, pins, write_index
from weightcast.plan import Edge
from weightcast.retention import Garbage, Inventory, Kept, Retention, collectable
from weightcast.store.base import Listed, Store, delete_all
from weightcast.store.probe import PROBES, clock

_READERS = 16
"""Manifests that are read at a time."""


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
    ages = {}
    for listed in chain.store.list(MANIFESTS):
        found = read_manifest_key(listed.key)
        if found:
            ages[found[0]] = now - listed.modified
    stock = _Stock(head.position.version, ages, _committed(chain, ages))
    for listed in (*chain.store.list(DELTAS), *chain.store.list(SQUASHES)):
        edge = _edge(listed)
        if edge is not None:
            stock.sort(edge, {listed.key: listed.size}, now - listed.modified)
    for edge, sizes, age in _anchors(chain, now):
        if edge.key + RECORD not in sizes or _is_whole(chain, edge, sizes):
            stock.sort(edge, sizes, age)
            stock.references |= {edge.key} if _is_reference(edge.key, sizes) else set()
    for listed in chain.store.list(PROBES):
        stock.orphan({listed.key: listed.size}, now - listed.modified)
    replicas = tuple((beat.position.version, now - when) for beat, when in heartbeats(chain))
    return stock.inventory(frozenset(pins(chain)), replicas), stock.sizes


def _committed(chain: Chain, versions: Iterable[int]) -> dict[int, Manifest]:
    """The manifests themselves: names alone do not tell a way from what a writer left that was outrun, or died."""

    def read(version: int) -> Manifest | None:
        try:
            return chain.manifest(version)
        except (MissingError, FormatError):
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        return {found.position.version: found for found in pool.map(read, versions) if found is not None}


@dataclass
class _Stock:
    """Sorts what is found into ways, what was one, and what never was; what is damaged is left alone."""

    newest: int
    ages: dict[int, float]
    committed: dict[int, Manifest]
    sizes: dict[str, int] = field(default_factory=dict)
    ways: list[Kept] = field(default_factory=list)
    spent: list[Kept] = field(default_factory=list)
    orphans: list[tuple[str, float]] = field(default_factory=list)
    references: set[str] = field(default_factory=set)

    def sort(self, edge: Edge, sizes: dict[str, int], age: float) -> None:
        if edge.result > self.newest:
            return  # it may be committed at any moment; once the head has passed it, it is a way or an orphan
        self.sizes |= sizes
        manifest = self.committed.get(edge.result)
        unfinished = edge.base is None and edge.key + RECORD not in sizes
        if manifest is None and edge.key.startswith(DELTAS):
            self.spent.append(Kept(edge, age))
        elif unfinished or (manifest is not None and not _fits(manifest, edge)):
            self.orphan(sizes, age)
        elif manifest is None or manifest.object.key != edge.key or manifest.object.size == edge.nbytes:
            self.ways.append(Kept(edge, age))

    def orphan(self, sizes: dict[str, int], age: float) -> None:
        self.sizes |= sizes
        self.orphans += [(key, age) for key in sizes]

    def inventory(self, pinned: frozenset[int], replicas: tuple[tuple[int, float], ...]) -> Inventory:
        ways, spent, orphans = tuple(self.ways), tuple(self.spent), tuple(self.orphans)
        return Inventory(self.newest, self.ages, ways, orphans, pinned, replicas, frozenset(self.references), spent)


def _fits(manifest: Manifest, edge: Edge) -> bool:
    """Whether a way leads to what was committed; a delta must be the very one."""
    if edge.key.startswith(DELTAS):
        return manifest.object.key == edge.key
    return manifest.position.digest.startswith(edge.digest)


def _is_whole(chain: Chain, edge: Edge, sizes: dict[str, int]) -> bool:
    """Whether an anchor's files are what its record says. If not it is no way, and nothing to delete either."""
    try:
        return all(sizes.get(ref.key) == ref.size for ref in chain.anchor(edge.key + RECORD).files)
    except (MissingError, FormatError):
        return False


def _edge(listed: Listed) -> Edge | None:
    """A delta or a squash, as a way."""
    delta, squash = read_delta_key(listed.key), read_squash_key(listed.key)
    if delta:
        return Edge(delta[0] - 1, delta[0], listed.size, listed.key, delta[1])
    return Edge(squash[0], squash[1], listed.size, listed.key, squash[2]) if squash else None


def _anchors(chain: Chain, now: float) -> Iterator[tuple[Edge, dict[str, int], float]]:
    """Each anchor, its objects' sizes, and the age of the youngest."""
    places: dict[str, AnchorFile] = {}
    folders: dict[str, list[Listed]] = {}
    for listed in chain.store.list(ANCHORS):
        place = read_anchor_key(listed.key)
        if place is not None:
            places[place.folder] = place
            folders.setdefault(place.folder, []).append(listed)
    for folder, files in folders.items():
        sizes = {listed.key: listed.size for listed in files}
        at = places[folder]
        nbytes = chain.channel.table.nbytes if _is_reference(folder, sizes) else sum(sizes.values())
        edge = Edge(None, at.version, nbytes, folder, at.digest)
        yield edge, sizes, now - max(listed.modified for listed in files)


def _is_reference(folder: str, sizes: Collection[str]) -> bool:
    """Whether an anchor has nothing but its record here."""
    return set(sizes) == {folder + RECORD}


def collect(chain: Chain, policy: Retention, *, dry_run: bool = False) -> Collected:
    """Delete what nobody needs any more; with ``dry_run`` only say what that is."""
    now = _now(chain, dry_run)
    inventory, sizes = take_stock(chain, now)
    garbage = collectable(inventory, policy)
    objects = _keys_of(garbage, sizes)
    lists = _doomed(chain)
    ripe = {key for listed, keys in lists.items() if now - listed.modified >= policy.grace for key in keys}
    # A list is as old as the listing it was made from: only what is still garbage goes.
    gone = tuple(
        dict.fromkeys([*(key for key in objects if key in ripe), *garbage.orphans, *_silent(chain, policy, now)])
    )
    waiting = tuple(key for key in objects if key not in ripe)
    if not dry_run:
        listed_before = {key for keys in lists.values() for key in keys}
        emptied = [listed.key for listed, keys in lists.items() if not (set(keys) - set(gone)) & sizes.keys()]
        _delete(chain, garbage, [key for key in waiting if key not in listed_before], gone, emptied)
    return Collected(garbage.manifests, gone, waiting, sum(sizes.get(key, 0) for key in gone))


def _silent(chain: Chain, policy: Retention, now: float) -> Iterator[str]:
    """Heartbeats of replicas that nobody waits for any more: machines come and go, and each has a name of its own."""
    for listed in chain.store.list(REPLICAS):
        if now - listed.modified >= max(policy.window, policy.patience, policy.grace):
            yield listed.key


def _delete(chain: Chain, garbage: Garbage, objects: list[str], gone: tuple[str, ...], lists: list[str]) -> None:
    if objects:
        chain.store.put(f"{DOOMED}{uuid.uuid4().hex}.json", json.dumps(objects).encode())
    manifests = _manifests(chain, set(garbage.manifests)) if garbage.manifests else []
    # An anchor without its record is none: the record goes first.
    records = [key for key in gone if key.endswith(f"/{RECORD}")]
    others = [key for key in gone if not key.endswith(f"/{RECORD}")]
    for keys in (manifests, records, others, lists):
        delete_all(chain.store, keys)
    if objects or gone or garbage.manifests:
        write_index(chain)


def _manifests(chain: Chain, versions: set[int]) -> list[str]:
    """The keys of some versions' commits, also of those that lost a race."""
    found = ((read_manifest_key(listed.key), listed.key) for listed in chain.store.list(MANIFESTS))
    return [key for named, key in found if named and named[0] in versions]


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
        keys = [listed.key for listed in store.list(prefix)]
        delete_all(store, keys)
        count += len(keys)
    return count
