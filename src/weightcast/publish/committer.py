"""The committer: takes scans, resolves, encodes and commits them in the background.

`weightcast.publish.pipeline` decides which update is where, and how each receipt is resolved. Here are the threads
around it: the caller's, which scans; one that resolves scans; one that encodes, uploads and commits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Literal, TypeVar

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position, check_label, check_name, check_step
from weightcast.channel.records import Manifest
from weightcast.channel.trust import NO_SIGNING, Signing
from weightcast.errors import SpaceError, StoreError, UsageError, WeightcastError
from weightcast.events.emitter import Emitter, OnEvent
from weightcast.events.phases import Phases, Span
from weightcast.format.coding import Coding, Cutting
from weightcast.format.cut import Cut
from weightcast.format.patchfile import encode_prepared
from weightcast.format.scan import Detector, Scan, resolve
from weightcast.format.spec import TensorTable
from weightcast.format.workers import Workers
from weightcast.publish.codec_choice import Chooser, CodecChoice, ranking_seconds
from weightcast.publish.open import announce, channel_in, init_signed, new_writer, open_for_writing, take_up
from weightcast.publish.pipeline import (
    Encoded,
    Pipeline,
    Resolved,
    Scanned,
    Stage,
    Uploaded,
    changes,
    codec_for,
    joined,
    merged,
    prepared_for,
    update_of,
)
from weightcast.publish.receipt import Receipt
from weightcast.publish.replica_cuts import ReplicaCuts
from weightcast.store.base import Store

_log = logging.getLogger("weightcast")

C = TypeVar("C", bound="Committer")

Watch = Callable[[Chain | None, Coding, Workers], Detector]
"""Makes the detector for a channel, if there is one yet, that prepares changes for a codec."""

CutFor = Sequence[Cut] | Literal["replicas"]
"""For whom tensors are coded in boxes: named parts, or what replicas name in their heartbeats."""


def named_cuts(given: CutFor) -> tuple[Cut, ...] | None:
    """The parts that are named; None if replicas name them. `UsageError` for anything else."""
    if given == "replicas":
        return None
    cuts = tuple(one for one in given if isinstance(one, Cut)) if isinstance(given, Sequence) else ()
    if isinstance(given, Sequence) and len(cuts) == len(given):
        return cuts
    hint = 'Pass a list of wc.Cut("*.down_proj.weight", axis=1, parts=8), or "replicas".'
    raise UsageError(f"expected parts of tensors, got {given!r}", hint=hint)


class Committer:
    """The one writer of a channel: a detector finds changes, and each scan of it becomes a version."""

    def __init__(
        self,
        store: Store,
        watch: Watch,
        *,
        codec: CodecChoice = "banded",
        writer: str | None = None,
        threads: int | None = None,
        retry_after: float = 5.0,
        cut: CutFor = (),
        on_event: OnEvent = (),
        signing: Signing = NO_SIGNING,
    ):
        """Take up the channel where it is, or begin it with the detector's weights as version 0."""
        self.writer = check_name(writer, "writer") if writer else new_writer()
        self._emitter = Emitter(on_event, "trainer", self.writer)
        cuts = named_cuts(cut)
        self._chooser = Chooser(codec)
        self._coding = Coding(self._chooser.prepared, Cutting(cuts or ()))
        self._replica_cuts: ReplicaCuts | None = None
        self._retry_after = retry_after
        self._signing = signing
        self._changed = threading.Condition()
        """Guards the pipeline, and is notified of its events."""
        self._scanning = threading.Lock()
        with ExitStack() as opening:
            self._workers = opening.enter_context(Workers(threads))
            begun = channel_in(store, signing)
            opening.callback(self._unwatch)
            self._detector = self._watched(watch, begun)
            opening.callback(self._detector.close)
            if self._chooser.is_auto:
                seconds = ranking_seconds(self._detector.weights, self._workers)
                self._chooser.learn(lambda rates: replace(rates, ranking=seconds))
            self._open(store, begun)
            if cuts is None:
                self._replica_cuts = ReplicaCuts(self._chain)
                self._renew_cuts()
            self._release = opening.pop_all().close
        steps = (self._resolve_next, "weightcast-resolver"), (self._send_next, "weightcast-sender")
        self._threads = [threading.Thread(target=_repeat, args=(step,), name=name, daemon=True) for step, name in steps]
        for thread in self._threads:
            thread.start()

    def _watched(self, watch: Watch, begun: Chain | None) -> Detector:
        return watch(begun, self._coding, self._workers)

    def _open(self, store: Store, begun: Chain | None) -> None:
        """Begin the channel, or take it up."""
        watched = self._detector.weights
        if begun is None or begun.head() is None:
            init_signed(self._signing, store, watched, writer=self.writer, workers=self._workers)
        self._chain = open_for_writing(store, watched.table, self._signing)
        head, self._fingerprint, owed = take_up(self._chain, self._detector, self.writer, self._coding, self._workers)
        self._pipeline = Pipeline(head, owed)
        announce(self._chain, self.writer)

    @property
    def table(self) -> TensorTable:
        """The channel's tensors: what is published."""
        return self._chain.channel.table

    @property
    def position(self) -> Position:
        """The last durable commit."""
        return self._pipeline.head.position

    # -- scan: the caller's thread -------------------------------------------------------------------------------------

    def _add(self, scan: Callable[[], Scan], step: int | None, label: str | None, *, undoes: bool) -> Receipt:
        """Scan, and publish what that finds. ``undoes``: a scan that raises an `Exception` has recorded nothing."""
        receipt = Receipt(check_step(step), check_label(label), self._mark_raised)
        with self._scanning:  # one after the other: each scan begins where the one before ended
            with self._changed:
                self._changed.wait_for(lambda: self._pipeline.has_room or self._pipeline.is_over)
                self._pipeline.refuse_over()
            try:
                phases = Phases()
                with phases.phase("detect"):
                    found = scan()
                scanned = Scanned(found, receipt, self._before_scan() + phases.spans())
                with self._event() as pipeline:
                    pipeline.add(scanned)
            except UsageError:  # raised before anything was recorded
                raise
            except BaseException as error:
                # What an interrupted scan recorded, later patches would lack. A signal may come right after a scan.
                if not (undoes and isinstance(error, Exception)):
                    self._end(error)
                raise
        return receipt

    def _unwatch(self) -> None:
        """End what was begun beside the detector."""

    def _before_scan(self) -> tuple[Span, ...]:
        """What led to a scan."""
        return ()

    def _mark_raised(self) -> None:
        self._pipeline.was_raised = True

    @contextmanager
    def _event(self) -> Iterator[Pipeline]:
        """The pipeline, for an event that other threads may wait for."""
        with self._changed:
            yield self._pipeline
            self._changed.notify_all()

    def _end(self, error: BaseException) -> None:
        with self._event() as pipeline:
            pipeline.end(error)

    # -- resolve: in the background ------------------------------------------------------------------------------------

    def _resolve_next(self) -> bool:
        """Make a patch of the next scan, and merge it into what waits to be sent; False once all is over."""
        pipeline = self._pipeline
        with self._changed:
            self._changed.wait_for(lambda: pipeline.scanned is not None or pipeline.is_over)
            scanned = pipeline.scanned
        if scanned is None:
            return False
        phases = Phases()
        try:
            with phases.phase("resolve"):
                found = resolve(self._fingerprint, scanned.scan)
            self._fingerprint = found.reached
            update = Resolved(found.patch, found.prepared, (scanned.receipt,), scanned.spans + phases.spans())
            with self._changed:
                waiting = pipeline.begin_merge()
            if waiting is not None:
                update = update_of(merged(waiting, update))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach the receipts
            self._end(error)
            return False
        with self._event():
            pipeline.resolved(update)
        return True

    # -- encode, upload and commit: in the background ------------------------------------------------------------------

    def _send_next(self) -> bool:
        """Send what waits, or what failed before; False once all is over."""
        pipeline = self._pipeline
        with self._event():
            self._changed.wait_for(lambda: pipeline.can_send or pipeline.is_over)
            parts = pipeline.begin_send()
        if not parts:
            return False
        try:
            self._commit(joined(parts))
            self._renew_cuts()
        except (StoreError, SpaceError) as error:
            self._pause(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach the receipts
            with self._event():
                pipeline.sending_failed(error)
            return False
        return True

    def _commit(self, stage: Stage) -> None:
        """Bring an update from the stage it has reached into the channel."""
        head = self._pipeline.head
        if not changes(stage, head.position):  # an empty version would pause every engine for nothing
            with self._event() as pipeline:
                pipeline.committed(head, is_new=False)
            return
        while not isinstance(stage, Uploaded):
            self._reached(stage)
            stage = self._encode(stage) if isinstance(stage, Resolved) else self._upload(stage, head.position)
        self._reached(stage)
        phases = Phases()
        with phases.phase("commit"):
            manifest = self._chain.commit(stage.manifest)
        with self._event() as pipeline:
            pipeline.committed(manifest)
        self._emit(manifest, stage.update.spans + phases.spans())

    def _emit(self, manifest: Manifest, spans: Sequence[Span]) -> None:
        """Send the events of a version; receipts do not wait for that."""
        position = manifest.position
        self._emitter.emit(manifest.channel, position.version, position.digest, spans, manifest.step)

    def _reached(self, stage: Stage) -> None:
        with self._changed:
            self._pipeline.reached(stage)

    def _encode(self, update: Resolved) -> Encoded:
        changed, phases = update.patch.changed, Phases()
        codec = codec_for(update, self._chooser.codec(changed))
        with phases.phase("encode"):
            data = encode_prepared(update.patch, codec, prepared_for(codec, update, self._coding), self._workers)
        self._chooser.learn(lambda rates: rates.after_encoding(codec, changed, len(data), phases.seconds["encode"]))
        spans = update.spans + phases.spans({"encode": len(data)})
        return Encoded(replace(update, prepared=None, spans=spans), codec, data)

    def _upload(self, encoded: Encoded, base: Position) -> Uploaded:
        update, phases = encoded.update, Phases()
        position = Position(base.version + 1, update.patch.result)
        with phases.phase("upload"):
            ref = self._chain.put_delta(position, encoded.data)
        self._chooser.learn(lambda rates: rates.after_upload(ref.size, phases.seconds["upload"]))
        update = replace(update, spans=update.spans + phases.spans({"upload": ref.size}))
        manifest = self._chain.draft(
            position, base, ref, encoded.codec, update.patch.changed, update.step, self.writer, update.label
        )
        return Uploaded(update, manifest)

    def _renew_cuts(self) -> None:
        """Follow what replicas want, from the next scan on."""
        cuts = self._replica_cuts.news() if self._replica_cuts is not None else None
        if cuts is not None:
            self._coding.cutting.follow(cuts)

    def _pause(self, error: StoreError | SpaceError) -> None:
        """Keep what could not be sent until the next attempt, which is at once if a caller waits for it."""
        with self._changed:
            if self._pipeline.store_failed(error):
                _log.warning("not sent yet, will be tried again every %g s: %s", self._retry_after, error)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pipeline.is_hurried or self._pipeline.is_over, self._retry_after)
            self._pipeline.retry()

    # -- wait ----------------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> Position:
        """Wait until everything published is committed; raises what prevents it, and keeps it for another try."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            before = self._pipeline.failures
            while not self._pipeline.is_flushed(before):
                self._changed.notify_all()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError("not everything is committed yet")
                self._changed.wait(left)
            return self._pipeline.head.position

    def close(self) -> None:
        """`flush`, then end. If that fails, what is not committed is given up, and its receipts fail.

        Raises what prevented a commit, unless `publish`, `flush` or a receipt did already.
        """
        try:
            if self._pipeline.ended is None or not self._pipeline.was_raised:
                self.flush()
        finally:
            hint = "Open a publisher again: its first publish() sends what is missing."
            lost = StoreError("closed before this could be sent", url=self._chain.store.url, hint=hint)
            with self._event() as pipeline:
                pipeline.close(lost)
            self._join()
            self._release()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except WeightcastError as problem:
            if kind is None:
                raise
            _log.warning("not everything was sent: %s", problem)  # the caller must see what ended the block


def _repeat(step: Callable[[], bool]) -> None:
    """Do ``step`` until it says that all is over."""
    while step():
        pass
