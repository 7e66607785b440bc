"""Is the channel whole? By listings and records alone, or by replaying every object in it.

Digests tell mistakes and corruption. They add up, so whoever chooses bits can choose ones with a given digest: they are
no proof against somebody who may write to the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.chain import Chain, read_record
from weightcast.channel.edge import Edge, leads_to_commit, squash_object
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
)
from weightcast.channel.records import Anchor, Manifest
from weightcast.channel.route import cheapest_route, reachable
from weightcast.disk.companions import WEIGHTS
from weightcast.disk.durable import Report, silent
from weightcast.disk.staged import stage
from weightcast.errors import (
    ChannelError,
    FormatError,
    SpaceError,
    StoreError,
    UnreachableError,
    WeightcastError,
)
from weightcast.follow.fetch import BadEdgeError, forget_downloads, stage_route
from weightcast.follow.mirror import Mirror
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.workers import ONE, Workers
from weightcast.store.download import fetch

_PATIENCE = 3
"""Objects in a row that a store does not answer for, until it is not asked for more."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    key: str
    problem: str

    @classmethod
    def of(cls, key: str, error: Exception) -> Finding:
        """What came of reading it."""
        return cls(key, str(error) or type(error).__name__)


def verify(chain: Chain) -> Iterator[Finding]:
    """Check every record against the others and against the listings; nothing else is read."""
    manifests, findings = _manifests(chain)
    yield from findings
    for listed in chain.store.list(MANIFESTS):
        if read_manifest_key(listed.key) and not chain.is_commit(listed.key):
            yield Finding(listed.key, "this is not named as a commit of this channel, and readers ignore it")
    sizes = {o.key: o.size for kind in (DELTAS, SQUASHES, ANCHORS) for o in chain.store.list(kind)}
    for version, manifest in manifests.items():
        yield from _check_manifest(manifest, manifests.get(version - 1), sizes)
    for edge in chain.anchor_edges():
        yield from _check_anchor(chain, edge, manifests.get(edge.result), sizes)
    yield from _check_copies(chain, sizes)
    for edge in chain.squash_edges(0):
        if not leads_to_commit(edge, manifests.get(edge.result)):
            digest = manifests[edge.result].position.digest
            yield Finding(edge.key, f"it leads to {edge.digest}, version {edge.result} is {digest[:16]}")
    if manifests:
        head = max(manifests)
        ways = [edge for edge in chain.edges(None, head) if leads_to_commit(edge, manifests.get(edge.result))]
        if head not in reachable(ways) and head not in reachable(_from_elsewhere(chain, manifests, head)):
            yield Finding(manifest_key(head), "no way leads from any anchor to the head")


def _from_elsewhere(chain: Chain, manifests: dict[int, Manifest], head: int) -> list[Edge]:
    """The ways that begin at a checkpoint which the channel only names."""
    named = chain.reference_edges()
    first = min((edge.result for edge in named), default=head)
    return [*named, *(edge for edge in chain.edges(first, head) if leads_to_commit(edge, manifests.get(edge.result)))]


def _manifests(chain: Chain) -> tuple[dict[int, Manifest], list[Finding]]:
    found: dict[int, Manifest] = {}
    findings, unanswered = [], 0
    for version in chain.versions():
        try:
            found[version] = chain.manifest(version)
            unanswered = 0
        except (FormatError, ChannelError, StoreError) as error:
            unanswered = unanswered + 1 if isinstance(error, UnreachableError) else 0
            if unanswered >= _PATIENCE:
                raise
            findings.append(Finding(manifest_key(version), error.problem))
    return found, findings


def _check_manifest(manifest: Manifest, before: Manifest | None, sizes: dict[str, int]) -> Iterator[Finding]:
    ref, version = manifest.object, manifest.position.version
    if ref.key not in sizes:
        yield Finding(manifest_key(version), f"its object {ref.key} is missing")
    elif sizes[ref.key] != ref.size:
        yield Finding(ref.key, f"it has {sizes[ref.key]} bytes, the manifest says {ref.size}")
    if manifest.base is not None and before is not None and manifest.base != before.position:
        yield Finding(
            manifest_key(version), f"it begins at {manifest.base}, version {version - 1} is {before.position}"
        )


