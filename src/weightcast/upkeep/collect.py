"""Deleting what is no longer needed: take stock, decide (`retention`), delete in an order that no reader notices.

Manifests are deleted first. Their objects are put on a list that ages by the store's clock, and are deleted once the
list is a grace period old: a reader that has just read a manifest has that long to fetch them. Each object is checked
again right before it is deleted, since taking stock of a large channel takes long.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.edge import Edge, edge_from_key, leads_to_commit
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.index import write_index
from weightcast.channel.keys import (
    ANCHORS,
    CHANNEL,
    CHANNEL_COPY,
    DELTAS,
    DOOMED,
    HEAD,
    INDEX,
    MANIFESTS,
    PINS,
    RECORD,
    REPLICAS,
    SQUASHES,
    TAGS,
    WRITER,
    AnchorFile,
    manifest_key,
    read_anchor_key,
    read_manifest_key,
)
from weightcast.channel.pins import pins
from weightcast.channel.records import Manifest
from weightcast.channel.retention import Garbage, Inventory, Kept, Retention, collectable
from weightcast.channel.tags import tags
from weightcast.errors import AccessError, ChannelError, FormatError, MissingError, UnsupportedError
from weightcast.format.json import parse_json
from weightcast.store.base import Listed, Store, debris, delete_all, discard_debris
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
    doomed_nbytes: int = 0
    """Freed in that later run."""
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Every version that stays, with the reasons."""
    debris: tuple[str, ...] = ()
    """Interrupted uploads, whose bytes are not objects."""
    ignored_pins: tuple[int, ...] = ()
    """Pins of versions that do not exist: they keep nothing."""
    ignored_tags: tuple[str, ...] = ()
    """Tags of versions that do not exist."""
    damage: tuple[str, ...] = ()
    """Why no version and none of its objects may be deleted: what cannot be reached, and what is missing for it."""


def take_stock(chain: Chain, now: float) -> Stock:
    """What the bucket holds, with ages, and the size of every object that might go."""
    head = chain.head()
    if head is None:
        raise ChannelError("the channel has no version yet", file=chain.store.url)
    ages = {}
    for listed in chain.store.list(MANIFESTS):
        found = read_manifest_key(listed.key)
        if found and chain.is_commit(listed.key):
            ages[found[0]] = now - listed.modified
    committed, problems = _committed(chain, ages)
    stock = Stock(head.position.version, ages, committed, problems)
    for listed in (*chain.store.list(DELTAS), *chain.store.list(SQUASHES)):
        edge = edge_from_key(listed.key, listed.size)
        if edge is not None:
            stock.sort(edge, {listed.key: listed.size}, now - listed.modified)
    for edge, sizes, age in _anchors(chain, now):
        problem = _problem_of(chain, edge, sizes) if edge.record in sizes else None
        stock.seen |= sizes
        if problem is None:
            stock.sort(edge, sizes, age)
        else:
            stock.problems.append(problem)  # neither an edge nor garbage
    for listed in chain.store.list(PROBES):
        stock.orphan({listed.key: listed.size}, now - listed.modified)
    stock.replicas = tuple((beat.position.version, now - when) for beat, when in heartbeats(chain))
    stock.read_marks(chain)
    stock.now = now
    return stock


def _committed(chain: Chain, versions: Iterable[int]) -> tuple[dict[int, Manifest], list[str]]:
    """The manifests, and what is wrong with those that cannot be read.

    Keys alone do not distinguish an edge from what a writer that lost a race, or died, has left.
    """

    def read(version: int) -> Manifest | str | None:
        try:
            return chain.manifest(version)
        except MissingError:
            return None
        except FormatError as error:
            return f"{manifest_key(version)} cannot be read: {error.problem}"

    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(read, versions))
    manifests = {one.position.version: one for one in found if isinstance(one, Manifest)}
    return manifests, [one for one in found if isinstance(one, str)]


