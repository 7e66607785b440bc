"""Is the channel whole? By listings and records alone, or by replaying every object in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightcast.chain import Chain
from weightcast.container import FileSource
from weightcast.errors import ChannelError, FormatError, MissingError, StoreError, UnreachableError, WeightcastError
from weightcast.fetch import BadEdgeError, forget_downloads, stage_route
from weightcast.files import Report, silent
from weightcast.keys import ANCHORS, DELTAS, RECORD, SQUASHES, manifest_key, read_squash_key
from weightcast.manifest import Manifest, ObjectRef
from weightcast.mirror import Mirror
from weightcast.plan import Edge, cheapest_route, reachable
from weightcast.stage import stage
from weightcast.transfer import fetch
from weightcast.wire import PatchReader
from weightcast.workers import ONE, Workers


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    key: str
    problem: str


def verify(chain: Chain) -> Iterator[Finding]:
    """Check every record against the others and against the listings; nothing else is read."""
    manifests, findings = _manifests(chain)
    yield from findings
    sizes = {o.key: o.size for kind in (DELTAS, SQUASHES, ANCHORS) for o in chain.store.list(kind)}
    for version, manifest in manifests.items():
        yield from _check_manifest(manifest, manifests.get(version - 1), sizes)
    for edge in chain.anchor_edges():
        yield from _check_anchor(chain, edge, manifests.get(edge.result), sizes)
    for edge in chain.squash_edges(0):
        digest = manifests[edge.result].position.digest if edge.result in manifests else edge.digest
        if not digest.startswith(edge.digest):
            yield Finding(edge.key, f"it leads to {edge.digest}, version {edge.result} is {digest[:16]}")
    if manifests:
        head = max(manifests)
        ways = [edge for edge in chain.edges(None, head) if _is_way(edge, manifests)]
        if head not in reachable(ways) and head not in reachable(_from_elsewhere(chain, manifests, head)):
            yield Finding(manifest_key(head), "no way leads from any anchor to the head")


def _from_elsewhere(chain: Chain, manifests: dict[int, Manifest], head: int) -> list[Edge]:
    """The ways that begin at a checkpoint which the channel only names."""
    named = chain.reference_edges()
    first = min((edge.result for edge in named), default=head)
    return [*named, *(edge for edge in chain.edges(first, head) if _is_way(edge, manifests))]


def _is_way(edge: Edge, manifests: dict[int, Manifest]) -> bool:
    """Whether readers would go there: writers that were outrun leave deltas and anchors of other weights behind."""
    manifest = manifests.get(edge.result)
    if edge.key.startswith(DELTAS):
        return manifest is not None and manifest.object.key == edge.key
    return manifest is None or manifest.position.digest.startswith(edge.digest)


def _manifests(chain: Chain) -> tuple[dict[int, Manifest], list[Finding]]:
    found: dict[int, Manifest] = {}
    findings = []
    for version in chain.versions():
        try:
            found[version] = chain.manifest(version)
        except UnreachableError:
            raise
        except (FormatError, ChannelError, StoreError) as error:
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
        anchor = chain.anchor(edge.key + RECORD, manifest)
    except FormatError as error:
        yield Finding(edge.key + RECORD, error.problem)
        return
    for ref in anchor.files:
        if sizes.get(ref.key) != ref.size:
            yield Finding(ref.key, f"it has {sizes.get(ref.key, 0)} bytes, the anchor says {ref.size}")


def verify_deep(
    chain: Chain, scratch: Path, workers: Workers = ONE, report: Report = silent
) -> Iterator[tuple[str, Finding | None]]:
    """Fetch, decode and prove every anchor, delta and squash in the order of versions; each with what is wrong with it.

    ``scratch`` is a folder that does not exist yet; it will hold one copy of the weights.
    """
    head = chain.head()
    if head is None:
        return
    newest = head.position.version
    edges = chain.edges(None, newest)
    if not any(edge.base is None for edge in edges) and chain.references():
        hint = "Prove a replica instead: `weightcast verify FOLDER URL`."
        raise ChannelError("the channel begins at a checkpoint that is not in it", file=chain.store.url, hint=hint)
    arriving, leaving = _by(edges, lambda edge: edge.result), _by(edges, lambda edge: edge.base)
    committed, untried = set(chain.versions()), 0
    walker = Mirror(scratch, chain.channel.id, chain.channel.table, workers)
    try:
        for version in sorted({edge.result for edge in edges if edge.base is None} | committed):
            report("versions", version, newest)
            for edge in arriving.get(version, ()):
                if edge.key.startswith(DELTAS) and walker.version == edge.base:
                    yield edge.key, _walk(chain, walker, edge, workers)
                elif edge.key.startswith(DELTAS):
                    untried += edge.base in committed  # else what it begins from was collected, and nobody goes there
            for edge in arriving.get(version, ()):
                if edge.base is None:
                    yield edge.key, _walk(chain, walker, edge, workers, only_if_lost=True)
            if walker.version != version and version in committed:
                _leap(chain, walker, edges, version, workers)
            for edge in leaving.get(version, ()):
                if edge.key.startswith(SQUASHES) and walker.version == version:
                    yield edge.key, _try_squash(chain, walker, edge, workers)
        if untried:
            yield DELTAS, Finding(DELTAS, f"{untried} deltas could not be tried, since what leads to them is not whole")
    finally:
        walker.close()


def _leap(chain: Chain, walker: Mirror, edges: list[Edge], version: int, workers: Workers) -> None:
    """Go on behind a gap, if any way leads there; what is wrong with the ways is found when their turn comes."""
    route = cheapest_route(edges, walker.version, version)
    if route:
        with suppress(BadEdgeError, MissingError, FormatError):
            walker.take(stage_route(chain, walker, route, chain.manifest(version), workers))
    forget_downloads(walker)


def _by(edges: list[Edge], version: Callable[[Edge], int | None]) -> dict[int | None, list[Edge]]:
    found: dict[int | None, list[Edge]] = {}
    for edge in edges:
        found.setdefault(version(edge), []).append(edge)
    return found


def _walk(chain: Chain, walker: Mirror, edge: Edge, workers: Workers, only_if_lost: bool = False) -> Finding | None:
    """Prove one anchor or delta, and stand at its result."""
    try:
        goal = chain.manifest(edge.result)
        if not _is_way(edge, {edge.result: goal}):
            return None
        staged = stage_route(chain, walker, (edge,), goal, workers)
        if not (only_if_lost and walker.version == edge.result):
            walker.take(staged)
        forget_downloads(walker)
    except BadEdgeError as bad:
        return Finding(edge.key, str(bad.error))
    except UnreachableError:
        raise
    except WeightcastError as error:
        return Finding(edge.key, str(error))
    return None


def _try_squash(chain: Chain, walker: Mirror, edge: Edge, workers: Workers) -> Finding | None:
    """Stage a squash on the weights of its base, see where it leads, and forget it."""
    squash = read_squash_key(edge.key)
    assert squash is not None
    assert walker.weights is not None
    assert walker.standing is not None
    ref = ObjectRef(edge.key, edge.nbytes, squash[3])
    fetched, staged = walker.workshop / "squash", walker.workshop / "staged" / "squash"
    try:
        fetch(chain.store, ref.key, ref.size, ref.sha256, fetched, durable=False)
        with FileSource(fetched) as source:
            reached = stage(PatchReader(source), walker.weights, walker.standing, staged, workers)
        expected = chain.manifest(edge.result).position.digest
    except UnreachableError:
        raise
    except WeightcastError as error:
        return Finding(edge.key, str(error))
    finally:
        fetched.unlink(missing_ok=True)
        staged.unlink(missing_ok=True)
    wrong = f"it leads to {reached.position[:16]}, version {edge.result} is {expected[:16]}"
    return None if reached.position == expected else Finding(edge.key, wrong)
