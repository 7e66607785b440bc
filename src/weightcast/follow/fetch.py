"""Staging a route: objects fetched ahead, each decoded and proven on top of the one before; nothing else is touched."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge, leads_to_commit, squash_object
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest, ObjectRef, Reference
from weightcast.channel.reference import bring
from weightcast.channel.route import Route, route_bytes
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.companions import WEIGHTS, remove_code_references
from weightcast.disk.durable import Report, discard, require_space, silent
from weightcast.disk.staged import Overlay, stage
from weightcast.errors import (
    AccessError,
    BaseError,
    ChannelError,
    CheckpointError,
    FormatError,
    MismatchError,
    MissingError,
    ResultError,
    SpaceError,
    StoreError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.replica import Replica, Staged, StagedPatch, position_of
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint, tensor_digests
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers
from weightcast.store.download import fetch, sha256_of

_AHEAD = 2
"""Objects that are fetched while another is decoded."""


_BAD_NAMES = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EISDIR, errno.ENOTDIR}
"""What the system says of a file name that it cannot have: the channel's fault, not the disk's."""


class BadEdgeError(Exception):
    """A way that leads nowhere: its object is missing, damaged, or not what it should be."""

    def __init__(self, edge: Edge, error: WeightcastError):
        super().__init__(str(error))
        self.edge = edge
        self.error = error


@dataclass(frozen=True)
class _Arrived:
    edge: Edge
    path: Path
    position: Position | None
    """Where it leads as far as is known: by the manifest of that version, which may be gone, or an anchor's record."""
    base: str | None
    digests: Mapping[str, int] = field(default_factory=dict)
    """Of an anchor's tensors, by name."""


def stage_route(
    chain: Chain, holder: Replica, route: Route, goal: Manifest, workers: Workers = ONE, report: Report = silent
) -> Staged:
    """Bring all that leads to ``goal`` into the holder's workshop, proven; `BadEdgeError` names what is no good."""
    staging, incoming = holder.workshop / "staged", holder.workshop / "incoming"
    _clear(staging, set())
    _clear(incoming, {_name_of(edge) for edge in route})
    require_space(holder.workshop, route_bytes(route))
    with ExitStack() as opened:
        state, fingerprint = holder.weights, holder.fingerprint
        anchor: Position | None = None
        anchor_digests: tuple[int, ...] | None = None
        folder: Path | None = None
        layers: list[PatchReader] = []
        patches: list[StagedPatch] = []
        arrivals = opened.enter_context(closing(_arrivals(chain, incoming, route, goal, report)))
        for arrived in arrivals:
            edge = arrived.edge
            try:
                if edge.base is None:
                    folder, layers, patches = arrived.path, [], []
                    state = opened.enter_context(Checkpoint(folder, aliases=dict(chain.channel.table.aliases)))
                    refuse_other_table(chain.channel.table, state.table)
                    _refuse_other_weights(folder, state)
                    anchor_digests = _in_order(arrived, state)
                    fingerprint = Fingerprint(state.table, anchor_digests)
                else:
                    if state is None or fingerprint is None:
                        raise ChannelError("a patch was planned with nothing to apply it to")
                    out = staging / f"{edge.base:012d}-{edge.result:012d}.safetensors"
                    under = Overlay(state, layers, fresh=isinstance(state, Checkpoint))
                    fingerprint = _stage_one(arrived, under, fingerprint, out, workers, report)
                    layers.append(PatchReader(opened.enter_context(FileSource(out))))
                    patches.append(StagedPatch(Position(edge.result, fingerprint.digest), out))
                    arrived.path.unlink()
                _refuse_other_result(arrived, fingerprint)
            except (FormatError, MismatchError, UsageError, ChannelError, CheckpointError) as error:
                raise BadEdgeError(edge, error) from error
            if edge.base is None:
                anchor = Position(edge.result, fingerprint.digest)
        assert fingerprint is not None
        start, nbytes = position_of(holder), route_bytes(route)
        return Staged(start, goal.position, fingerprint, anchor, anchor_digests, folder, tuple(patches), nbytes)


