"""Deleting what is no longer needed: take stock, decide (`retention`), delete in an order that no reader notices.

Manifests are deleted first. Their objects are put on a list that ages by the store's clock, and are deleted once the
list is a grace period old: a reader that has just read a manifest has that long to fetch them. Each object is checked
again right before it is deleted, since taking stock of a large channel takes long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from weightcast.channel.chain import Chain
from weightcast.channel.doomed import doom, doomed
from weightcast.channel.index import write_index
from weightcast.channel.keys import (
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
    TAGS,
    WRITER,
    parent,
    read_manifest_key,
)
from weightcast.channel.retention import Garbage, Retention, collectable
from weightcast.errors import AccessError, UnsupportedError
from weightcast.store.base import Store, debris, delete_all, discard_debris
from weightcast.store.probe import PROBES, clock
from weightcast.upkeep.stock import Marks, Stock, read_marks, take_stock


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


def collect(chain: Chain, policy: Retention, *, dry_run: bool = False) -> Collected:
    """Delete what is no longer needed; with ``dry_run`` only report it."""
    unfinished = debris(chain.store)  # first, since a write to a folder removes old ones
    now = _now(chain, dry_run)
    stock = take_stock(chain, now)
    lists = doomed(chain)
    marks = read_marks(chain)
    garbage = _garbage(stock, marks, policy)
    manifests: list[str] = []
    announced: list[str] = []
    while not dry_run:
        # Whoever sets a pin or tag looks for this list afterwards. So either it is seen here, or it is not set.
        manifests = _manifests(chain, set(garbage.manifests))
        announced += [doom(chain, manifests)] if manifests else []
        before, marks = marks, read_marks(chain)
        if marks == before:
            break
        garbage = _garbage(stock, marks, policy)
    objects = _keys_of(garbage, stock.sizes)
    ripe = {listed.key for listed in lists if now - listed.modified >= policy.grace}
    due = {key for listed, keys in lists.items() if listed.key in ripe for key in keys}
    # A list may be out of date: delete only what is still garbage.
    gone = [key for key in objects if key in due]
    gone = list(dict.fromkeys([*gone, *garbage.orphans, *_silent(chain, policy, now)]))
    waiting = tuple(key for key in objects if key not in due)
    left = {listed.key: listed.size for listed in unfinished if now - listed.modified >= policy.grace}
    if not dry_run:
        listed_before = {key for keys in lists.values() for key in keys}
        unlisted = [key for key in waiting if key not in listed_before]
        if unlisted:
            doom(chain, unlisted)
        _delete_manifests(chain, manifests)
        delete_all(chain.store, announced)
        gone = _delete_old(chain, gone, now, policy)
        there = stock.sizes.keys() - set(gone)
        spent = [listed.key for listed, keys in lists.items() if there.isdisjoint(keys)]
        delete_all(chain.store, [key for key in spent if key in ripe])
        abandoned = [listed for listed in debris(chain.store) if now - listed.modified >= policy.grace]
        discard_debris(chain.store, [listed.key for listed in abandoned if listed.key in left])
        if waiting or gone or garbage.manifests:
            write_index(chain)
    return Collected(
        versions=garbage.manifests,
        objects=tuple(gone),
        doomed=waiting,
        nbytes=sum(stock.sizes.get(key, 0) for key in gone) + sum(left.values()),
        debris=tuple(left),
        doomed_nbytes=sum(stock.sizes[key] for key in waiting),
        kept=garbage.kept,
        ignored_pins=tuple(sorted(marks.pins - stock.ages.keys())),
        ignored_tags=tuple(
            name for version, names in marks.tags.items() if version not in stock.ages for name in names
        ),
        damage=(*stock.damage(garbage.unreachable), *marks.unreadable),
    )


def _garbage(stock: Stock, marks: Marks, policy: Retention) -> Garbage:
    """What may go; only orphans while a tag cannot be read."""
    garbage = collectable(stock.inventory(marks), policy)
    return replace(garbage, manifests=(), edges=()) if marks.unreadable else garbage


def _keys_of(garbage: Garbage, sizes: Mapping[str, int]) -> list[str]:
    edges = {edge.key for edge in garbage.edges}
    return [key for key in sizes if key in edges or parent(key) in edges]


def _manifests(chain: Chain, versions: set[int]) -> list[str]:
    """The keys of some versions' commits, also of those that lost a race."""
    found = ((read_manifest_key(listed.key), listed.key) for listed in chain.store.list(MANIFESTS)) if versions else ()
    return [key for named, key in found if named and named[0] in versions]


