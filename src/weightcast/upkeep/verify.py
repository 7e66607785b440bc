"""Verifying a channel: by listings and records alone, or by replaying every object in it.

Digests find mistakes and corruption. They are sums, so bits can be chosen to have a given digest: they do not protect
against an attacker who may write to the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.edge import Edge, leads_to_commit
from weightcast.channel.keys import (
    ANCHORS,
    CHANNEL,
    CHANNEL_COPY,
    DELTAS,
    MANIFESTS,
    SQUASHES,
    manifest_key,
    read_anchor_key,
    read_manifest_key,
    tag_key,
)
from weightcast.channel.records import Anchor, Manifest
from weightcast.channel.route import cheapest_route, reachable
from weightcast.channel.tags import tags
from weightcast.disk.companions import WEIGHTS
from weightcast.disk.durable import Report, silent
from weightcast.errors import (
    ChannelError,
    FormatError,
    SpaceError,
    StoreError,
    TrustError,
    UnreachableError,
    WeightcastError,
)
from weightcast.follow.fetch import BadEdgeError, forget_downloads
from weightcast.follow.mirror import Mirror
from weightcast.follow.staging import stage_route
from weightcast.format.workers import ONE, Workers
from weightcast.upkeep.findings import Finding, check_anchor, check_manifest

_PATIENCE = 3
"""Requests in a row that a store does not answer, until verification gives up."""


def verify(chain: Chain) -> Iterator[Finding]:
    """Check every record against the others and against the listings; nothing else is read."""
    manifests, findings = _manifests(chain)
    yield from findings
    for listed in chain.store.list(MANIFESTS):
        if read_manifest_key(listed.key) and chain.version_of(listed.key) is None:
            yield Finding(listed.key, "readers ignore this object: its name is not that of a commit of this channel")
    sizes = {o.key: o.size for kind in (DELTAS, SQUASHES, ANCHORS) for o in chain.store.list(kind)}
    for version, manifest in manifests.items():
        yield from check_manifest(manifest, sizes)
        yield from _check_base(manifest, manifests.get(version - 1))
    for edge in chain.anchor_edges():
        yield from check_anchor(chain, edge, sizes, manifests.get(edge.result))
    yield from _check_copies(chain, sizes)
    for edge in chain.squash_edges(0):
        if not chain.accepts(edge):
            yield Finding(edge.key, "it is not signed by a cutter's key")
        elif not leads_to_commit(edge, manifests.get(edge.result)):
            digest = manifests[edge.result].position.digest
            yield Finding(edge.key, f"it leads to {edge.digest}, version {edge.result} is {digest[:16]}")
    yield from _check_tags(chain, manifests)
    if manifests:
        head = max(manifests)
        edges = [edge for edge in _all_edges(chain, head) if leads_to_commit(edge, manifests.get(edge.result))]
        if head not in reachable(edges):
            yield Finding(manifest_key(head), "no route leads from any anchor to the head")


def _manifests(chain: Chain) -> tuple[dict[int, Manifest], list[Finding]]:
    found: dict[int, Manifest] = {}
    findings, unanswered = [], 0
    for version in chain.versions():
        try:
            found[version] = chain.manifest(version)
            unanswered = 0
        except (FormatError, ChannelError, StoreError, TrustError) as error:
            unanswered = unanswered + 1 if isinstance(error, UnreachableError) else 0
            if unanswered >= _PATIENCE:
                raise
            findings.append(Finding(manifest_key(version), error.problem))
    return found, findings


def _check_base(manifest: Manifest, before: Manifest | None) -> Iterator[Finding]:
    if manifest.base is not None and before is not None and manifest.base != before.position:
        key = manifest_key(manifest.position.version)
        yield Finding(key, f"it begins at {manifest.base}, version {manifest.base.version} is {before.position}")


def _check_tags(chain: Chain, manifests: dict[int, Manifest]) -> Iterator[Finding]:
    """Tags that cannot be read or do not name a version."""
    good, bad = tags(chain)
    for key, error in bad:
        yield Finding(key, error.problem)
    for tag in good:
        manifest, version = manifests.get(tag.position.version), tag.position.version
        if manifest is None:
            yield Finding(tag_key(tag.name), f"it names version {version}, which is not there")
        elif manifest.position != tag.position:
            found = f"it names {tag.position}, version {version} is {manifest.position}"
            yield Finding(tag_key(tag.name), found)


def _check_copies(chain: Chain, sizes: dict[str, int]) -> Iterator[Finding]:
    """Check the copies of the channel's record, from which a damaged one is restored."""
    record = read_record(chain.store, CHANNEL)
    for key in sizes:
        place = read_anchor_key(key)
        if place is None or place.name != CHANNEL_COPY:
            continue
        try:
            if read_record(chain.store, key) != record:
                yield Finding(key, "it is not a copy of channel.json. Copy that there: `repair` needs it")
        except UnreachableError:
            raise
        except (FormatError, StoreError) as error:
            yield Finding(key, error.problem)


