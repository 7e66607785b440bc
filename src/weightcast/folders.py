"""Channels of checkpoint folders: begin one, publish a folder that a trainer of any kind has saved."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from weightcast.bits import Weights, refuse_no_weights
from weightcast.chain import Chain
from weightcast.checkpoint import SINGLE, Checkpoint, save
from weightcast.container import FileSource
from weightcast.errors import ResultError, UsageError
from weightcast.files import Report, noticing_full, scratch, silent
from weightcast.holder import Staged, StagedPatch
from weightcast.keys import Position, is_plain_file
from weightcast.manifest import Manifest, Reference
from weightcast.mirror import Mirror
from weightcast.notes import write_index
from weightcast.offline import write_patch
from weightcast.publisher import announce, new_writer, open_for_writing
from weightcast.stage import stage, standing_of
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.subscriber import Subscriber
from weightcast.wire import PatchReader
from weightcast.workers import ONE, Workers

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors")
"""The same weights once more, or an optimizer's: not what a replica needs."""


def init(
    channel: str | Path | Store,
    weights: Weights | Path | str,
    *,
    reference: Reference | None = None,
    step: int | None = None,
    writer: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
) -> Manifest:
    """Begin a channel with ``weights`` as version 0: arrays, or a checkpoint folder with its configuration files.

    With a ``reference`` nothing but digests is uploaded: replicas get that public checkpoint themselves. An
    interrupted `init` is completed by another with the same weights.
    """
    store = open_store(channel) if isinstance(channel, (str, Path)) else channel
    if isinstance(weights, (str, Path)):
        with Checkpoint(weights) as checkpoint:
            return _init(store, checkpoint, _files_of(checkpoint), reference, step, writer, workers, report)
    refuse_no_weights(weights)
    if reference is not None:
        return _init(store, weights, {}, reference, step, writer, workers, report)
    with scratch() as folder:
        save(weights, folder)
        with Checkpoint(folder, aliases=dict(weights.table.aliases)) as checkpoint:
            return _init(store, checkpoint, {SINGLE: folder / SINGLE}, None, step, writer, workers, report)


def _init(
    store: Store,
    weights: Weights,
    files: dict[str, Path],
    reference: Reference | None,
    step: int | None,
    writer: str | None,
    workers: Workers,
    report: Report,
) -> Manifest:
    chain = Chain.create(store, weights.table)
    position = Position(0, standing_of(weights, workers, report).position)
    ref = chain.refer_anchor(position, reference) if reference else chain.put_anchor(position, files, report)
    manifest = chain.draft(position, None, ref, None, weights.table.elements, step, writer or new_writer())
    chain.commit(manifest)
    write_index(chain)
    return manifest


def _files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    """What goes into an anchor: the weights, and the small files beside them that loading needs."""
    files = {path.name: path for path in checkpoint.files}
    if checkpoint.path.is_dir():
        for path in sorted(checkpoint.path.iterdir()):
            wanted = is_plain_file(path.name) and not path.name.endswith(_OTHER_WEIGHTS)
            if wanted and path.is_file() and not path.is_symlink():
                files[path.name] = path
    else:
        files = {"model.safetensors": checkpoint.path}
    return files


def cut_anchor(chain: Chain, mirror: Mirror, report: Report = silent) -> Position:
    """Upload what a mirror holds as an anchor: another place to begin at, and for the collector to begin behind."""
    mirror.fold()
    position = mirror.folded
    if position is None:
        raise UsageError("the mirror holds no version", file=str(mirror.folder))
    with Checkpoint(mirror.folder, aliases=dict(mirror.table.aliases)) as checkpoint:
        found = standing_of(checkpoint, report=report).position
        if found != position.digest:
            mirror.examine()
            problem = "the files were changed by somebody else"
            raise ResultError(problem, expected=position.digest, found=found, hint="Pull again, then try again.")
        chain.put_anchor(position, _files_of(checkpoint), report)
    write_index(chain)
    return position


@dataclass(frozen=True)
class Published:
    """A commit, and whether it had to be made."""

    manifest: Manifest
    new: bool


def publish(
    channel: str | Path | Store,
    checkpoint: Path | str,
    mirror: Path | str,
    *,
    step: int | None = None,
    codec: str = "banded",
    anchor: bool = False,
    writer: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
) -> Published:
    """Publish a checkpoint as the next version. ``mirror`` is a folder that keeps the head, to compare with.

    A checkpoint that is the head already is not published again. With ``anchor`` it is uploaded whole, which needs no
    mirror, and mends a channel whose head can no longer be reached.
    """
    writer = writer or new_writer()
    store = open_store(channel) if isinstance(channel, (str, Path)) else channel
    with Checkpoint(checkpoint, aliases=dict(Chain.open(store).channel.table.aliases)) as new:
        chain = open_for_writing(store, new.table, writer)
        if anchor:
            return _publish_anchor(chain, new, step, writer, workers, report)
        with (
            noticing_full(Path(mirror)),
            Subscriber(chain.store, mirror, threads=workers.threads, report=report) as subscriber,
        ):
            keeper = subscriber.holder
            assert isinstance(keeper, Mirror)
            while True:
                head = _catch_up(subscriber)
                manifest = _publish(chain, keeper, head, new, step, codec, writer, workers, report)
                if manifest is not None:
                    return Published(manifest, new=manifest.position != head)


def _publish_anchor(
    chain: Chain, new: Checkpoint, step: int | None, writer: str, workers: Workers, report: Report
) -> Published:
    """Where the head's own weights cannot be had any more, others begin anew."""
    head = chain.head()
    if head is None:
        raise UsageError("the channel has no version yet", hint="Finish it with `weightcast init URL CHECKPOINT`.")
    position = Position(head.position.version + 1, standing_of(new, workers, report).position)
    ref = chain.put_anchor(position, _files_of(new), report)
    manifest = chain.draft(position, None, ref, None, new.table.elements, step, writer)
    announce(chain, writer)
    chain.commit(manifest)
    write_index(chain)
    return Published(manifest, new=True)


def _catch_up(subscriber: Subscriber) -> Position:
    staged = subscriber.poll()
    if staged is not None:
        subscriber.apply(staged)
    if subscriber.position is None:
        raise UsageError("the channel has no version yet", hint="Finish it with `weightcast init URL CHECKPOINT`.")
    return subscriber.position


def _publish(
    chain: Chain,
    keeper: Mirror,
    head: Position,
    new: Weights,
    step: int | None,
    codec: str,
    writer: str,
    workers: Workers,
    report: Report,
) -> Manifest | None:
    """The commit; None if the mirror turned out to be damaged and must catch up first."""
    old, standing = keeper.weights, keeper.standing
    assert old is not None
    assert standing is not None
    with tempfile.TemporaryDirectory(prefix="publish-", dir=keeper.workshop) as folder:
        made = Path(folder) / "patch"
        written = write_patch(old, new, made, codec, workers, report)
        if written.base != head.digest:
            if keeper.examine():
                raise ResultError("the mirror changes while it is read", expected=head.digest, found=written.base)
            return None
        if written.result == head.digest:
            return chain.manifest(head.version)
        position = Position(head.version + 1, written.result)
        with FileSource(made) as source:
            staged = Path(folder) / "staged"
            reached = stage(PatchReader(source), old, standing, staged, workers, report)
        ref = chain.put_delta(position, made)
        manifest = chain.draft(position, head, ref, codec, written.changed, step, writer)
        announce(chain, writer)
        chain.commit(manifest)
        keeper.take(Staged(head, position, reached, None, None, None, (StagedPatch(position, staged),), 0))
    return manifest