@dataclass
class Stock:
    """Sorts objects into edges, spent edges and orphans; damaged ones are left alone."""

    newest: int
    ages: dict[int, float]
    committed: dict[int, Manifest]
    problems: list[str] = field(default_factory=list)
    """What cannot be read or is not what a record says."""
    seen: dict[str, int] = field(default_factory=dict)
    """Sizes of all objects that a manifest may name."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of those that may be deleted."""
    edges: list[Kept] = field(default_factory=list)
    spent: list[Kept] = field(default_factory=list)
    orphans: list[tuple[str, float]] = field(default_factory=list)
    replicas: tuple[tuple[int, float], ...] = ()
    pins: frozenset[int] = frozenset()
    tags: dict[int, tuple[str, ...]] = field(default_factory=dict)
    bad_tags: list[str] = field(default_factory=list)
    """Tags that cannot be read: which versions they keep is unknown."""
    now: float = 0.0

    def read_marks(self, chain: Chain) -> bool:
        """Read pins and tags; whether they changed since they were read last."""
        before = self.pins, self.tags, self.bad_tags
        self.pins, self.tags = frozenset(pins(chain)), {}
        good, bad = tags(chain)
        for tag in good:
            self.tags[tag.position.version] = (*self.tags.get(tag.position.version, ()), tag.name)
        self.bad_tags = [f"{key} cannot be read: {error.problem}" for key, error in bad]
        return before != (self.pins, self.tags, self.bad_tags)

    def sort(self, edge: Edge, sizes: dict[str, int], age: float) -> None:
        self.seen |= sizes
        if edge.result > self.newest:
            return  # it may be committed at any moment; once the head has passed it, it is an edge or an orphan
        self.sizes |= sizes
        manifest = self.committed.get(edge.result)
        unfinished = edge.base is None and edge.record not in sizes
        if manifest is None and edge.kind == "delta":
            self.spent.append(Kept(edge, age))
        elif unfinished or not leads_to_commit(edge, manifest):
            self.orphan(sizes, age)
        elif manifest is None or manifest.object.key != edge.key or manifest.object.size == edge.nbytes:
            self.edges.append(Kept(edge, age))

    def orphan(self, sizes: dict[str, int], age: float) -> None:
        self.sizes |= sizes
        self.orphans += [(key, age) for key in sizes]

    def inventory(self) -> Inventory:
        """The input of `collectable`; without pins and tags of versions that do not exist."""
        pinned = self.pins & self.ages.keys()
        tagged = {version: names for version, names in self.tags.items() if version in self.ages}
        edges, spent, orphans = tuple(self.edges), tuple(self.spent), tuple(self.orphans)
        return Inventory(self.newest, self.ages, edges, orphans, pinned, self.replicas, spent, tagged, self.now)

    def damage(self, unreachable: tuple[int, ...]) -> tuple[str, ...]:
        """Why nothing may be deleted: one line for each object that is missing or damaged."""
        if not unreachable:
            return tuple(self.bad_tags)
        more = f" nor to {len(unreachable) - 1:,} others" if len(unreachable) > 1 else ""
        found = [f"no route leads to version {unreachable[0]}{more}"]
        for manifest in self.committed.values():
            ref = manifest.object
            if ref.key not in self.seen:
                found.append(f"{ref.key} is missing")
            elif self.seen[ref.key] != ref.size:
                found.append(f"{ref.key} has {self.seen[ref.key]} bytes, its manifest says {ref.size}")
        if not any(kept.edge.base is None for kept in self.edges):
            found.append("no whole anchor is left")
        return (*found, *self.problems, *self.bad_tags)


def _problem_of(chain: Chain, edge: Edge, sizes: dict[str, int]) -> str | None:
    """What is wrong with an anchor, if its files are not what its record says."""
    try:
        for ref in chain.anchor(edge.record).files:
            if sizes.get(ref.key) != ref.size:
                found = f"has {sizes[ref.key]} bytes" if ref.key in sizes else "is missing"
                return f"{ref.key} {found}, its anchor says {ref.size} bytes"
    except MissingError:
        return f"{edge.record} is missing"
    except FormatError as error:
        return f"{edge.record} cannot be read: {error.problem}"
    return None


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
        if _is_reference(folder, sizes):
            edge = Edge("reference", None, at.version, chain.channel.table.nbytes, folder, at.digest)
        else:
            edge = Edge("anchor", None, at.version, sum(sizes.values()), folder, at.digest)
        yield edge, sizes, now - max(listed.modified for listed in files)


def _is_reference(folder: str, sizes: Collection[str]) -> bool:
    """Whether an anchor's folder holds no checkpoint file: only its record and the copy of the channel's."""
    return folder + RECORD in sizes and not set(sizes) - {folder + RECORD, folder + CHANNEL_COPY}


def collect(chain: Chain, policy: Retention, *, dry_run: bool = False) -> Collected:
    """Delete what is no longer needed; with ``dry_run`` only report it."""
    unfinished = debris(chain.store)  # before anything is written: a write to a folder removes old ones
    now = _now(chain, dry_run)
    stock = take_stock(chain, now)
    lists = _doomed(chain)
    garbage = _garbage(stock, policy)
    while not dry_run and stock.read_marks(chain):  # a pin or tag was set while this decided
        garbage = _garbage(stock, policy)
    objects = _keys_of(garbage, stock.sizes)
    ripe = {key for listed, keys in lists.items() if now - listed.modified >= policy.grace for key in keys}
    # A list may be out of date: delete only what is still garbage.
    gone = list(
        dict.fromkeys([*(key for key in objects if key in ripe), *garbage.orphans, *_silent(chain, policy, now)])
    )
    waiting = tuple(key for key in objects if key not in ripe)
    left = {listed.key: listed.size for listed in unfinished if now - listed.modified >= policy.grace}
    if not dry_run:
        listed_before = {key for keys in lists.values() for key in keys}
        _doom(chain, garbage, [key for key in waiting if key not in listed_before])
        gone = _delete_old(chain, gone, now, policy)
        emptied = [listed.key for listed, keys in lists.items() if not (set(keys) - set(gone)) & stock.sizes.keys()]
        delete_all(chain.store, emptied)
        discard_debris(
            chain.store, [listed.key for listed in debris(chain.store) if _is_still(listed, left, now, policy)]
        )
        if waiting or gone or garbage.manifests:
            write_index(chain)
    return Collected(
        versions=garbage.manifests,
        objects=tuple(gone),
        doomed=waiting,
        nbytes=sum(stock.sizes.get(key, 0) for key in gone) + sum(left.values()),
        debris=tuple(left),
        doomed_nbytes=sum(stock.sizes.get(key, 0) for key in waiting),
        kept=garbage.kept,
        ignored_pins=tuple(sorted(stock.pins - stock.ages.keys())),
        ignored_tags=tuple(
            name for version, names in stock.tags.items() if version not in stock.ages for name in names
        ),
        damage=stock.damage(garbage.unreachable),
    )