# -- notes -------------------------------------------------------------------------------------------------------------


def changed_companions(chain: Chain) -> Iterator[str]:
    """The files beside the weights that differ between an anchor and the one before it.

    That may be intended, as for a fixed tokenizer. But no digest of a version covers these files, so users should know.
    """
    before: Anchor | None = None
    for edge in sorted(chain.anchor_edges(), key=lambda edge: (edge.result, edge.key)):
        try:
            anchor = chain.anchor(edge.record)
            if not leads_to_commit(edge, chain.manifest(edge.result)):
                continue  # of a writer that lost a race
        except (FormatError, ChannelError, StoreError, TrustError):
            continue  # reported as a finding
        if before is not None:
            yield from _differences(before, anchor)
        before = anchor


def _differences(before: Anchor, after: Anchor) -> Iterator[str]:
    old, new = _companions(before), _companions(after)
    here, there = f"version {after.position.version}'s anchor", f"version {before.position.version}'s"
    for name in sorted(old | new):
        if name not in new:
            yield f"{name} of {there} anchor is not in {here}"
        elif name not in old:
            yield f"{name} of {here} is not in {there}"
        elif old[name] != new[name]:
            yield f"{name} of {here} differs from that of {there}"


def _companions(anchor: Anchor) -> dict[str, str]:
    """Names and SHA-256s of the files that are not weights."""
    files = {ref.key.rpartition("/")[2]: ref.sha256 for ref in anchor.files}
    return {name: sha256 for name, sha256 in files.items() if not name.endswith(WEIGHTS)}


# -- every object ------------------------------------------------------------------------------------------------------


def verify_deep(
    chain: Chain, scratch: Path, workers: Workers = ONE, report: Report = silent
) -> Iterator[tuple[str, Finding | None]]:
    """Fetch, decode and check every anchor, delta and squash in the order of versions; yield each key with its finding.

    An object that cannot be read is a finding, and the rest is still checked. A reference is fetched only if nothing
    else leads to the versions after it. ``scratch`` is a folder that does not exist yet; it will hold one copy of the
    weights.
    """
    head = chain.head()
    if head is None:
        return
    newest = head.position.version
    walk = _Walk(chain, Mirror(scratch, chain.channel.id, chain.channel.table, workers), workers)
    try:
        yield from walk.run(_all_edges(chain, newest), newest, report)
    finally:
        walk.mirror.close()


def _all_edges(chain: Chain, newest: int) -> list[Edge]:
    """All edges, also references and those that lead on from them."""
    edges, named = chain.edges(None, newest), chain.reference_edges()
    more = chain.edges(min(edge.result for edge in named), newest) if named else []
    return list({edge.key: edge for edge in (*edges, *named, *more)}.values())