def _refuse_other_weights(folder: Path, state: Checkpoint) -> None:
    """`FormatError` for safetensors files that are not of the checkpoint: a tool might load them instead."""
    for path in sorted(set(folder.glob(f"*{WEIGHTS}")) - set(state.files)):
        raise FormatError("the anchor holds weights that are not of its checkpoint", file=path.name)


def _in_order(arrived: _Arrived, state: Checkpoint) -> tuple[int, ...]:
    """The digests of an anchor's tensors. Those of all its files are known, but an index may speak of others."""
    try:
        return tuple(arrived.digests[spec.name] for spec in state.table)
    except KeyError as name:
        raise FormatError("a tensor is in no safetensors file", file=arrived.edge.key, tensor=str(name)) from None


def _clear(folder: Path, names: set[str]) -> None:
    """Remove what earlier attempts left there, but for what ``names`` may go on from."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name.removesuffix(".partial") not in names:
            discard(path)


def _name_of(edge: Edge) -> str:
    """Of its file or folder while it is worked on: two versions may have equal objects, but no two edges equal keys."""
    return edge.key.rstrip("/").rpartition("/")[2]


def _stage_one(
    arrived: _Arrived, under: Weights, fingerprint: Fingerprint, out: Path, workers: Workers, report: Report
) -> Fingerprint:
    with FileSource(arrived.path) as source:
        reader = PatchReader(source)
        if arrived.position is not None and arrived.position.digest != reader.header.result:
            raise FormatError("the patch leads elsewhere than its manifest says", file=arrived.edge.key)
        if arrived.base is not None and arrived.base != fingerprint.digest:
            problem = f"the manifest of version {arrived.edge.result} begins at {arrived.base[:12]}"
            raise BaseError(problem, expected=arrived.base, found=fingerprint.digest)
        return stage(reader, under, fingerprint, out, workers, report)


def _refuse_other_result(arrived: _Arrived, fingerprint: Fingerprint) -> None:
    """What was reached must be what the manifest of that version says, where one is at hand."""
    edge = arrived.edge
    expected = arrived.position.digest if arrived.position else None
    if (expected is not None and fingerprint.digest != expected) or not fingerprint.digest.startswith(edge.digest):
        problem = f"version {edge.result} comes out as {fingerprint.digest[:12]}"
        raise ResultError(problem, expected=expected or edge.digest, found=fingerprint.digest)


# -- fetch -----------------------------------------------------------------------------------------------------------


def _arrivals(
    chain: Chain, incoming: Path, route: Route, goal: Manifest, report: Report
) -> Generator[_Arrived, None, None]:
    """The route's objects in order, a few of them fetched ahead."""
    progress = _Progress(report, route_bytes(route))
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="weightcast-fetch") as pool:
        waiting: list[Future[_Arrived]] = []
        ahead = iter(route)
        try:
            for edge in ahead:
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
    """Ends a download that nobody waits for."""


class _Progress:
    """Adds up the bytes of several downloads for one bar."""

    def __init__(self, report: Report, total: int):
        self._report, self._total = report, total
        self._done: dict[str, int] = {}
        self.stopped = False
        """Set when nobody waits any more: downloads under way end at their next part, and can be resumed."""

    def of(self, key: str) -> Report:
        def one(stage: str, done: int, total: int) -> None:
            if self.stopped:
                raise _StoppedError
            self._done[key] = done
            self._report("fetch", min(sum(self._done.values()), self._total), self._total)

        return one


def _fetch_edge(chain: Chain, incoming: Path, edge: Edge, goal: Manifest, progress: _Progress) -> _Arrived:
    path = incoming / _name_of(edge)
    try:
        manifest = _manifest_of(chain, edge, goal)
        if edge.base is None:
            return _fetch_anchor(chain, path, edge, manifest, progress)
        ref, base = (squash_object(edge), None) if edge.kind == "squash" else _delta_of(manifest, edge)
        _fetch_object(chain, ref, path, progress, durable=False)
        return _Arrived(edge, path, manifest.position if manifest else None, base)
    except (FormatError, MissingError, AccessError, ChannelError, CheckpointError, UsageError) as error:
        raise BadEdgeError(edge, error) from error
    except OSError as error:
        if error.errno not in _BAD_NAMES:
            raise
        problem = f"a file of that name cannot be stored here: {error.strerror}"
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
        return None  # saves a request for each squash of a route: keys and digests verify it as well
    if not leads_to_commit(edge, manifest):
        raise FormatError(f"this is not what was committed as version {edge.result}", file=edge.key)
    return manifest


