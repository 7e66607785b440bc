"""Fetching the objects of a route, a few ahead of the one that is decoded; interrupted downloads are resumed."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge, leads_to_commit, squash_object
from weightcast.channel.keys import Position
from weightcast.channel.nearest import Nearest
from weightcast.channel.records import Anchor, Manifest, ObjectRef, Reference
from weightcast.channel.reference import bring
from weightcast.channel.route import Route, route_bytes
from weightcast.disk.assemble import assemble
from weightcast.disk.checkpoint import SINGLE, Checkpoint
from weightcast.disk.companions import WEIGHTS, remove_code_references
from weightcast.disk.durable import Report, discard, disk_errors, require_space
from weightcast.errors import (
    AccessError,
    ChannelError,
    CheckpointError,
    FormatError,
    MismatchError,
    MissingError,
    SpaceError,
    StoreError,
    TrustError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.replica import Replica
from weightcast.format.digest import tensor_digests
from weightcast.store.base import Store
from weightcast.store.download import fetch, sha256_of

_AHEAD = 2
"""Objects that are fetched while another is decoded."""

BAD_OBJECT = (
    AccessError,
    ChannelError,
    CheckpointError,
    FormatError,
    MismatchError,
    MissingError,
    TrustError,
    UsageError,
)
"""Errors that mean that an object cannot be used; others are of the store or of the disk."""

_AT_ONCE = 8
"""Objects of one patch that are fetched at the same time."""

_BAD_NAMES = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EISDIR, errno.ENOTDIR}
"""Errors for a file name that the system does not allow: the fault of the channel, not of the disk."""


class BadEdgeError(Exception):
    """An edge that cannot be used: its object is missing, damaged, or not what was committed."""

    def __init__(self, edge: Edge, error: WeightcastError):
        super().__init__(str(error))
        self.edge = edge
        self.error = error


@dataclass(frozen=True)
class Arrived:
    """An edge whose objects were fetched."""

    edge: Edge
    path: Path
    """The file of a patch; the folder of an anchor, or of a patch of several files."""
    position: Position | None
    """The version it leads to, by an anchor's record or by a manifest; None if the manifest was not needed."""
    base: str | None
    """The digest that a delta begins at, by its manifest."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """Of an anchor's tensors, by name."""


def name_of(edge: Edge) -> str:
    """The name of an edge's local file or folder: two versions may have equal objects, but keys are unique."""
    return edge.key.rstrip("/").rpartition("/")[2]


def arrivals(
    chain: Chain, incoming: Path, route: Route, goal: Manifest, report: Report
) -> Generator[Arrived, None, None]:
    """The route's edges in order, a few of them fetched ahead."""
    progress = _Progress(report, route_bytes(route))
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="weightcast-fetch") as pool:
        waiting: list[Future[Arrived]] = []
        try:
            for edge in route:
                waiting.append(pool.submit(_fetch_edge, chain, incoming, edge, goal, progress))
                if len(waiting) > _AHEAD:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            progress.stopped = True
            for future in waiting:
                future.cancel()


class _StoppedError(Exception):
    """Ends a download that is no longer needed."""


class _Progress:
    """Adds up the bytes of several downloads for one progress bar."""

    def __init__(self, report: Report, total: int):
        self._report, self._total = report, total
        self._done: dict[str, int] = {}
        self.stopped = False
        """Ends the running downloads at their next part; they can be resumed."""

    def of(self, key: str) -> Report:
        def one(stage: str, done: int, total: int) -> None:
            if self.stopped:
                raise _StoppedError
            self._done[key] = done
            self._report("fetch", min(sum(self._done.values()), self._total), self._total)

        return one


def _fetch_edge(chain: Chain, incoming: Path, edge: Edge, goal: Manifest, progress: _Progress) -> Arrived:
    path = incoming / name_of(edge)
    try:
        if chain.guard is not None and edge.kind == "squash":
            chain.guard.check_squash(edge)
        manifest = _manifest_of(chain, edge, goal)
        if edge.base is None:
            return _fetch_anchor(chain, path, edge, manifest, progress)
        refs, base = ((squash_object(edge),), None) if edge.kind == "squash" else _delta_of(manifest, edge)
        _fetch_patch(chain, refs, path, edge, progress)
        return Arrived(edge, path, manifest.position if manifest else None, base)
    except BAD_OBJECT as error:
        raise BadEdgeError(edge, error) from error
    except OSError as error:
        if error.errno not in _BAD_NAMES:
            raise
        problem = f"the system cannot store a file of this name: {error.strerror}"
        raise BadEdgeError(edge, FormatError(problem, file=edge.key)) from error


def _manifest_of(chain: Chain, edge: Edge, goal: Manifest) -> Manifest | None:
    """The commit of the version that an edge leads to; None where the edge can be used without it."""
    if edge.result == goal.position.version:
        manifest = goal
    elif edge.kind == "delta":
        manifest = chain.manifest(edge.result)
    elif edge.base is None:
        try:
            manifest = chain.manifest(edge.result)
        except (MissingError, FormatError):
            return None
    else:
        return None  # saves a request: `staging` compares what the squash led to with the digest in its key
    if not leads_to_commit(edge, manifest):
        raise FormatError(f"this is not what was committed as version {edge.result}", file=edge.key)
    return manifest