class _Walk:
    """Goes from version to version with a mirror, and tries each object at its base."""

    def __init__(self, chain: Chain, mirror: Mirror, workers: Workers):
        self.chain = chain
        self.mirror = mirror
        self.workers = workers
        self.bad: set[str] = set()
        """Keys of objects that are not used to reach others."""
        self.unanswered = 0

    def run(self, edges: list[Edge], newest: int, report: Report) -> Iterator[tuple[str, Finding | None]]:
        arriving, leaving = _by(edges, lambda edge: edge.result), _by(edges, lambda edge: edge.base)
        committed, untried = set(self.chain.versions()), dict.fromkeys((DELTAS, SQUASHES), 0)
        for version in sorted({edge.result for edge in edges if edge.base is None} | committed):
            report("versions", version, newest)
            for edge in arriving.get(version, ()):
                if edge.kind == "delta" and self.mirror.version == edge.base:
                    yield edge.key, self._try(edge)
                elif edge.kind == "delta":
                    untried[DELTAS] += edge.base in committed  # else its base was collected, and no reader uses it
            for edge in arriving.get(version, ()):
                if edge.base is None and not (edge.kind == "reference" and self.mirror.version == version):
                    yield edge.key, self._try(edge)
            if self.mirror.version != version and version in committed:
                self._leap(edges, version)
            for edge in leaving.get(version, ()):
                if edge.kind == "squash" and self.mirror.version == version:
                    yield edge.key, self._try(edge)
                elif edge.kind == "squash":
                    untried[SQUASHES] += version in committed and edge.result in committed
        for kind, count in untried.items():
            if count:
                what = f"{count} {kind.rstrip('/')} could not be tried: their base cannot be reached"
                yield kind, Finding(kind, what)

    def _try(self, edge: Edge) -> Finding | None:
        """Check one edge, and apply it unless it is a squash or the mirror is there; raises if the store is gone."""
        try:
            goal = self.chain.manifest(edge.result)
            if edge.kind == "squash" or leads_to_commit(edge, goal):
                staged = stage_route(self.chain, self.mirror, (edge,), goal, self.workers)
                if edge.kind != "squash" and self.mirror.version != edge.result:
                    self.mirror.apply(staged)
                forget_downloads(self.mirror)
        except SpaceError:
            raise  # no fault of the object
        except BadEdgeError as bad:
            return self._finding(edge, bad.error)
        except (WeightcastError, OSError) as error:
            return self._finding(edge, error)
        self.unanswered = 0
        return None

    def _finding(self, edge: Edge, error: Exception) -> Finding:
        self.bad.add(edge.key)
        self.unanswered = self.unanswered + 1 if isinstance(error, UnreachableError) else 0
        if self.unanswered >= _PATIENCE:
            raise error
        if edge.kind == "reference" and isinstance(error, StoreError):
            anchor = "the checkpoint that this anchor refers to could not be fetched"
            hint = "Check a replica instead: `weightcast verify FOLDER URL`"
            return Finding(edge.key, f"{anchor}: {error}. {hint}")
        return Finding.of(edge.key, error)

    def _leap(self, edges: list[Edge], version: int) -> None:
        """Continue after a gap, if any route leads there; errors of its objects are found when these are tried."""
        route = cheapest_route([edge for edge in edges if edge.key not in self.bad], self.mirror.version, version)
        if route:
            try:
                goal = self.chain.manifest(version)
                self.mirror.apply(stage_route(self.chain, self.mirror, route, goal, self.workers))
            except BadEdgeError as bad:
                self.bad.add(bad.edge.key)
            except UnreachableError:
                self.unanswered += 1
                if self.unanswered >= _PATIENCE:
                    raise
            except (StoreError, FormatError, ChannelError, TrustError):
                pass  # the same request is made again when the object is tried, and its error reported
        forget_downloads(self.mirror)


def _by(edges: list[Edge], version: Callable[[Edge], int | None]) -> dict[int | None, list[Edge]]:
    found: dict[int | None, list[Edge]] = {}
    for edge in edges:
        found.setdefault(version(edge), []).append(edge)
    return found