def _check_anchor(chain: Chain, edge: Edge, manifest: Manifest | None, sizes: dict[str, int]) -> Iterator[Finding]:
    try:
        anchor = chain.anchor(edge.record, manifest)
    except UnreachableError:
        raise
    except (FormatError, StoreError) as error:
        yield Finding(edge.record, error.problem)
        return
    for ref in anchor.files:
        if sizes.get(ref.key) != ref.size:
            yield Finding(ref.key, f"it has {sizes.get(ref.key, 0)} bytes, the anchor says {ref.size}")


def _check_copies(chain: Chain, sizes: dict[str, int]) -> Iterator[Finding]:
    """The copies of the channel's record, from which a damaged one is restored."""
    record = read_record(chain.store, CHANNEL)
    for key in sizes:
        place = read_anchor_key(key)
        if place is None or place.name != CHANNEL_COPY:
            continue
        try:
            if read_record(chain.store, key) != record:
                yield Finding(key, "it is no copy of channel.json. Copy that there: it is what `repair` needs")
        except UnreachableError:
            raise
        except (FormatError, StoreError) as error:
            yield Finding(key, error.problem)


# -- notes -------------------------------------------------------------------------------------------------------------


def changed_companions(chain: Chain) -> Iterator[str]:
    """What loaders read beside the weights, and is not the same in an anchor as in the one before it.

    That may be meant: a tokenizer is mended. But no digest of a version speaks of these files, so people should know.
    """
    before: Anchor | None = None
    for edge in sorted(chain.anchor_edges(), key=lambda edge: (edge.result, edge.key)):
        try:
            anchor = chain.anchor(edge.record)
            if not leads_to_commit(edge, chain.manifest(edge.result)):
                continue  # of a writer that was outrun
        except (FormatError, ChannelError, StoreError):
            continue  # a finding, not a note
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
    """Fetch, decode and check every anchor, delta and squash in the order of versions; each with what is wrong with it.

    What cannot be read is a finding, and the rest is still checked. A checkpoint that the channel only names is fetched
    where nothing else leads to the versions behind it. ``scratch`` is a folder that does not exist yet; it will hold
    one copy of the weights.
    """
    head = chain.head()
    if head is None:
        return
    newest = head.position.version
    walk = _Walk(chain, Mirror(scratch, chain.channel.id, chain.channel.table, workers), workers)
    try:
        yield from walk.all(_ways(chain, newest), newest, report)
    finally:
        walk.mirror.close()


def _ways(chain: Chain, newest: int) -> list[Edge]:
    """All ways, also those that begin at a checkpoint which the channel only names."""
    edges, named = chain.edges(None, newest), chain.reference_edges()
    more = chain.edges(min(edge.result for edge in named), newest) if named else []
    return list({edge.key: edge for edge in (*edges, *named, *more)}.values())