def _delta_of(manifest: Manifest | None, edge: Edge) -> tuple[ObjectRef, str]:
    """The object of a delta and the digest that it begins from, by its manifest."""
    assert manifest is not None, "the manifest of a delta is always read"
    assert manifest.base is not None, "a manifest that names a delta has a base"
    if manifest.object.size != edge.nbytes:
        raise FormatError(f"the manifest says {manifest.object.size} bytes, not {edge.nbytes}", file=edge.key)
    return manifest.object, manifest.base.digest


def _fetch_anchor(chain: Chain, folder: Path, edge: Edge, manifest: Manifest | None, progress: _Progress) -> _Arrived:
    anchor = chain.anchor(edge.record, manifest)
    if manifest is not None and manifest.position != anchor.position:
        raise FormatError(f"this is not what was committed as version {edge.result}", file=edge.key)
    folder.mkdir(exist_ok=True)
    if anchor.reference is not None:
        return _fetch_reference(chain, edge, folder, anchor.position, anchor.reference, progress)
    names = {ref.key.rpartition("/")[2]: ref for ref in anchor.files}
    try:
        require_space(folder, anchor.nbytes - _stored(folder))
    except SpaceError:
        if anchor.nbytes <= edge.nbytes:
            raise
        problem = f"the record says {anchor.nbytes} bytes, {edge.nbytes} are there"
        raise FormatError(problem, file=edge.key) from None

    def one(name: str) -> dict[str, int]:
        """A file's tensors are digested while other files are on their way."""
        _fetch_object(chain, names[name], folder / name, progress, durable=True)
        if not name.endswith(".safetensors"):
            return {}
        with Checkpoint(folder / name) as file:
            return dict(zip((spec.name for spec in file.table), tensor_digests(file), strict=True))

    digests: dict[str, int] = {}
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="weightcast-file") as pool:
        for found in pool.map(one, sorted(names, key=lambda name: -names[name].size)):
            if digests.keys() & found.keys():
                raise FormatError(
                    "two files of the anchor hold the same tensor", tensor=min(digests.keys() & found.keys())
                )
            digests |= found
    for path in folder.iterdir():
        if path.name not in names:
            discard(path)
    remove_code_references(folder)
    return _Arrived(edge, folder, anchor.position, None, digests)


def _fetch_reference(
    chain: Chain, edge: Edge, folder: Path, position: Position, reference: Reference, progress: _Progress
) -> _Arrived:
    """A checkpoint that the channel only names, proven like any other."""
    try:
        bring(reference, folder, progress.of(edge.key), expected_bytes=chain.channel.table.nbytes)
    except StoreError as error:
        discard(folder)  # what can be gone on with is in the Hub's cache
        raise BadEdgeError(edge, error) from error
    with Checkpoint(folder) as files:
        digests = dict(zip((spec.name for spec in files.table), tensor_digests(files), strict=True))
    return _Arrived(edge, folder, position, None, digests)


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _fetch_object(chain: Chain, ref: ObjectRef, path: Path, progress: _Progress, *, durable: bool) -> None:
    """The object's bytes under ``path``; what an earlier attempt brought there whole is not fetched again."""
    report = progress.of(ref.key)
    if path.is_file() and path.stat().st_size == ref.size and sha256_of(path) == ref.sha256:
        report("fetch", ref.size, ref.size)
    else:
        path.unlink(missing_ok=True)
        fetch(chain.store, ref.key, ref.size, ref.sha256, path, durable=durable, report=report)


def forget_downloads(holder: Replica) -> None:
    """Remove what is left of earlier downloads."""
    shutil.rmtree(holder.workshop / "incoming", ignore_errors=True)