def _garbage(stock: Stock, policy: Retention) -> Garbage:
    """What may go; only orphans while a tag cannot be read."""
    garbage = collectable(stock.inventory(), policy)
    return Garbage((), (), garbage.orphans, garbage.unreachable, garbage.kept) if stock.bad_tags else garbage


def _silent(chain: Chain, policy: Retention, now: float) -> Iterator[str]:
    """Heartbeats of replicas that stopped reporting: machines come and go, each with a name of its own."""
    for listed in chain.store.list(REPLICAS):
        if now - listed.modified >= max(policy.window, policy.patience, policy.grace):
            yield listed.key


def _doom(chain: Chain, garbage: Garbage, objects: list[str]) -> None:
    """Delete manifests, after putting their objects on a list; those are deleted a grace period later."""
    if objects:
        chain.store.put(f"{DOOMED}{uuid.uuid4().hex}.json", json.dumps(objects).encode())
    delete_all(chain.store, _manifests(chain, set(garbage.manifests)) if garbage.manifests else [])


def _delete_old(chain: Chain, keys: list[str], now: float, policy: Retention) -> list[str]:
    """Delete those of ``keys`` that are still as old as they were when stock was taken; returns which.

    An upload that looked abandoned may have been resumed: its files are young now, or its anchor has its record. No
    store has a conditional delete, so what is written between this check and the delete, one request later, is still
    lost. The uploader of an anchor checks its files again after writing the record, and sends missing ones again; only
    one that does all of that within this gap loses them.
    """
    groups: dict[str, list[str]] = {}
    for key in keys:
        place = read_anchor_key(key)
        groups.setdefault(place.folder if place else key[: key.index("/") + 1], []).append(key)
    deleted = []
    for prefix, members in groups.items():
        ages = {listed.key: now - listed.modified for listed in chain.store.list(prefix)}
        old = [key for key in members if key in ages and ages[key] >= policy.grace]
        if prefix.startswith(ANCHORS) and not _is_abandoned(prefix, members, ages, policy):
            continue
        # Without its record it is not an anchor any more: delete the record first.
        records = [key for key in old if key.endswith(f"/{RECORD}")]
        for some in (records, [key for key in old if key not in records]):
            delete_all(chain.store, some)
        deleted += old
    return deleted


def _is_abandoned(folder: str, members: Collection[str], ages: dict[str, float], policy: Retention) -> bool:
    """Whether an anchor's folder is still abandoned: no file is young, and no record was added."""
    finished = folder + RECORD in ages and folder + RECORD not in members
    return not finished and min(ages.values(), default=0.0) >= policy.grace


def _is_still(listed: Listed, left: Collection[str], now: float, policy: Retention) -> bool:
    """Whether an unfinished upload that looked abandoned still does."""
    return listed.key in left and now - listed.modified >= policy.grace


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
    """The lists of what is to be deleted, each with its keys."""
    lists = {}
    for listed in chain.store.list(DOOMED):
        try:
            keys = parse_json(read_record(chain.store, listed.key), "list")
        except (MissingError, FormatError):
            continue
        lists[listed] = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    return lists


def _now(chain: Chain, dry_run: bool) -> float:
    """The store's time. A dry run that may not write takes that of the newest commit, which is not later."""
    try:
        return clock(chain.store)
    except (AccessError, UnsupportedError):
        if not dry_run:
            raise
        return max((listed.modified for listed in chain.store.list(MANIFESTS)), default=0.0)


def reset(store: Store) -> int:
    """Delete a channel, so that another can begin in its place; its own record goes last. Returns the count."""
    count = 0
    for prefix in (MANIFESTS, PINS, TAGS, REPLICAS, DOOMED, SQUASHES, DELTAS, ANCHORS, PROBES, HEAD, WRITER, INDEX):
        keys = [listed.key for listed in store.list(prefix)]
        delete_all(store, keys)
        count += len(keys)
    left = [listed.key for listed in debris(store)]
    discard_debris(store, left)
    record = [listed.key for listed in store.list(CHANNEL)]
    delete_all(store, record)
    return count + len(left) + len(record)