def _delete_manifests(chain: Chain, keys: list[str]) -> None:
    """Delete each version's commit after the manifests of writers that lost: readers take the smallest key."""
    commits: dict[int, str] = {}
    for key in keys:
        version = chain.version_of(key)
        if version is not None:
            commits.setdefault(version, key)
    delete_all(chain.store, set(keys) - set(commits.values()))
    delete_all(chain.store, list(commits.values()))


def _silent(chain: Chain, policy: Retention, now: float) -> Iterator[str]:
    """Heartbeats of replicas that stopped reporting: machines come and go, each under a new name."""
    for listed in chain.store.list(REPLICAS):
        if now - listed.modified >= max(policy.window, policy.patience, policy.grace):
            yield listed.key


def _delete_old(chain: Chain, keys: list[str], now: float, policy: Retention) -> list[str]:
    """Delete those of ``keys`` that are still as old as they were when stock was taken; returns which.

    An upload that looked abandoned may have been resumed: its files are young now, or its anchor has its record. No
    store has a conditional delete, so what is written between this check and the delete, one request later, is still
    lost. The uploader of an anchor checks its files again after writing the record, and sends missing ones again; only
    one that does all of that within this gap loses them.
    """
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(parent(key), []).append(key)
    deleted = []
    for prefix, members in groups.items():
        ages = {listed.key: now - listed.modified for listed in chain.store.list(prefix)}
        old = [key for key in members if key in ages and ages[key] >= policy.grace]
        if prefix.startswith(ANCHORS) and not _is_abandoned(prefix, members, ages, policy):
            continue
        # Without its record it is no longer an anchor: delete the record first.
        records = [key for key in old if key.endswith(f"/{RECORD}")]
        for some in (records, [key for key in old if key not in records]):
            delete_all(chain.store, some)
        deleted += old
    return deleted


def _is_abandoned(folder: str, members: Collection[str], ages: dict[str, float], policy: Retention) -> bool:
    """Whether an anchor's folder is still abandoned: no file is young, and no record was added."""
    finished = folder + RECORD in ages and folder + RECORD not in members
    return not finished and min(ages.values(), default=0.0) >= policy.grace


def _now(chain: Chain, dry_run: bool) -> float:
    """The store's time. A dry run that may not write takes that of the newest commit, which is not later."""
    try:
        return clock(chain.store)
    except (AccessError, UnsupportedError):
        if not dry_run:
            raise
        return max((listed.modified for listed in chain.store.list(MANIFESTS)), default=0.0)


NOTES = (HEAD, WRITER, INDEX)
"""What a channel has besides its versions and edges."""


def reset(store: Store) -> int:
    """Delete a channel, so that another can begin in its place; its own record goes last. Returns the count."""
    count = 0
    for prefix in (MANIFESTS, PINS, TAGS, REPLICAS, DOOMED, SQUASHES, DELTAS, ANCHORS, PROBES, *NOTES):
        keys = [listed.key for listed in store.list(prefix)]
        delete_all(store, keys)
        count += len(keys)
    left = [listed.key for listed in debris(store)]
    discard_debris(store, left)
    record = [listed.key for listed in store.list(CHANNEL)]
    delete_all(store, record)
    return count + len(left) + len(record)
