"""Staging a route: each object is decoded and verified on top of the one before; the weights are not changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route, route_bytes
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.companions import WEIGHTS
from weightcast.disk.durable import Enter, Report, discard, require_space, silent, untimed
from weightcast.disk.staged import Overlay, stage
from weightcast.errors import BaseError, ChannelError, FormatError, ResultError
from weightcast.follow.fetch import BAD_OBJECT, Arrived, BadEdgeError, arrivals, name_of
from weightcast.follow.replica import Replica, Staged, StagedAnchor, StagedPatch, opened_patches, position_of
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint
from weightcast.format.joined import joined, open_objects
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource, ReopenedSource
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers


def stage_route(
    chain: Chain,
    replica: Replica,
    route: Route,
    goal: Manifest,
    workers: Workers = ONE,
    report: Report = silent,
    enter: Enter = untimed,
) -> Staged:
    """Stage the route to ``goal`` in the replica's workshop, verified; `BadEdgeError` names an edge that is bad."""
    staging, incoming = replica.workshop / "staged", replica.workshop / "incoming"
    _clear(staging, set())
    _clear(incoming, {name_of(edge) for edge in route})
    if replica.beside is not None:
        _borrow(replica.beside, incoming, route)
    downloaded = sum(path.stat().st_size for path in incoming.rglob("*") if path.is_file())
    require_space(replica.workshop, route_bytes(route) - downloaded)
    with ExitStack() as opened:
        weights, fingerprint = replica.base, replica.fingerprint
        anchor: StagedAnchor | None = None
        layers: list[PatchReader] = []
        patches: list[StagedPatch] = []
        for arrived in opened.enter_context(closing(arrivals(chain, incoming, route, goal, report))):
            edge = arrived.edge
            enter("verify" if edge.base is None else "decode")
            try:
                if edge.base is None:
                    layers, patches = [], []
                    files = opened.enter_context(Checkpoint(arrived.path, aliases=dict(chain.channel.table.aliases)))
                    weights, fingerprint = files, _anchor_fingerprint(arrived, files, chain.channel.table)
                    position = Position(edge.result, fingerprint.digest)
                    anchor = StagedAnchor(position, fingerprint.digests, arrived.path)
                else:
                    if weights is None or fingerprint is None:
                        raise ChannelError("a patch was planned with nothing to apply it to")
                    out = staging / f"{edge.base:012d}-{edge.result:012d}.safetensors"
                    layers += [
                        PatchReader(opened.enter_context(FileSource(patch.path))) for patch in patches[len(layers) :]
                    ]
                    under = Overlay(weights, layers, fresh=isinstance(weights, Checkpoint))
                    fingerprint = _stage_one(arrived, under, fingerprint, out, workers, report, enter)
                    patches.append(StagedPatch(Position(edge.result, fingerprint.digest), out))
                    discard(arrived.path)
                _refuse_other_result(arrived, fingerprint)
                enter("fetch")
            except BAD_OBJECT as error:
                raise BadEdgeError(edge, error) from error
        assert fingerprint is not None
        return Staged(
            position_of(replica), goal.position, fingerprint, tuple(patches), anchor, nbytes=route_bytes(route)
        )


@contextmanager
def staged_weights(weights: Weights, staged: Staged) -> Iterator[Weights]:
    """What applying ``staged`` to ``weights`` would give, read from its files; nothing is written."""
    with opened_patches(patch.path for patch in staged.patches) as patches, ExitStack() as opened:
        if staged.anchor is not None:
            aliases = dict(weights.table.aliases)
            weights = opened.enter_context(Checkpoint(staged.anchor.folder, aliases=aliases))
        yield Overlay(weights, patches, fresh=staged.anchor is not None)


def _anchor_fingerprint(arrived: Arrived, files: Checkpoint, table: TensorTable) -> Fingerprint:
    """The fingerprint of an anchor's files, which were digested when they arrived.

    `FormatError` for safetensors files outside the checkpoint's index, since a tool might load them instead, and for
    tensors that the index puts into files of another kind.
    """
    refuse_other_table(table, files.table)
    for path in sorted(set(arrived.path.glob(f"*{WEIGHTS}")) - set(files.files)):
        raise FormatError("the anchor holds weights outside its checkpoint's index", file=path.name)
    try:
        return Fingerprint(files.table, tuple(arrived.digests[spec.name] for spec in files.table))
    except KeyError as name:
        raise FormatError("no safetensors file has the tensor", file=arrived.edge.key, tensor=str(name)) from None


def _clear(folder: Path, names: set[str]) -> None:
    """Delete what earlier attempts left, except downloads of ``names``, which can be resumed."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name.removesuffix(".partial") not in names:
            discard(path)


def _borrow(beside: Path, incoming: Path, route: Route) -> None:
    """Take what is there already. It is checked like a download that was interrupted, so it may be anything."""
    for edge in route:
        there, here = beside / name_of(edge), incoming / name_of(edge)
        with suppress(OSError):  # it is being deleted, or on another disk: then it is fetched
            if there.is_file():
                here.hardlink_to(there)
            elif there.is_dir():
                here.mkdir(exist_ok=True)
                for path in there.iterdir():
                    (here / path.name).hardlink_to(path)


def _stage_one(
    arrived: Arrived,
    under: Weights,
    fingerprint: Fingerprint,
    out: Path,
    workers: Workers,
    report: Report,
    enter: Enter,
) -> Fingerprint:
    files = sorted(arrived.path.iterdir()) if arrived.path.is_dir() else [arrived.path]
    reader = joined(open_objects(map(ReopenedSource, files)))
    if arrived.position is not None and arrived.position.digest != reader.header.result:
        raise FormatError("the patch does not lead to the position in its manifest", file=arrived.edge.key)
    if arrived.base is not None and arrived.base != fingerprint.digest:
        problem = f"the manifest of version {arrived.edge.result} begins at {arrived.base[:12]}"
        raise BaseError(problem, expected=arrived.base, found=fingerprint.digest)
    return stage(reader, under, fingerprint, out, workers, report, enter)


def _refuse_other_result(arrived: Arrived, fingerprint: Fingerprint) -> None:
    """`ResultError` if an edge did not lead to the committed position, as far as that is known."""
    edge = arrived.edge
    expected = arrived.position.digest if arrived.position else None
    if (expected is not None and fingerprint.digest != expected) or not fingerprint.digest.startswith(edge.digest):
        problem = f"the weights of version {edge.result} have the digest {fingerprint.digest[:12]}"
        raise ResultError(problem, expected=expected or edge.digest, found=fingerprint.digest)
