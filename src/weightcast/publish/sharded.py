"""Sharded publishing: each rank codes and uploads its own boxes, rank 0 commits one manifest that names all objects.

    every rank   scan ─ resolve ─┐ ready    ┌ codec   ┌ add up sums ─ encode, upload ┐ objects
    rank 0                       └─ agree ──┴─ agree ─┘                              └─ manifest ── commit ── receipts

Four rounds of small messages make a version (`weightcast.publish.rounds`), and between them the digests are added up.
Nothing is gathered: what crosses the group is a sum of 64 bits for each tensor, and the names of objects.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest, ObjectRef, dump_record, load_record
from weightcast.errors import SpaceError, StoreError, UsageError
from weightcast.events.phases import Phases, Span
from weightcast.format.boxes import Place
from weightcast.format.codec import CodecName
from weightcast.format.cut import Cut
from weightcast.format.digest import MODULUS, Fingerprint, box_digest, fingerprint
from weightcast.format.kernels import cpu
from weightcast.format.patch import ModelSize, Patch, TensorPatch
from weightcast.format.patchfile import encode_boxes
from weightcast.format.scan import Detector, Scan
from weightcast.format.tensors import Bits, Weights
from weightcast.publish.agreement import agree_on_table
from weightcast.publish.committer import Committer, Watch
from weightcast.publish.lockstep import Lockstep
from weightcast.publish.open import announce, open_for_writing
from weightcast.publish.peers import Message, Sums
from weightcast.publish.pipeline import Resolved, Uploaded, codec_for, joined, prepared_for, update_of
from weightcast.publish.receipt import Receipt
from weightcast.publish.rounds import LEADER, Rounds
from weightcast.publish.sharded_anchor import LocalBoxes, begin_channel, commit_boxes
from weightcast.publish.sharded_return import MOST_VERSIONS, OtherBoxesError, changes_since
from weightcast.store.base import Store

_log = logging.getLogger("weightcast")

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

    _rounds: Rounds
    _pipeline: Lockstep

    def _watched(self, watch: Watch, begun: Chain | None) -> Detector:
        """A model may be refused on one rank alone: then every rank raises."""
        detector = super()._watched(watch, begun)
        try:
            self._rounds.meet(Message())
        except BaseException:
            detector.close()
            raise
        return detector

    def _open(self, store: Store, begun: Chain | None) -> None:
        local = self._local = cast(LocalBoxes, self._detector.weights)
        local.place(agree_on_table(self._rounds, *local.declare()))
        self._coding.cutting.places = local.places
        self._fingerprint = fingerprint(local, self._workers)
        self._own = {name: _digest_of(local, name, place) for name, place in local.places.items()}
        """What each box adds to its tensor's digest, as of the last update that was resolved into a version."""
        now = self._global(self._contributions())
        begin = partial(
            begin_channel, store, local, now, self._rounds, self.writer, self._refuse_changed, self._signing
        )
        head = self._head_of(begun) or begin()
        if self._rounds.rank == LEADER:
            self._chain = open_for_writing(store, local.whole, self._signing)
        else:
            self._chain = Chain.open(store, self._signing)
        self._reached_at, self._pipeline = now, Lockstep(head)
        if head.position.digest != now.digest and not self._returns(head, now):
            head = commit_boxes(
                self._chain, head.position.version + 1, local, now, self._rounds, self.writer, self._refuse_changed
            )
            self._pipeline = Lockstep(head)

        def opened(_: Sequence[Message]) -> Message:
            announce(self._chain, self.writer)
            return Message()

        self._rounds.meet(Message(), opened)

    def _returns(self, head: Manifest, now: Fingerprint) -> bool:
        """Commit what leads from the head to the weights, if these are an older version; whether that was possible."""

        def look(_: Sequence[Message]) -> Message:
            return Message({"version": self._chain.find(now.digest, head)})

        version = self._rounds.meet(Message(), look).facts["version"]
        if version is None or head.position.version - version > MOST_VERSIONS:
            return False
        tensors: tuple[TensorPatch, ...] = ()
        made: Message | Exception = Message({"problem": None})
        try:
            rank, size = self._rounds.rank, self._rounds.size
            tensors = changes_since(self._chain, version, head, self._local, rank, size, self._workers)
            self._refuse_changed()
        except OtherBoxesError as error:
            made = Message({"problem": str(error)})
        except Exception as error:  # noqa: BLE001 - the other ranks wait for it
            made = error
        problem = self._rounds.meet(made, _first_problem).facts["problem"]
        if problem is None:
            sums, own = self._gains(self._resolved(now.digest, head.position.digest, tensors))
            reached = self._after(sums)
            problem = None if reached.digest == head.position.digest else "the ranks have other boxes than before"
        if problem is not None:
            _log.info("the weights are those of version %s, but all are uploaded: %s", version, problem)
            return False
        self._own, self._reached_at = own, reached
        back = tuple(TensorPatch(one.spec, one.indices, _known(one.old), one.new, 0) for one in tensors)
        update = self._resolved(head.position.digest, now.digest, back)
        uploaded = self._upload_all(update)
        assert uploaded is not None
        self._commit_all(uploaded)
        return True

    def _resolved(self, base: str, result: str, tensors: tuple[TensorPatch, ...]) -> Resolved:
        return Resolved(Patch(base, result, ModelSize.of(self._local.whole), tensors), None)

    def _after(self, gains: Sums) -> Fingerprint:
        """The fingerprint of all ranks' boxes together after what each of them gains."""
        digests = np.array(self._reached_at.digests, np.uint64) + self._rounds.add(gains)
        return Fingerprint(self._local.whole, tuple(digests.tolist()))

    def _head_of(self, begun: Chain | None) -> Manifest | None:
        """The head, as rank 0 sees it: listings may differ from one moment to the next."""

        def look(_: Sequence[Message]) -> Message:
            head = begun.head() if begun is not None else None
            return Message({"head": dump_record(head).decode() if head else None})

        found = self._rounds.meet(Message(), look).facts["head"]
        return load_record(Manifest, found.encode()) if found else None

    def _contributions(self) -> Sums:
        """What this rank's boxes add to the digests of all tensors."""
        sums = np.zeros(len(self._local.whole), np.uint64)
        for name, place in self._local.places.items():
            sums[self._local.whole.ordinal(place.spec.name)] += np.uint64(self._own[name])
        return sums

    def _global(self, sums: Sums) -> Fingerprint:
        """The fingerprint of all ranks' boxes together."""
        self._rounds.meet(Message())
        return Fingerprint(self._local.whole, tuple(self._rounds.add(sums).tolist()))

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
            self._rounds.tell(pipeline.ended, for_good=True)  # without the lock: it waits, and the caller must not
            return False
        try:
            self._round()
        except (StoreError, SpaceError) as error:
            self._pause(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach the receipts
            with self._event():
                pipeline.sending_failed(error)
            self._rounds.tell(error, for_good=True)
            return False
        return True

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(None if self._pipeline.ended is None else _PATIENCE)

    def _round(self) -> None:
        """One version, or the news that there is none to make."""
        with self._changed:
            facts = {"ready": self._pipeline.ready, "steps": self._pipeline.steps}
        agreed = self._rounds.meet(Message(facts), _agree).facts
        with self._changed:
            parts = self._pipeline.take(agreed["upto"])
        stage = joined(parts)
        self._reached(stage)
        uploaded = stage if isinstance(stage, Uploaded) else self._upload_all(update_of(stage))
        if uploaded is None:
            with self._event() as pipeline:
                pipeline.committed(pipeline.head, is_new=False)
            return
        self._commit_all(uploaded)

    def _upload_all(self, update: Resolved) -> Uploaded | None:
        """Code and upload this rank's part of an update; None if no rank has a change. The manifest is of all parts."""
        head = self._pipeline.head
        gains, own = self._gains(update)
        version = self._next_version(head.position, update, gains)
        if version is None:
            return None
        made: Message | Exception
        spans: tuple[Span, ...] = ()
        try:
            ref, spans = self._put(version, update, head.position)
            made = Message({"objects": [ref and [ref.key, ref.size, ref.sha256]]})
        except Exception as error:  # noqa: BLE001 - the other ranks wait for it
            made = error
        answer = self._rounds.meet(made, partial(self._manifest_of, version, head.position, update))
        self._own, self._reached_at = own, version.fingerprint
        manifest = load_record(Manifest, answer.facts["manifest"].encode())
        return Uploaded(replace(update, spans=update.spans + spans), manifest)

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

    def _renew_cuts(self) -> None:
        """Rank 0 reads the heartbeats, and tells the others."""
        if self._rounds.rank == LEADER:
            super()._renew_cuts()

    def _next_version(self, head: Position, update: Resolved, gains: Sums) -> _Version | None:
        """Agree on what the next version is; None if no rank has a change."""
        # Ranks take the codec that all can write; so of several that could be, the leader's choice.
        wanted = self._chooser.codec(update.patch.changed) if self._rounds.rank == LEADER else self._coding.codec
        codec = codec_for(update, wanted)

        def decide(found: Sequence[Message]) -> Message:
            self._renew_cuts()
            facts = {
                "changed": sum(message.facts["changed"] for message in found),
                "codec": min((message.facts["codec"] for message in found), key=_CODECS.index),
                "folder": secrets.token_hex(8),
                "cuts": [astuple(cut) for cut in self._coding.cutting.cuts],
            }
            return Message(facts)

        facts = self._rounds.meet(Message({"changed": update.patch.changed, "codec": codec}), decide).facts
        self._coding.cutting.follow(tuple(Cut(*cut) for cut in facts["cuts"]))
        if not facts["changed"]:
            return None
        reached = self._after(gains)
        if reached.digest == head.digest:
            return None
        position = Position(head.version + 1, reached.digest)
        return _Version(position, reached, facts["codec"], facts["folder"], facts["changed"])

    def _put(self, version: _Version, update: Resolved, base: Position) -> tuple[ObjectRef | None, tuple[Span, ...]]:
        """Upload this rank's object, and what that took; None if nothing of it has changed."""
        if not update.patch.tensors:
            return None, ()
        tensors = tuple(
            replace(tensor, digest=version.fingerprint[self._local.places[tensor.spec.name].spec.name])
            for tensor in update.patch.tensors
        )
        patch = Patch(base.digest, version.position.digest, ModelSize.of(self._local.whole), tensors)
        prepared, phases = prepared_for(version.codec, update, self._coding), Phases()
        with phases.phase("encode"):
            data = encode_boxes(patch, version.codec, self._local.places, prepared, self._workers)
        with phases.phase("upload"):
            ref = self._chain.put_delta(version.position, data, version.folder)
        changed, seconds = update.patch.changed, phases.seconds
        self._chooser.learn(lambda rates: rates.after_encoding(version.codec, changed, ref.size, seconds["encode"]))
        self._chooser.learn(lambda rates: rates.after_upload(ref.size, seconds["upload"]))
        return ref, phases.spans({"encode": len(data), "upload": ref.size})

    def _manifest_of(self, version: _Version, base: Position, update: Resolved, found: Sequence[Message]) -> Message:
        objects = [ObjectRef(*one) for message in found for one in message.facts["objects"] if one is not None]
        manifest = self._chain.draft(
            version.position, base, objects, version.codec, version.changed, update.step, self.writer, update.label
        )
        return Message({"manifest": dump_record(manifest).decode()})

    def _commit_all(self, uploaded: Uploaded) -> None:
        """Rank 0 commits; from now on it is this manifest or a conflict, on every rank."""
        self._reached(uploaded)
        drafted, phases = uploaded.manifest, Phases()

        def commit(_: Sequence[Message]) -> Message:
            with phases.phase("commit"):
                committed = self._chain.commit(drafted)  # signed, where rank 0 signs
            return Message({"manifest": dump_record(committed).decode()})

        answer = self._rounds.meet(Message(), commit)
        manifest = load_record(Manifest, answer.facts["manifest"].encode())
        with self._event() as pipeline:
            pipeline.committed(manifest)
        self._emit(manifest, uploaded.update.spans + phases.spans())

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
            self._rounds.close()


def _first_problem(found: Sequence[Message]) -> Message:
    return Message({"problem": next((one.facts["problem"] for one in found if one.facts["problem"]), None)})


def _known(old: Bits | None) -> Bits:
    assert old is not None
    return old


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


def _digest_of(local: Weights, name: str, place: Place) -> int:
    """What a box adds to the digest of its tensor."""
    bits = local.read(name)
    if place.is_whole:
        return int(cpu.digest_runs(bits, np.zeros(1, np.int64))) if bits.size else 0
    return box_digest(bits.reshape(place.box.shape), place.box.offset, place.spec.shape)
