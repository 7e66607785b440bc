"""Publishing checkpoint folders, saved by any trainer, against a mirror of the head; and anchors from mirrors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position, check_label, check_name, check_step
from weightcast.channel.records import Manifest
from weightcast.channel.trust import NO_SIGNING, Signing
from weightcast.disk.apply import write_patch
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import Report, silent, space_errors
from weightcast.disk.staged import fingerprint_of, stage
from weightcast.errors import ConflictError, ResultError, UsageError
from weightcast.events.emitter import Emitter, OnEvent
from weightcast.events.phases import Phases
from weightcast.follow.mirror import Mirror
from weightcast.follow.replica import Staged, StagedPatch
from weightcast.follow.subscriber import Subscriber
from weightcast.format.codec import check_codec
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers
from weightcast.publish.open import Content, announce, commit_anchor, files_of, new_writer, open_for_writing
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
    on_event: OnEvent = (),
    signing: Signing = NO_SIGNING,
) -> Published:
    """Publish a checkpoint as the next version. ``mirror`` is a folder that holds the head, to compare with.

    A checkpoint that is the head already is not published again. With ``anchor`` it is uploaded whole, which needs no
    mirror, and repairs a channel whose head can no longer be reached. ``on_event`` gets the phases of the version, and
    those of the mirror on its way to the head; an anchor has none.
    """
    check_codec(codec)
    check_step(step)
    check_label(label)
    writer = check_name(writer, "writer") if writer else new_writer()
    store, emitter = open_store(channel), Emitter(on_event, "trainer", writer)
    with Checkpoint(checkpoint, aliases=dict(Chain.open(store, signing).channel.table.aliases)) as new:
        chain = open_for_writing(store, new.table, signing)
        if anchor:
            head = chain.head()
            version = _known(head.position if head else None).version + 1
            announce(chain, writer)
            manifest = commit_anchor(chain, version, new, files_of(new), writer, step, label, workers, report)
            return Published(manifest, new=True)
        with (
            space_errors(Path(mirror)),
            Subscriber(
                chain.store,
                mirror,
                threads=workers.threads,
                report=report,
                fold=False,
                on_event=emitter.relay("mirror"),
                trust=signing.trust,
            ) as subscriber,
        ):
            return publish_next(
                chain,
                subscriber,
                new,
                step=step,
                label=label,
                codec=codec,
                writer=writer,
                workers=workers,
                report=report,
                emitter=emitter,
            )


def publish_next(
    chain: Chain,
    subscriber: Subscriber,
    new: Weights,
    *,
    step: int | None = None,
    label: str | None = None,
    codec: str = "banded",
    writer: str,
    after: Position | None = None,
    whole: Callable[[], Content] | None = None,
    workers: Workers = ONE,
    report: Report = silent,
    emitter: Emitter | None = None,
) -> Published:
    """Publish ``new`` as the version after the head, to which the subscriber's mirror is brought first.

    `ConflictError`, and nothing is committed, if the head is not ``after``.

    Weights that the head has already make no version. With ``whole`` they make one, so that each step is a version;
    and a patch that would be no smaller than the weights is published as an anchor of the files that it returns.
    """
    while True:
        update = subscriber.sync()
        if update is not None and update.short is not None:
            raise update.short  # the next version must follow the head, and the mirror cannot reach it
        base = _known(subscriber.position)
        if after is not None and base != after:
            problem = f"another writer committed version {after.version + 1}"
            raise ConflictError(problem, file=chain.store.url, hint="Stop it, then try again.")
        phases = Phases()
        made = _publish(chain, subscriber.mirror, base, new, step, label, codec, writer, whole, workers, report, phases)
        if made is not None:
            if made.position != base and emitter is not None:
                spans, position = phases.spans({"encode": made.nbytes, "upload": made.nbytes}), made.position
                emitter.emit(made.channel, position.version, position.digest, spans, made.step)
            return Published(made, new=made.position != base)


def _known(head: Position | None) -> Position:
    if head is None:
        raise UsageError("the channel has no version yet", hint="Finish it with `weightcast init URL CHECKPOINT`.")
    return head


def _publish(
    chain: Chain,
    keeper: Mirror,
    head: Position,
    new: Weights,
    step: int | None,
    label: str | None,
    codec: str,
    writer: str,
    whole: Callable[[], Content] | None,
    workers: Workers,
    report: Report,
    phases: Phases,
) -> Manifest | None:
    """The commit; None if the mirror turned out to be damaged and must be synced first."""
    old, fingerprint = keeper.weights, keeper.fingerprint
    assert old is not None
    assert fingerprint is not None
    with tempfile.TemporaryDirectory(prefix="publish-", dir=keeper.workshop) as folder:
        made = Path(folder) / "patch"
        with phases.phase("encode"):  # with the comparison: it is one pass
            written = write_patch(old, new, made, codec, workers, report)
        if written.base != head.digest:
            if keeper.examine():
                raise ResultError("the mirror changed while it was read", expected=head.digest, found=written.base)
            return None
        if written.result == head.digest and whole is None:
            return chain.manifest(head.version)
        if whole is not None and written.nbytes >= new.table.nbytes:
            announce(chain, writer)
            return commit_anchor(chain, head.version + 1, new, whole(), writer, step, label, workers, report)
        position = Position(head.version + 1, written.result)
        with FileSource(made) as source, phases.phase("verify"):
            staged = Path(folder) / "staged"
            reached = stage(PatchReader(source), old, fingerprint, staged, workers, report)
        with phases.phase("upload"):
            ref = chain.put_delta(position, made)
        manifest = chain.draft(position, head, ref, codec, written.changed, step, writer, label)
        announce(chain, writer)
        if isinstance(new, Checkpoint):
            new.refuse_changed()
        with phases.phase("commit"):
            manifest = chain.commit(manifest)
        keeper.apply(Staged(head, position, reached, (StagedPatch(position, staged),)))
    return manifest
