"""The publisher: detects changes now, encodes and commits them in the background.

`weightcast.publish.pipeline` decides which update is where, and how each receipt is resolved. Here are the threads
around it: the trainer's, which scans; one that resolves scans; one that encodes, uploads and commits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position, check_label, check_name, check_step
from weightcast.errors import SpaceError, StoreError, UsageError, WeightcastError
from weightcast.format.codec import CodecName, check_codec
from weightcast.format.patchfile import encode_prepared
from weightcast.format.scan import (
    Detect,
    Detector,
    Scan,
    Shadowed,
    WireDtype,
    check_detect,
    check_wire_dtype,
    resolve,
)
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Weights, is_module, refuse_no_weights
from weightcast.format.workers import Workers
from weightcast.publish.open import announce, channel_in, init, new_writer, open_for_writing, take_up
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
    update_of,
)
from weightcast.publish.receipt import Receipt
from weightcast.store import open_store
from weightcast.store.base import Store

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("weightcast")


class Publisher:
    """The one writer of a channel.

    `publish` returns once it knows what changed; encoding and upload go on in the background. While one patch is being
    sent the next one waits, and everything published meanwhile is merged into it.

    >>> weights = wc.Arrays({"w": np.zeros(4, np.float32)})
    >>> with wc.Publisher("channel", weights) as publisher:
    ...     weights.read("w")[1] = 0x3F800000
    ...     receipt = publisher.publish(step=1)
    >>> receipt.result().position.version, receipt.result().changed
    (1, 1)
    """

    def __init__(
        self,
        channel: str | Path | Store,
        weights: Weights | torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        detect: Detect | None = None,
        dtype: WireDtype | torch.dtype | None = None,
        check_every: int | None = None,
        codec: CodecName = "banded",
        writer: str | None = None,
        threads: int | None = None,
        retry_after: float = 5.0,
    ):
        """Take up the channel where it is, or begin it. Only a channel's version 0 is committed here: where the weights
        are not the head's, the first `publish` carries the difference. If the head's own weights cannot be fetched any
        more, these are committed as an anchor at once.

        ``weights`` are what `publish` reads from then on: a torch model, or arrays that training changes in place.

        For a model: ``optimizer`` is what changes it, one or several; ``detect`` selects how changes are found
        (`weightcast.torch.detectors`); ``dtype`` is what float32 tensors are published as where the channel is new,
        such as "BF16". Changes that bypass the optimizer are found by digesting the model in place: at each publish on
        a GPU, at every ``check_every``-th (50th) on a CPU, where it costs more and patches are checked in the
        background anyway.

        An upload that fails, after all retries of the store, is tried again after ``retry_after`` seconds.
        """
        self.writer = check_name(writer, "writer") if writer else new_writer()
        self._codec = check_codec(codec)
        if detect is not None:
            check_detect(detect)
        if isinstance(dtype, str):
            check_wire_dtype(dtype)
        self._retry_after = retry_after
        self._changed = threading.Condition()
        """Guards the pipeline, and is notified of its events."""
        self._scanning = threading.Lock()
        store = open_store(channel)
        with ExitStack() as opening:
            self._workers = opening.enter_context(Workers(threads))
            begun = channel_in(store)
            self._detector = self._watch(weights, optimizer, detect, dtype, check_every, begun)
            opening.callback(self._detector.close)
            watched = self._detector.weights
            if begun is None or begun.head() is None:
                init(store, watched, writer=self.writer, workers=self._workers)
            self._chain = open_for_writing(store, watched.table)
            head, self._fingerprint, owed = take_up(
                self._chain, self._detector, self.writer, self._ranked, self._workers
            )
            self._pipeline = Pipeline(head, owed)
            announce(self._chain, self.writer)
            self._release = opening.pop_all().close
        steps = (self._resolve_next, "weightcast-resolver"), (self._send_next, "weightcast-sender")
        self._threads = [threading.Thread(target=_repeat, args=(step,), name=name, daemon=True) for step, name in steps]
        for thread in self._threads:
            thread.start()

    def _watch(
        self,
        weights: Weights | torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        detect: Detect | None,
        dtype: WireDtype | torch.dtype | None,
        check_every: int | None,
        begun: Chain | None,
    ) -> Detector:
        if is_module(weights):  # before all else: a module has no table
            from weightcast.torch.detectors import watch

            table = begun.channel.table if begun is not None else None
            return watch(weights, optimizer, detect, dtype, check_every, table, self._codec, self._workers)
        refuse_no_weights(weights)
        if optimizer is not None or detect is not None or dtype is not None:
            raise UsageError("optimizer, detect and dtype are for a torch model", hint="Pass the model itself.")
        return Shadowed(cast(Weights, weights), self._ranked, self._workers)

    @property
    def _ranked(self) -> bool:
        """Whether the codec needs the rank of each change."""
        return self._codec == "banded"

    @property
    def table(self) -> TensorTable:
        """The channel's tensors: what is published."""
        return self._chain.channel.table

    @property
    def position(self) -> Position:
        """The last durable commit."""
        return self._pipeline.head.position

    # -- scan: the trainer's thread ------------------------------------------------------------------------------------

    def publish(self, step: int | None = None, weights: Weights | None = None, label: str | None = None) -> Receipt:
        """Publish the weights as they are now, or other ``weights`` of the same table. Returns after detection.

        ``label`` is one line for people, which `weightcast log` shows. Updates that are merged into one version carry
        the last step and the last label given. Where nothing changed there is no version, and so no label.
        """
        receipt = Receipt(check_step(step), check_label(label), self._mark_raised)
        with self._scanning:  # one after the other: each scan begins where the one before ended
            with self._changed:
                self._changed.wait_for(lambda: self._pipeline.has_room or self._pipeline.is_over)
                self._pipeline.refuse_over()
            try:
                scanned = Scanned(self._scan(weights), receipt)
                with self._event() as pipeline:
                    pipeline.add(scanned)
            except UsageError:  # raised before anything was scanned
                raise
            except BaseException as error:
                # A model's scan that is interrupted has recorded changes that later patches would lack.
                # Other weights are recorded at the end, but a signal may come right after that.
                if weights is None or not isinstance(error, Exception):
                    self._end(error)
                raise
        return receipt

    def _scan(self, weights: Weights | None) -> Scan:
        if weights is None:
            return self._detector.scan()
        if not isinstance(self._detector, Shadowed):
            hint = "Call publish(step=…) without weights."
            raise UsageError("the publisher of a model publishes that model only", hint=hint)
        refuse_no_weights(weights)
        return self._detector.scan(weights)

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
        try:
            found = resolve(self._fingerprint, scanned.scan)
            self._fingerprint = found.reached
            update = Resolved(found.patch, found.prepared, (scanned.receipt,))
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
        self._chain.commit(stage.manifest)
        with self._event() as pipeline:
            pipeline.committed(stage.manifest)

    def _reached(self, stage: Stage) -> None:
        with self._changed:
            self._pipeline.reached(stage)

    def _encode(self, update: Resolved) -> Encoded:
        codec = codec_for(update, self._codec)
        data = encode_prepared(update.patch, codec, update.prepared, self._workers)
        return Encoded(replace(update, prepared=None), codec, data)

    def _upload(self, encoded: Encoded, base: Position) -> Uploaded:
        update = encoded.update
        position = Position(base.version + 1, update.patch.result)
        ref = self._chain.put_delta(position, encoded.data)
        manifest = self._chain.draft(
            position, base, ref, encoded.codec, update.patch.changed, update.step, self.writer, update.label
        )
        return Uploaded(update, manifest)

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
            for thread in self._threads:
                thread.join()
            self._release()

    def __enter__(self) -> Publisher:
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