class _Walk:
    """Goes from version to version with a mirror, and tries each object where it belongs."""

    def __init__(self, chain: Chain, mirror: Mirror, workers: Workers):
        self.chain = chain
        self.mirror = mirror
        self.workers = workers
        self.bad: set[str] = set()
        """Objects that are not tried again on the way to others."""
        self.unanswered = 0

    def all(self, edges: list[Edge], newest: int, report: Report) -> Iterator[tuple[str, Finding | None]]:
        arriving, leaving = _by(edges, lambda edge: edge.result), _by(edges, lambda edge: edge.base)
        committed, untried = set(self.chain.versions()), dict.fromkeys((DELTAS, SQUASHES), 0)
        for version in sorted({edge.result for edge in edges if edge.base is None} | committed):
            report("versions", version, newest)
            for edge in arriving.get(version, ()):
                if edge.kind == "delta" and self.mirror.version == edge.base:
                    yield edge.key, self._told(edge, self._go(edge))
                elif edge.kind == "delta":
                    untried[DELTAS] += edge.base in committed  # else its base was collected, and nobody goes there
            for edge in arriving.get(version, ()):
                if edge.base is None and not (edge.kind == "reference" and self.mirror.version == version):
                    yield edge.key, self._told(edge, self._go(edge, only_if_lost=True))
            if self.mirror.version != version and version in committed:
                self._leap(edges, version)
            for edge in leaving.get(version, ()):
                if edge.kind == "squash" and self.mirror.version == version:
                    yield edge.key, self._told(edge, self._try_squash(edge))
                elif edge.kind == "squash":
                    untried[SQUASHES] += version in committed and edge.result in committed
        for kind, count in untried.items():
            if count:
                what = f"{count} {kind.rstrip('/')} could not be tried, since what leads to them is not whole"
                yield kind, Finding(kind, what)

    def _told(self, edge: Edge, error: Exception | None) -> Finding | None:
        """What came of an object, as a finding; a store that answers no more ends it all."""
        if error is None:
            self.unanswered = 0
            return None
        self.bad.add(edge.key)
        self.unanswered = self.unanswered + 1 if isinstance(error, UnreachableError) else 0
        if self.unanswered >= _PATIENCE:
            raise error
        if edge.kind == "reference" and isinstance(error, StoreError):
            anchor = "the checkpoint that this anchor only names could not be had"
            hint = "Check a replica instead: `weightcast verify FOLDER URL`"
            return Finding(edge.key, f"{anchor}: {error}. {hint}")
        return Finding.of(edge.key, error)

    def _go(self, edge: Edge, only_if_lost: bool = False) -> Exception | None:
        """Check one anchor or delta, and stand at its result; what is wrong with it, if anything is."""
        try:
            goal = self.chain.manifest(edge.result)
            if not leads_to_commit(edge, goal):
                return None
            staged = stage_route(self.chain, self.mirror, (edge,), goal, self.workers)
            if not (only_if_lost and self.mirror.version == edge.result):
                self.mirror.take(staged)
            forget_downloads(self.mirror)
        except SpaceError:
            raise  # says nothing of the object
        except BadEdgeError as bad:
            return bad.error
        except (WeightcastError, OSError) as error:
            return error
        return None

    def _leap(self, edges: list[Edge], version: int) -> None:
        """Go on behind a gap, if any way leads there; what is wrong with the ways is found when their turn comes."""
        route = cheapest_route([edge for edge in edges if edge.key not in self.bad], self.mirror.version, version)
        if route:
            try:
                goal = self.chain.manifest(version)
                self.mirror.take(stage_route(self.chain, self.mirror, route, goal, self.workers))
            except BadEdgeError as bad:
                self.bad.add(bad.edge.key)
            except UnreachableError:
                self.unanswered += 1
                if self.unanswered >= _PATIENCE:
                    raise
            except (StoreError, FormatError, ChannelError):
                pass  # the same request is made in its turn, and told of
        forget_downloads(self.mirror)

    def _try_squash(self, edge: Edge) -> Exception | None:
        """Stage a squash on the weights of its base, see where it leads, and forget it."""
        ref, mirror = squash_object(edge), self.mirror
        assert mirror.weights is not None
        assert mirror.fingerprint is not None
        fetched, staged = mirror.workshop / "squash", mirror.workshop / "staged" / "squash"
        try:
            fetch(self.chain.store, ref.key, ref.size, ref.sha256, fetched, durable=False)
            with FileSource(fetched) as source:
                reached = stage(PatchReader(source), mirror.weights, mirror.fingerprint, staged, self.workers)
            expected = self.chain.manifest(edge.result).position.digest
        except SpaceError:
            raise
        except (WeightcastError, OSError) as error:
            return error
        finally:
            fetched.unlink(missing_ok=True)
            staged.unlink(missing_ok=True)
        if reached.digest == expected:
            return None
        return FormatError(f"it leads to {reached.digest[:16]}, version {edge.result} is {expected[:16]}")


def _by(edges: list[Edge], version: Callable[[Edge], int | None]) -> dict[int | None, list[Edge]]:
    found: dict[int | None, list[Edge]] = {}
    for edge in edges:
        found.setdefault(version(edge), []).append(edge)
    return found