def _fetch_patch(chain: Chain, refs: Sequence[ObjectRef], path: Path, edge: Edge, progress: _Progress) -> None:
    """Fetch the objects of a patch: the only one to ``path``, several into that folder, a few at a time."""
    if not edge.key.endswith("/"):
        _fetch_object(chain, refs[0], path, progress, durable=False)
        return
    path.mkdir(exist_ok=True)
    names = {ref.key.rpartition("/")[2]: ref for ref in refs}
    for other in path.iterdir():
        if other.name.removesuffix(".partial") not in names:
            discard(other)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weightcast-object") as pool:
        for _ in pool.map(lambda name: _fetch_object(chain, names[name], path / name, progress, durable=False), names):
            pass


def _delta_of(manifest: Manifest | None, edge: Edge) -> tuple[tuple[ObjectRef, ...], str]:
    """The objects of a delta and the digest that it begins at, by its manifest."""
    assert manifest is not None, "the manifest of a delta is always read"
    assert manifest.base is not None, "a manifest that names a delta has a base"
    # A folder may hold more: what a writer that was interrupted has left.
    if manifest.nbytes > edge.nbytes or (manifest.nbytes < edge.nbytes and not edge.key.endswith("/")):
        raise FormatError(f"the manifest says {manifest.nbytes} bytes, not {edge.nbytes}", file=edge.key)
    return manifest.objects, manifest.base.digest


def _fetch_anchor(chain: Chain, folder: Path, edge: Edge, manifest: Manifest | None, progress: _Progress) -> Arrived:
    anchor = chain.anchor(edge.record, manifest)
    if manifest is not None and manifest.position != anchor.position:
        raise FormatError(f"this is not what was committed as version {edge.result}", file=edge.key)
    folder.mkdir(exist_ok=True)
    if anchor.reference is not None:
        if chain.guard is not None and not anchor.pins:
            problem = "no signature covers the files of a checkpoint outside the bucket"
            hint = "Pull from an anchor: the owner of a cutter's key runs `weightcast squash URL --anchor`."
            raise TrustError(problem, reason="not covered", file=edge.key, hint=hint)
        return _fetch_reference(chain, edge, folder, anchor, anchor.reference, progress)
    names = {ref.key.rpartition("/")[2]: ref for ref in anchor.files}
    try:
        require_space(folder, anchor.nbytes - sum(path.stat().st_size for path in folder.iterdir()))
    except SpaceError:
        if anchor.nbytes <= edge.nbytes:
            raise
        problem = f"the record says {anchor.nbytes} bytes, the bucket has {edge.nbytes}"
        raise FormatError(problem, file=edge.key) from None

    def one(name: str) -> dict[str, int]:
        """Fetch a file and digest its tensors, while other files are fetched."""
        _fetch_object(chain, names[name], folder / name, progress, durable=True)
        return _digests(folder / name) if name.endswith(WEIGHTS) and not anchor.boxes else {}

    digests: dict[str, int] = {}
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="weightcast-file") as pool:
        for found in pool.map(one, sorted(names, key=lambda name: -names[name].size)):
            if twice := digests.keys() & found.keys():
                raise FormatError("two files of the anchor hold the same tensor", tensor=min(twice))
            digests |= found
    for path in folder.iterdir():
        if path.name not in names:
            discard(path)
    if anchor.boxes:
        with disk_errors(folder):
            assemble([folder / name for name in names if name.endswith(WEIGHTS)], chain.channel.table, folder)
        digests = _digests(folder / SINGLE)
    remove_code_references(folder)  # of the assembled folder: what may stay depends on the weights' file
    return Arrived(edge, folder, anchor.position, None, digests)


def _fetch_reference(
    chain: Chain, edge: Edge, folder: Path, anchor: Anchor, reference: Reference, progress: _Progress
) -> Arrived:
    """Fetch a checkpoint from outside the bucket; it is verified as any other is."""
    try:
        nbytes = chain.channel.table.nbytes
        bring(reference, folder, progress.of(edge.key), expected_bytes=nbytes, pins=anchor.pins)
    except StoreError as error:
        discard(folder)  # the Hub's own cache can resume
        raise BadEdgeError(edge, error) from error
    return Arrived(edge, folder, anchor.position, None, _digests(folder))


def _digests(path: Path) -> dict[str, int]:
    with Checkpoint(path) as files:
        return dict(zip((spec.name for spec in files.table), tensor_digests(files), strict=True))


def _fetch_object(chain: Chain, ref: ObjectRef, path: Path, progress: _Progress, *, durable: bool) -> None:
    """Fetch an object to ``path``, unless an earlier attempt did."""
    report = progress.of(ref.key)
    if path.is_file() and path.stat().st_size == ref.size and sha256_of(path) == ref.sha256:
        report("fetch", ref.size, ref.size)
    else:
        path.unlink(missing_ok=True)
        _download(chain.store, ref, path, durable=durable, report=report)


def _download(store: Store, ref: ObjectRef, path: Path, *, durable: bool, report: Report) -> None:
    """Fetch an object; where one bucket has it damaged, from each other one that there is."""
    try:
        fetch(store, ref.key, ref.size, ref.sha256, path, durable=durable, report=report)
        return
    except FormatError as error:
        damaged = error
    for source in store.sources if isinstance(store, Nearest) else ():
        with suppress(FormatError, StoreError):  # what is wrong with the first one is raised
            fetch(source, ref.key, ref.size, ref.sha256, path, durable=durable, report=report)
            return
    raise damaged


def forget_downloads(replica: Replica) -> None:
    """Delete what is left of downloads."""
    shutil.rmtree(replica.workshop / "incoming", ignore_errors=True)
