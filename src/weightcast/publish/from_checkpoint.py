"""Publishing checkpoint folders, saved by any trainer; and anchors from mirrors."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position, check_label, check_name, check_step
from weightcast.channel.records import Manifest
from weightcast.disk.apply import write_patch
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import Report, silent, space_errors
from weightcast.disk.staged import fingerprint_of, stage
from weightcast.errors import ResultError, UsageError
from weightcast.follow.mirror import Mirror
from weightcast.follow.replica import Staged, StagedPatch
from weightcast.follow.subscriber import Subscriber
from weightcast.format.codec import check_codec
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.workers import ONE, Workers
from weightcast.publish.open import announce, commit_anchor, files_of, new_writer, open_for_writing
from weightcast.store import open_store
from weightcast.store.base import Store


def cut_anchor(chain: Chain, mirror: Mirror, report: Report = silent) -> Position:
    """Upload what a mirror holds as an anchor: newcomers begin there, and `gc` may delete what lies before it."""
    mirror.fold()
    position = mirror.folded
    if position is None:
        raise UsageError("the mirror holds no version", file=str(mirror.folder))
    with Checkpoint(mirror.folder, aliases=dict(mirror.table.aliases)) as checkpoint:
        files = files_of(checkpoint)
        found = fingerprint_of(checkpoint, report=report).digest
        if found != position.digest:
            mirror.examine()
            problem = "the files were changed by another program"
            raise ResultError(problem, expected=position.digest, found=found, hint="Pull again, then try again.")
        chain.put_anchor(position, files, report, checkpoint.refuse_changed)
    write_index(chain)
    return position


@dataclass(frozen=True)
class Published:
    """A commit, and whether it is new."""

    manifest: Manifest
    new: bool


def publish(
    channel: str | Path | Store,
    checkpoint: Path | str,
    mirror: Path | str,
    *,
    step: int | None = None,
    label: str | None = None,
    codec: str = "banded",
    anchor: bool = False,
    writer: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
) -> Published:
    """Publish a checkpoint as the next version. ``mirror`` is a folder that holds the head, to compare with.

    A checkpoint that is the head already is not published again. With ``anchor`` it is uploaded whole, which needs no
    mirror, and repairs a channel whose head can no longer be reached.
    """
    check_codec(codec)
    check_step(step)
    check_label(label)
    writer = check_name(writer, "writer") if writer else new_writer()
    store = open_store(channel)
    with Checkpoint(checkpoint, aliases=dict(Chain.open(store).channel.table.aliases)) as new:
        chain = open_for_writing(store, new.table)
        if anchor:
            head = chain.head()
            version = _known(head.position if head else None).version + 1
            announce(chain, writer)
            manifest = commit_anchor(chain, version, new, files_of(new), writer, step, label, workers, report)
            return Published(manifest, new=True)
        with (
            space_errors(Path(mirror)),
            Subscriber(chain.store, mirror, threads=workers.threads, report=report, fold=False) as subscriber,
        ):
            while True:
                update = subscriber.sync()
                if update is not None and update.short is not None:
                    raise update.short  # the next version must follow the head, and the mirror cannot reach it
                base = _known(subscriber.position)
                made = _publish(chain, subscriber.mirror, base, new, step, label, codec, writer, workers, report)
                if made is not None:
                    return Published(made, new=made.position != base)


def _known(head: Position | None) -> Position:
    if head is None:
        raise UsageError("the channel has no version yet", hint="Finish it with `weightcast init URL CHECKPOINT`.")
    return head


def _publish(
    chain: Chain,
    keeper: Mirror,
    head: Position,
    new: Checkpoint,
    step: int | None,
    label: str | None,
    codec: str,
    writer: str,
    workers: Workers,
    report: Report,
) -> Manifest | None:
    """The commit; None if the mirror turned out to be damaged and must be synced first."""
    old, fingerprint = keeper.weights, keeper.fingerprint
    assert old is not None
    assert fingerprint is not None
    with tempfile.TemporaryDirectory(prefix="publish-", dir=keeper.workshop) as folder:
        made = Path(folder) / "patch"
        written = write_patch(old, new, made, codec, workers, report)
        if written.base != head.digest:
            if keeper.examine():
                raise ResultError("the mirror changed while it was read", expected=head.digest, found=written.base)
            return None
        if written.result == head.digest:
            return chain.manifest(head.version)
        position = Position(head.version + 1, written.result)
        with FileSource(made) as source:
            staged = Path(folder) / "staged"
            reached = stage(PatchReader(source), old, fingerprint, staged, workers, report)
        ref = chain.put_delta(position, made)
        manifest = chain.draft(position, head, ref, codec, written.changed, step, writer, label)
        announce(chain, writer)
        new.refuse_changed()
        chain.commit(manifest)
        keeper.apply(Staged(head, position, reached, (StagedPatch(position, staged),)))
    return manifest
