"""Staging a route: objects fetched ahead, each decoded and proven on top of the one before; nothing else is touched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from weightcast.bits import Weights
from weightcast.chain import Chain
from weightcast.checkpoint import Checkpoint
from weightcast.container import FileSource
from weightcast.detect import refuse_other_table
from weightcast.digest import Fingerprint
from weightcast.errors import (
    BaseError,
    ChannelError,
    CheckpointError,
    FormatError,
    MismatchError,
    MissingError,
    ResultError,
    UsageError,
    WeightcastError,
)
from weightcast.files import Report, require_space, silent
from weightcast.holder import Holder, Staged, StagedPatch, position_of
from weightcast.keys import RECORD, Position, read_squash_key
from weightcast.manifest import Manifest, ObjectRef
from weightcast.plan import Edge, Route, route_bytes
from weightcast.stage import Overlay, stage, standing_of
from weightcast.transfer import fetch, sha256_of
from weightcast.wire import PatchReader
from weightcast.workers import ONE, Workers

_AHEAD = 2
"""Objects that are fetched while another is decoded."""


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
    """Where a manifest says it leads; None for a squash, which has none."""
    base: str | None


def stage_route(
    chain: Chain, holder: Holder, route: Route, goal: Manifest, workers: Workers = ONE, report: Report = silent
) -> Staged:
    """Bring all that leads to ``goal`` into the holder's workshop, proven; `BadEdgeError` names what is no good."""
    require_space(holder.workshop, route_bytes(route))
    staging = holder.workshop / "staged"
    staging.mkdir(exist_ok=True)
    with ExitStack() as opened:
        state, standing = holder.weights, holder.standing
        anchor: Position | None = None
        anchor_digests: tuple[int, ...] | None = None
        folder: Path | None = None
        layers: list[PatchReader] = []
        patches: list[StagedPatch] = []
        for arrived in _arrivals(chain, holder.workshop / "incoming", route, goal, report):
            edge = arrived.edge
            try:
                if edge.base is None:
                    folder, layers, patches = arrived.path, [], []
                    state = opened.enter_context(Checkpoint(folder, aliases=dict(chain.channel.table.aliases)))
                    refuse_other_table(chain.channel.table, state.table)
                    standing = standing_of(state, workers, report)
                    anchor_digests = standing.digests
                else:
                    if state is None or standing is None:
                        raise ChannelError("a patch was planned with nothing to apply it to")
                    out = staging / f"{edge.base:012d}-{edge.result:012d}.safetensors"
                    under = Overlay(state, layers, fresh=isinstance(state, Checkpoint))
                    standing = _stage_one(arrived, under, standing, out, workers, report)
                    layers.append(PatchReader(opened.enter_context(FileSource(out))))
                    patches.append(StagedPatch(Position(edge.result, standing.position), out))
                    arrived.path.unlink()
                _refuse_other_result(arrived, standing, goal)
            except (FormatError, MismatchError, UsageError, ChannelError, CheckpointError) as error:
                raise BadEdgeError(edge, error) from error
            if edge.base is None:
                anchor = Position(edge.result, standing.position)
        assert standing is not None
        start, nbytes = position_of(holder), route_bytes(route)
        return Staged(start, goal.position, standing, anchor, anchor_digests, folder, tuple(patches), nbytes)


def _stage_one(
    arrived: _Arrived, under: Weights, standing: Fingerprint, out: Path, workers: Workers, report: Report
) -> Fingerprint:
    with FileSource(arrived.path) as source:
        reader = PatchReader(source)
        if arrived.position is not None and arrived.position.digest != reader.header.result:
            raise FormatError("the patch leads elsewhere than its manifest says", file=arrived.edge.key)
        if arrived.base is not None and arrived.base != standing.position:
            problem = f"the manifest of version {arrived.edge.result} begins at {arrived.base[:12]}"
            raise BaseError(problem, expected=arrived.base, found=standing.position)
        return stage(reader, under, standing, out, workers, report)


def _refuse_other_result(arrived: _Arrived, standing: Fingerprint, goal: Manifest) -> None:
    """What was reached must be what the manifest of that version says, where one is at hand."""
    edge = arrived.edge
    expected = arrived.position.digest if arrived.position else None
    if edge.result == goal.position.version:
        expected = goal.position.digest
    if (expected is not None and standing.position != expected) or not standing.position.startswith(edge.digest):
        problem = f"version {edge.result} comes out as {standing.position[:12]}"
        raise ResultError(problem, expected=expected or edge.digest, found=standing.position)


# -- fetch -----------------------------------------------------------------------------------------------------------


def _arrivals(chain: Chain, incoming: Path, route: Route, goal: Manifest, report: Report) -> Iterator[_Arrived]:
    """The route's objects in order, a few of them fetched ahead."""
    incoming.mkdir(exist_ok=True)
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
    try:
        if edge.base is None:
            return _fetch_anchor(chain, incoming, edge, progress)
        squash = read_squash_key(edge.key)
        if squash is not None:
            ref = ObjectRef(edge.key, edge.nbytes, squash[3])
            return _Arrived(edge, _fetch_object(chain, ref, incoming / ref.sha256, progress, durable=False), None, None)
        manifest = goal if edge.result == goal.position.version else chain.manifest(edge.result)
        if manifest.object.key != edge.key or manifest.base is None:
            raise FormatError("another object than this was committed", file=edge.key)
        path = _fetch_object(chain, manifest.object, incoming / manifest.object.sha256, progress, durable=False)
        return _Arrived(edge, path, manifest.position, manifest.base.digest)
    except (FormatError, MissingError, ChannelError) as error:
        raise BadEdgeError(edge, error) from error


def _fetch_anchor(chain: Chain, incoming: Path, edge: Edge, progress: _Progress) -> _Arrived:
    anchor = chain.anchor(edge.key + RECORD)
    folder = incoming / edge.key.rstrip("/").rpartition("/")[2]
    folder.mkdir(exist_ok=True)
    names = {ref.key.rpartition("/")[2]: ref for ref in anchor.files}
    require_space(incoming, sum(ref.size for ref in anchor.files) - _stored(folder))
    for name, ref in names.items():
        _fetch_object(chain, ref, folder / name, progress, durable=True)
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return _Arrived(edge, folder, anchor.position, None)


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _fetch_object(chain: Chain, ref: ObjectRef, path: Path, progress: _Progress, *, durable: bool) -> Path:
    """The object's bytes under ``path``; what an earlier attempt brought there whole is not fetched again."""
    report = progress.of(ref.key)
    if path.is_file() and path.stat().st_size == ref.size and sha256_of(path) == ref.sha256:
        report("fetch", ref.size, ref.size)
    else:
        path.unlink(missing_ok=True)
        fetch(chain.store, ref.key, ref.size, ref.sha256, path, durable=durable, report=report)
    return path


def forget_downloads(holder: Holder) -> None:
    """Remove what is left of earlier downloads."""
    shutil.rmtree(holder.workshop / "incoming", ignore_errors=True)
