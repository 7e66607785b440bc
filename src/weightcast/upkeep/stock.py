"""Taking stock of a channel before anything is deleted: its versions, edges and orphans, with their ages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge, edge_from_key, leads_to_commit
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.keys import MANIFESTS, SQUASHES, manifest_key
from weightcast.channel.pins import pins
from weightcast.channel.records import Manifest
from weightcast.channel.retention import Inventory, Kept
from weightcast.channel.tags import tags
from weightcast.errors import ChannelError, FormatError, MissingError, TrustError
from weightcast.store.base import Listed
from weightcast.store.probe import PROBES
from weightcast.upkeep.findings import Finding, check_anchor, check_manifest

_READERS = 16
"""Manifests that are read at a time."""


@dataclass(frozen=True)
class Marks:
    """Pins and tags, by version."""

    pins: frozenset[int]
    tags: Mapping[int, tuple[str, ...]]
    unreadable: tuple[str, ...]
    """What is wrong with tags that cannot be read: which versions they keep is unknown."""


def read_marks(chain: Chain) -> Marks:
    named: dict[int, tuple[str, ...]] = {}
    good, bad = tags(chain)
    for tag in good:
        named[tag.position.version] = (*named.get(tag.position.version, ()), tag.name)
    unreadable = tuple(f"{key}: {error.problem}" for key, error in bad)
    return Marks(frozenset(pins(chain)), named, unreadable)


@dataclass
class Stock:
    """What a bucket holds: edges, spent edges and orphans. What is damaged is in none of these."""

    now: float
    newest: int
    ages: dict[int, float]
    committed: dict[int, Manifest]
    problems: list[Finding]
    """What cannot be read or is not what a record says."""
    sizes: dict[str, int] = field(default_factory=dict)
    edges: list[Kept] = field(default_factory=list)
    spent: list[Kept] = field(default_factory=list)
    orphans: list[tuple[str, float]] = field(default_factory=list)
    replicas: tuple[tuple[int, float], ...] = ()

    def add_edge(self, edge: Edge, objects: Sequence[Listed]) -> None:
        self.sizes |= {listed.key: listed.size for listed in objects}
        if edge.result > self.newest:
            return  # it may be committed at any moment; once the head has passed it, it is an edge or an orphan
        manifest = self.committed.get(edge.result)
        unfinished = edge.base is None and edge.record not in self.sizes
        kept = Kept(edge, self._age(objects))
        if manifest is None and edge.kind == "delta":
            self.spent.append(kept)
        elif unfinished or not leads_to_commit(edge, manifest):
            self.add_orphans(objects)
        elif manifest is None or manifest.key != edge.key or not list(check_manifest(manifest, self.sizes)):
            self.edges.append(kept)

    def add_orphans(self, objects: Sequence[Listed]) -> None:
        """Objects that are of use only together."""
        self.sizes |= {listed.key: listed.size for listed in objects}
        self.orphans += [(listed.key, self._age(objects)) for listed in objects]

    def _age(self, objects: Iterable[Listed]) -> float:
        """The age of the youngest."""
        return self.now - max(listed.modified for listed in objects)

    def inventory(self, marks: Marks) -> Inventory:
        """The input of `collectable`; without pins and tags of versions that do not exist."""
        pinned = marks.pins & self.ages.keys()
        tagged = {version: names for version, names in marks.tags.items() if version in self.ages}
        edges, spent, orphans = tuple(self.edges), tuple(self.spent), tuple(self.orphans)
        return Inventory(self.newest, self.ages, edges, orphans, pinned, self.replicas, spent, tagged, self.now)

    def damage(self, unreachable: Sequence[int]) -> list[str]:
        """Why versions are unreachable: one line for each object that is missing or damaged."""
        if not unreachable:
            return []
        more = f" nor to {len(unreachable) - 1:,} others" if len(unreachable) > 1 else ""
        found = [f"no route leads to version {unreachable[0]}{more}"]
        for manifest in self.committed.values():
            found += map(str, check_manifest(manifest, self.sizes))
        if not any(kept.edge.base is None for kept in self.edges):
            found.append("no whole anchor is left")
        return [*found, *map(str, self.problems)]


def take_stock(chain: Chain, now: float) -> Stock:
    """What the bucket holds, with ages at ``now`` by its clock."""
    head = chain.head()
    if head is None:
        raise ChannelError("the channel has no version yet", file=chain.store.url)
    ages = {}
    for listed in chain.store.list(MANIFESTS):
        version = chain.version_of(listed.key)
        if version is not None:
            ages[version] = now - listed.modified
    stock = Stock(now, head.position.version, ages, *_committed(chain, ages))
    for edge, objects in chain.deltas():
        stock.add_edge(edge, objects)
    for listed in chain.store.list(SQUASHES):
        cut = edge_from_key(listed.key, listed.size)
        if cut is not None and chain.accepts(cut):
            stock.add_edge(cut, [listed])
        elif cut is not None:
            stock.add_orphans([listed])
    for edge, files in chain.anchor_folders():
        sizes = {listed.key: listed.size for listed in files}
        problems = list(check_anchor(chain, edge, sizes)) if edge.record in sizes else []
        if problems:
            stock.sizes |= sizes
            stock.problems += problems  # neither an edge nor garbage
        else:
            stock.add_edge(edge, files)
    for listed in chain.store.list(PROBES):
        stock.add_orphans([listed])
    stock.replicas = tuple((beat.position.version, now - when) for beat, when in heartbeats(chain))
    return stock


def _committed(chain: Chain, versions: Iterable[int]) -> tuple[dict[int, Manifest], list[Finding]]:
    """The manifests, and what is wrong with those that cannot be read.

    Keys alone do not distinguish an edge from what a writer that lost a race, or died, has left.
    """

    def read(version: int) -> Manifest | Finding | None:
        try:
            return chain.manifest(version)
        except MissingError:
            return None
        except (FormatError, TrustError) as error:
            return Finding(manifest_key(version), error.problem)

    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(read, versions))
    manifests = {one.position.version: one for one in found if isinstance(one, Manifest)}
    return manifests, [one for one in found if isinstance(one, Finding)]
