"""Publishing: detect now, encode and commit behind. What cannot be sent yet is merged, not dropped and not piled up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeGuard, cast

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position, check_name, check_step
from weightcast.channel.policy import Pinned
from weightcast.channel.records import Manifest
from weightcast.disk.checkpoint import SINGLE, save
from weightcast.disk.durable import scratch
from weightcast.errors import (
    BaseError,
    NoRouteError,
    SpaceError,
    StoreError,
    UnreachableError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.subscriber import Subscriber
from weightcast.format.codec import check_codec
from weightcast.format.codec.ranks import Ranks
from weightcast.format.digest import Fingerprint, fingerprint
from weightcast.format.patch import Patch, compose
from weightcast.format.patchfile import encode
from weightcast.format.scan import Detector, Scan, Shadowed, resolve
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Copies, Weights, refuse_no_weights
from weightcast.format.workers import Workers
from weightcast.publish.open import announce, channel_in, init, new_writer, open_for_writing
from weightcast.publish.receipt import Receipt
from weightcast.store import open_store
from weightcast.store.base import Store

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("weightcast")

_RETRY_AFTER = 5.0
"""Seconds after which an upload that failed, all retries of the store included, is tried again."""

_AHEAD = 2
"""Looks that may wait to be merged before `publish` waits: each holds what changed, and nothing else bounds them."""


@dataclass
class _Seen:
    """A look at the weights that is no patch yet."""

    look: Scan
    step: int | None
    receipts: list[Receipt]


@dataclass
class _Job:
    """A patch on its way, and those who wait for it."""

    patch: Patch
    ranks: Mapping[str, Ranks] | None
    """What `banded` needs; a merged patch has none."""
    step: int | None
    receipts: list[Receipt]
    coded: tuple[str, bytes] | None = None
    """Codec and bytes, once they are made."""
    manifest: Manifest | None = None
    """Set once a commit was tried: from then on it is this one or a conflict, since the store may have taken it."""

    def merged(self, later: _Job) -> _Job:
        step = later.step if later.step is not None else self.step
        receipts = self.receipts + later.receipts
        if not later.patch.tensors:  # keep the ranks: the smallest codec needs them
            return replace(self, step=step, receipts=receipts)
        return _Job(compose(self.patch, later.patch), None, step, receipts)


class Publisher:
    """The one writer of a channel.

    `publish` returns once it knows what changed; coding and upload go on in the background. While one patch is under
    way the next waits, and those that come meanwhile are merged into it.

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
        detect: str | None = None,
        dtype: str | None = None,
        check_every: int | None = None,
        codec: str = "banded",
        writer: str | None = None,
        threads: int | None = None,
    ):
        """Take up the channel where it is, or begin it. Nothing but a channel's version 0 is committed here: where the
        weights are not the head's, the first `publish` carries the difference. If the head's own weights cannot be had
        any more, these become an anchor at once.

        ``weights`` are what `publish` reads from then on: a torch model, or arrays that training changes in place.

        For a model: ``optimizer`` is what changes it, one or several; ``detect`` how changes are found
        (`weightcast.torch.detectors`); ``dtype`` in which float32 tensors are published where the channel is new, as
        "BF16". What bypassed the optimizer is found by digesting the model where it is: at each publish on a GPU, at
        every ``check_every``-th (50th) on a CPU, where it costs more and patches are checked behind anyway.
        """
        self.writer = check_name(writer, "writer") if writer else new_writer()
        self._codec = check_codec(codec)
        self._workers = Workers(threads)
        self._lock = threading.Condition()
        self._detecting = threading.Lock()
        self._seen: deque[_Seen] = deque()
        self._active: _Job | None = None
        self._again: _Job | None = None
        self._pending: _Job | None = None
        self._kicked = self._closing = False
        self._failures = self._looks = self._settled = self._awaited = 0
        self._failure: StoreError | SpaceError | None = None
        self._dead: BaseException | None = None
        self._told = False
        """Whether the caller has heard what it died of."""
        store = open_store(channel)
        try:
            begun = channel_in(store)
            self._detector = self._watch(weights, optimizer, detect, dtype, check_every, begun)
        except BaseException:
            self._workers.close()
            raise
        try:
            if begun is None or begun.head() is None:
                init(store, self._detector.weights, writer=self.writer, workers=self._workers)
            self._chain = open_for_writing(store, self._detector.weights.table)
            self._fingerprint = fingerprint(self._detector.weights, self._workers)
            self._head, self._owed = self._take_up()
            announce(self._chain, self.writer)
        except BaseException:
            self._detector.close()
            self._workers.close()
            raise
        threads_of_mine = (self._settle, "weightcast-settling"), (self._run, "weightcast-publisher")
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run, name in threads_of_mine]
        for thread in self._threads:
            thread.start()

    def _watch(
        self,
        weights: Weights | torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        detect: str | None,
        dtype: str | None,
        check_every: int | None,
        begun: Chain | None,
    ) -> Detector:
        ranked = self._codec == "banded"
        if _is_module(weights):  # asked first: a module has no table
            from weightcast.torch.detectors import watch

            table = begun.channel.table if begun is not None else None
            return watch(weights, optimizer, detect, dtype, check_every, table, ranked, self._workers)
        if optimizer is not None or detect is not None or dtype is not None:
            raise UsageError("optimizer, detect and dtype are for a torch model", hint="Pass the model itself.")
        refuse_no_weights(weights)
        return Shadowed(cast(Weights, weights), ranked, self._workers)

    @property
    def table(self) -> TensorTable:
        """What is published: the channel's tensors."""
        return self._chain.channel.table

    @property
    def position(self) -> Position:
        """What is durably committed."""
        return self._head.position

    # -- take up the channel -------------------------------------------------------------------------------------------

    def _take_up(self) -> tuple[Manifest, _Job | None]:
        """The head, and what leads from there to our weights, if they differ."""
        head = self._chain.head()
        assert head is not None
        if head.position.digest == self._fingerprint.digest:
            return head, None
        now = Copies.of(self._detector.weights)
        state = Copies.of(now)
        try:
            with Subscriber(self._chain.store, state, Pinned(head.position.version)) as subscriber:
                staged = subscriber.poll()
                if staged is not None:
                    subscriber.apply(staged)
        except NoRouteError as error:
            if isinstance(error.reason, UnreachableError):  # what cannot be had now may be had in a minute
                raise
            return self._publish_anchor(now, head.position.version + 1), None
        standing = Fingerprint(state.table, staged.fingerprint.digests) if staged else self._fingerprint
        found = resolve(standing, Shadowed(state, self._codec == "banded", self._workers).scan(now))
        return head, _Job(found.patch, found.ranks, None, [])

    def _publish_anchor(self, weights: Weights, version: int) -> Manifest:
        """Where the head's own weights cannot be had any more, ours begin anew."""
        position = Position(version, self._fingerprint.digest)
        with scratch() as folder:
            save(weights, folder)
            ref = self._chain.put_anchor(position, {SINGLE: folder / SINGLE})
        elements = weights.table.elements
        manifest = self._chain.draft(position, None, ref, None, elements, None, self.writer)
        self._chain.commit(manifest)
        write_index(self._chain)
        return manifest

    # -- detect --------------------------------------------------------------------------------------------------------

    def publish(self, step: int | None = None, weights: Weights | None = None) -> Receipt:
        """Publish the weights as they are now, or other ``weights`` of the same table. Returns after detection."""
        step = check_step(step)
        receipt = Receipt(step, self._was_told)
        with self._detecting:  # one behind the other: each begins where the one before ended
            with self._lock:
                self._lock.wait_for(lambda: len(self._seen) < _AHEAD or self._closing or self._dead is not None)
                self._refuse_dead()
            look = self._look(weights)
            with self._lock:
                self._refuse_dead()
                self._seen.append(_Seen(look, step, [receipt]))
                self._looks += 1
                self._lock.notify_all()
        return receipt

    def _look(self, weights: Weights | None) -> Scan:
        if weights is None:
            try:
                return self._detector.scan()
            except UsageError:  # before anything was looked at
                raise
            except BaseException as error:  # some of what changed has been seen, and is lost with this
                self._die([], error)
                raise
        if not isinstance(self._detector, Shadowed):
            raise UsageError(
                "a publisher of a model publishes that model", hint="Call publish(step=…) without weights."
            )
        refuse_no_weights(weights)
        return self._detector.scan(weights)

    def _was_told(self) -> None:
        self._told = True

    def _refuse_dead(self) -> None:
        if self._closing:
            raise UsageError("the publisher is closed", hint="Open a new one: it goes on from the head.")
        if self._dead is not None:
            self._told = True
            raise self._dead

    # -- settle and merge, behind --------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Make patches of what was seen, and merge those that wait for the one under way."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._seen or self._closing or self._dead is not None)
                if not self._seen or self._dead is not None:
                    return
                seen = self._seen[0]
            waiting = None
            try:
                found = resolve(self._fingerprint, seen.look)
                self._fingerprint = found.reached
                job = _Job(found.patch, found.ranks, seen.step, seen.receipts)
                if self._owed is not None:
                    job, self._owed = self._owed.merged(job), None
                with self._lock:
                    waiting, self._pending = self._pending, None
                if waiting is not None:
                    job = waiting.merged(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                self._die([waiting], error)
                return
            with self._lock:
                if self._dead is None:
                    self._seen.popleft()
                    self._settled += 1
                    self._pending = job
                else:
                    _fail([job], self._dead)
                self._lock.notify_all()

    # -- encode and commit, behind ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing or self._dead is not None or self._has_work())
                if self._dead is not None:
                    return
                if self._closing and (self._failure is not None or self._pending is None):
                    self._give_up()
                    return
                self._active, later = self._next()
                self._kicked = False
            job = self._active
            try:
                if later is not None:
                    job = job.merged(later)
                self._commit(job)
            except (StoreError, SpaceError) as error:
                self._put_back(job, error)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                self._die([job, later], error)
                return
            else:
                with self._lock:
                    self._active, self._failure = None, None
                    self._lock.notify_all()

    def _has_work(self) -> bool:
        """Something to send. What failed goes together with what had been seen when its turn came again."""
        return self._pending is not None if self._again is None else self._settled >= self._awaited

    def _next(self) -> tuple[_Job, _Job | None]:
        """What to send now. What failed before a commit was tried goes together with what came meanwhile."""
        failed, waiting = self._again, self._pending
        self._again = None
        if failed is not None and (waiting is None or failed.manifest is not None):
            return failed, None
        assert waiting is not None
        self._pending = None
        return (waiting, None) if failed is None else (failed, waiting)

    def _commit(self, job: _Job) -> None:
        committed = self._head.position
        if job.patch.base == job.patch.result == committed.digest:
            # An empty version would pause every engine for nothing.
            for receipt in job.receipts:
                receipt.succeed(self._head, is_new=False)
            return
        if job.manifest is None:
            if job.patch.base != committed.digest:
                problem, found = "the patch does not begin at the last commit", str(job.patch.base)
                raise BaseError(problem, expected=committed.digest, found=found)
            codec, data = job.coded = job.coded or self._encode(job)
            position = Position(committed.version + 1, job.patch.result)
            ref = self._chain.put_delta(position, data)
            changed = job.patch.changed
            job.manifest = self._chain.draft(position, committed, ref, codec, changed, job.step, self.writer)
        self._chain.commit(job.manifest)
        self._head = job.manifest
        for receipt in job.receipts:
            receipt.succeed(job.manifest)

    def _encode(self, job: _Job) -> tuple[str, bytes]:
        codec = self._codec
        if any(tensor.old is None for tensor in job.patch.tensors):
            codec = "plain"
        elif codec == "banded" and job.ranks is None:
            codec = "gap"
        data = encode(job.patch, codec, job.ranks, self._workers)
        job.ranks = None
        return codec, data

    def _put_back(self, job: _Job, error: StoreError | SpaceError) -> None:
        """Keep what could not be sent, and wait a while, or until someone is in a hurry."""
        with self._lock:
            if self._failure is None:
                _log.warning("not sent yet, and tried again every few seconds: %s", error)
            self._failure, self._failures = error, self._failures + 1
            self._active = None
            if self._dead is not None:
                _fail([job], self._dead)
                self._lock.notify_all()
                return
            self._again = job
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._kicked or self._closing or self._dead is not None, _RETRY_AFTER)
            self._awaited = self._looks

    def _die(self, jobs: Sequence[_Job | None], error: BaseException) -> None:
        with self._lock:
            self._dead = error
            _fail([*jobs, self._again, self._pending, *self._seen], error)
            self._active = self._again = self._pending = None
            self._seen.clear()
            self._lock.notify_all()

    def _give_up(self) -> None:
        hint = "Open a publisher again: its first publish() sends what is missing."
        lost = StoreError("closed before this could be sent", url=self._chain.store.url, hint=hint)
        if self._again is not None or self._pending is not None or self._seen:
            self._dead, self._told = lost, True
        _fail([self._again, self._pending, *self._seen], lost)
        self._again = self._pending = None
        self._seen.clear()
        self._lock.notify_all()

    # -- wait ----------------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> Position:
        """Wait until all that was published is committed; raises what prevents it, and keeps it for another try."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            before = self._failures
            while self._seen or any(job is not None for job in (self._active, self._again, self._pending)):
                self._kicked = True
                self._lock.notify_all()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError("not everything is committed yet")
                self._lock.wait(left)
                if self._failures > before and self._failure is not None:
                    raise self._failure
            if self._dead is not None:
                self._told = True
                raise self._dead
            return self._head.position

    def close(self) -> None:
        """`flush`, then end. If that fails, what is not committed is given up: the receipts say so.

        Raises what prevented a commit, unless `publish`, `flush` or a receipt did already.
        """
        try:
            if self._dead is None or not self._told:
                self.flush()
        finally:
            with self._lock:
                self._closing = True
                self._lock.notify_all()
            for thread in self._threads:
                thread.join()
            self._detector.close()
            self._workers.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except WeightcastError as problem:
            if kind is None:
                raise
            _log.warning("not everything was sent: %s", problem)  # what ended the block is what the caller must see


def _is_module(weights: object) -> TypeGuard[torch.nn.Module]:
    """Without importing torch, which may not be here."""
    return hasattr(weights, "named_parameters")


def _fail(jobs: Sequence[_Job | _Seen | None], error: BaseException) -> None:
    for job in jobs:
        for receipt in job.receipts if job is not None else ():
            receipt.fail(error)
