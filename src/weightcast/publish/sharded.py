"""Sharded publishing: each rank codes and uploads its own boxes, rank 0 commits one manifest that names all objects.

    every rank   scan ─ resolve ─┐ ready    ┌ sums of digests ┐           ┌ encode, upload ┐
    rank 0                       └─ agree ──┴── add up ───────┴── result ─┴── commit ──────┴── receipts

Four rounds of small messages make a version (`weightcast.publish.peers`). Nothing is gathered: what crosses the group
is a sum of 64 bits for each tensor, and the names of objects.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest, ObjectRef, dump_record, load_record
from weightcast.errors import PeerError, SpaceError, StoreError, UsageError
from weightcast.format.boxes import Place
from weightcast.format.codec import CodecName
from weightcast.format.digest import MODULUS, Fingerprint, box_digest, fingerprint
from weightcast.format.kernels import cpu
from weightcast.format.patch import ModelSize, Patch, TensorPatch
from weightcast.format.patchfile import encode_boxes
from weightcast.format.scan import Detector, Scan
from weightcast.format.tensors import Weights
from weightcast.publish.agreement import agree_on_table
from weightcast.publish.committer import Committer, Watch
from weightcast.publish.lockstep import Lockstep
from weightcast.publish.open import announce, open_for_writing
from weightcast.publish.peers import LEADER, Message, Peers, meet
from weightcast.publish.pipeline import Resolved, Stage, Uploaded, codec_for, joined, update_of
from weightcast.publish.receipt import Receipt
from weightcast.publish.sharded_anchor import LocalBoxes, begin_channel, commit_boxes
from weightcast.store.base import Store

Sums = npt.NDArray[np.uint64]

_PATIENCE = 5.0
"""Seconds that closing waits for a rank that failed to tell the others."""

_CODECS: tuple[CodecName, ...] = ("plain", "gap", "banded")
"""From what every rank can write to what needs most."""


@dataclass(frozen=True)
class _Version:
    """What all ranks have agreed on about a version before anybody codes it."""

    position: Position
    fingerprint: Fingerprint
    codec: CodecName
    folder: str
    changed: int


class ShardedCommitter(Committer):
    """A committer on each rank of a group: all publish the same number of times, and every version is of all."""

    _peers: Peers
    _pipeline: Lockstep

    def _watched(self, watch: Watch, begun: Chain | None) -> Detector:
        """A model may be refused on one rank alone: then every rank raises."""
        detector: Detector | None = None
        made: Message | Exception = Message()
        try:
            detector = super()._watched(watch, begun)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for it
            made = error
        try:
            meet(self._peers, made, lambda _: Message())
        except BaseException:
            if detector is not None:
                detector.close()
            raise
        assert detector is not None
        return detector

    def _open(self, store: Store, begun: Chain | None) -> None:
        local = self._local = cast(LocalBoxes, self._detector.weights)
        local.place(agree_on_table(self._peers, *local.declare()))
        self._fingerprint = fingerprint(local, self._workers)
        self._own = {name: _digest_of(local, name, place) for name, place in local.places.items()}
        """What each box adds to its tensor's digest, as of the last update that was resolved into a version."""
        now = self._global(self._contributions())
        begin = partial(begin_channel, store, local, now, self._peers, self.writer, self._refuse_changed)
        head = self._head_of(begun) or begin()
        if self._peers.rank == LEADER:
            self._chain = open_for_writing(store, local.whole)
        else:
            self._chain = Chain.open(store)
        if head.position.digest != now.digest:
            head = commit_boxes(
                self._chain, head.position.version + 1, local, now, self._peers, self.writer, self._refuse_changed
            )
        self._reached_at = now
        self._pipeline = Lockstep(head)
        if self._peers.rank == LEADER:
            announce(self._chain, self.writer)

    def _head_of(self, begun: Chain | None) -> Manifest | None:
        """The head, as rank 0 sees it: listings may differ from one moment to the next."""

        def look(_: Sequence[Message]) -> Message:
            head = begun.head() if begun is not None else None
            return Message({"head": dump_record(head).decode() if head else None})

        found = meet(self._peers, Message(), look).facts["head"]
        return load_record(Manifest, found.encode()) if found else None

    def _contributions(self) -> Sums:
        """What this rank's boxes add to the digests of all tensors."""
        sums = np.zeros(len(self._local.whole), np.uint64)
        for name, place in self._local.places.items():
            sums[self._local.whole.ordinal(place.spec.name)] += np.uint64(self._own[name])
        return sums

    def _global(self, sums: Sums) -> Fingerprint:
        """The fingerprint of all ranks' boxes together."""
        answer = meet(self._peers, Message(sums=sums), lambda found: Message(sums=_added(found)))
        assert answer.sums is not None
        return Fingerprint(self._local.whole, tuple(answer.sums.tolist()))

    def _refuse_changed(self) -> None:
        """`UsageError` if the weights of this rank are no longer those that were digested."""
        if fingerprint(self._local, self._workers) != self._fingerprint:
            raise UsageError("the weights changed while the publisher opened", hint="Open it while nothing trains.")

    # -- a version: in the background ----------------------------------------------------------------------------------

    def _send_next(self) -> bool:
        pipeline = self._pipeline
        with self._event():
            self._changed.wait_for(lambda: pipeline.can_send or pipeline.is_over)
            has_begun = pipeline.begin_round()
        if not has_begun:
            self._tell(pipeline.ended)  # without the lock: it waits for the others, and the caller must not
            return False
        try:
            self._round()
        except (StoreError, SpaceError) as error:
            self._pause(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach the receipts
            with self._event():
                pipeline.sending_failed(error)
            return False
        return True

    def _tell(self, ended: BaseException | None) -> None:
        """Tell the other ranks, who wait for this one, what has ended it; they told it otherwise."""
        if isinstance(ended, Exception) and not isinstance(ended, PeerError):
            # For the others it is the end, also where a store has failed. This rank's caller gets the error itself.
            with suppress(Exception):
                meet(self._peers, RuntimeError(str(ended)), lambda _: Message())

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(None if self._pipeline.ended is None else _PATIENCE)

    def _round(self) -> None:
        """One version, or the news that there is none to make."""
        with self._changed:
            facts = {"ready": self._pipeline.ready, "steps": self._pipeline.steps}
        agreed = meet(self._peers, Message(facts), _agree).facts
        with self._changed:
            parts = self._pipeline.take(agreed["upto"])
        stage = joined(parts)
        self._reached(stage)
        manifest = stage.manifest if isinstance(stage, Uploaded) else self._upload_all(update_of(stage))
        if manifest is None:
            with self._event() as pipeline:
                pipeline.committed(pipeline.head, is_new=False)
            return
        self._commit_all(stage, manifest)

    def _upload_all(self, update: Resolved) -> Manifest | None:
        """Code and upload this rank's part of an update; the manifest of all parts, None if nothing has changed."""
        head = self._pipeline.head
        gains, own = self._gains(update)
        version = self._next_version(head.position, update, gains)
        if version is None:
            return None
        made: Message | Exception
        try:
            made = Message({"objects": [self._put(version, update, head.position)]})
        except (StoreError, SpaceError) as error:
            made = error
        answer = meet(self._peers, made, partial(self._manifest_of, version, head.position, update))
        self._own, self._reached_at = own, version.fingerprint
        return load_record(Manifest, answer.facts["manifest"].encode())

    def _gains(self, update: Resolved) -> tuple[Sums, dict[str, int]]:
        """What an update adds to the digests of all tensors, and what its boxes add to them afterwards."""
        sums, own = np.zeros(len(self._local.whole), np.uint64), dict(self._own)
        for tensor in update.patch.tensors:
            place = self._local.places[tensor.spec.name]
            own[tensor.spec.name] = (own[tensor.spec.name] + self._gain(place, tensor)) % MODULUS
            change = (own[tensor.spec.name] - self._own[tensor.spec.name]) % MODULUS
            sums[self._local.whole.ordinal(place.spec.name)] += np.uint64(change)
        return sums, own

    def _gain(self, place: Place, tensor: TensorPatch) -> int:
        if tensor.old is None:  # all of the box is published, since nobody knows what it was
            after = box_digest(tensor.new.reshape(place.box.shape), place.box.offset, place.spec.shape)
            return after - self._own[tensor.spec.name]
        return int(cpu.digest_change(place.flat(tensor.indices), tensor.old, tensor.new))

    def _next_version(self, head: Position, update: Resolved, gains: Sums) -> _Version | None:
        """Agree on what the next version is; None if no rank has a change."""
        codec = codec_for(update, self._codec)
        before = np.array(self._reached_at.digests, np.uint64)

        def decide(found: Sequence[Message]) -> Message:
            facts = {
                "changed": sum(message.facts["changed"] for message in found),
                "codec": min((message.facts["codec"] for message in found), key=_CODECS.index),
                "folder": secrets.token_hex(8),
            }
            return Message(facts, before + _added(found))

        answer = meet(self._peers, Message({"changed": update.patch.changed, "codec": codec}, gains), decide)
        assert answer.sums is not None
        facts = answer.facts
        if not facts["changed"]:
            return None
        reached = Fingerprint(self._local.whole, tuple(answer.sums.tolist()))
        if reached.digest == head.digest:
            return None
        position = Position(head.version + 1, reached.digest)
        return _Version(position, reached, facts["codec"], facts["folder"], facts["changed"])

    def _put(self, version: _Version, update: Resolved, base: Position) -> list[object] | None:
        """Upload this rank's object; None if nothing of it has changed."""
        if not update.patch.tensors:
            return None
        tensors = tuple(
            replace(tensor, digest=version.fingerprint[self._local.places[tensor.spec.name].spec.name])
            for tensor in update.patch.tensors
        )
        patch = Patch(base.digest, version.position.digest, ModelSize.of(self._local.whole), tensors)
        data = encode_boxes(patch, version.codec, self._local.places, update.prepared, self._workers)
        ref = self._chain.put_delta(version.position, data, version.folder)
        return [ref.key, ref.size, ref.sha256]

    def _manifest_of(self, version: _Version, base: Position, update: Resolved, found: Sequence[Message]) -> Message:
        objects = [ObjectRef(*one) for message in found for one in message.facts["objects"] if one is not None]
        manifest = self._chain.draft(
            version.position, base, objects, version.codec, version.changed, update.step, self.writer, update.label
        )
        return Message({"manifest": dump_record(manifest).decode()})

    def _commit_all(self, stage: Stage, manifest: Manifest) -> None:
        """Rank 0 commits; from now on it is this manifest or a conflict, on every rank."""
        self._reached(Uploaded(update_of(stage), manifest))

        def commit(_: Sequence[Message]) -> Message:
            self._chain.commit(manifest)
            return Message()

        meet(self._peers, Message(), commit)
        with self._event() as pipeline:
            pipeline.committed(manifest)

    def _add(self, scan: Callable[[], Scan], step: int | None, label: str | None, *, undoes: bool) -> Receipt:
        """As with one writer, but whatever is raised ends it: the other ranks have published this turn."""
        try:
            return super()._add(scan, step, label, undoes=False)
        except BaseException as error:
            self._end(error)
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._peers.close()


def _agree(found: Sequence[Message]) -> Message:
    """How many updates every rank has; `UsageError` if two ranks published different steps at the same turn."""
    upto = min(message.facts["ready"] for message in found)
    steps: dict[int, tuple[int, int | None]] = {}
    for rank, message in enumerate(found):
        first = message.facts["ready"] - len(message.facts["steps"])
        for turn, step in enumerate(message.facts["steps"], first):
            other, before = steps.setdefault(turn, (rank, step))
            if step != before:
                problem = f"rank {other} published step {before} where rank {rank} published step {step}"
                raise UsageError(problem, hint="Every rank calls publish() after the same optimizer steps.")
    return Message({"upto": upto})


def _added(found: Sequence[Message]) -> Sums:
    """The sums of all ranks, modulo 2**64."""
    total = np.zeros(0, np.uint64)
    for message in found:
        assert message.sums is not None
        total = total + message.sums if total.size else message.sums
    return total


def _digest_of(local: Weights, name: str, place: Place) -> int:
    """What a box adds to the digest of its tensor."""
    bits = local.read(name)
    if place.is_whole:
        return int(cpu.digest_runs(bits, np.zeros(1, np.int64))) if bits.size else 0
    return box_digest(bits.reshape(place.box.shape), place.box.offset, place.spec.shape)
