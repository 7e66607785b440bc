"""Publishing: detect now, encode and commit behind. What cannot be sent yet is merged, not dropped and not piled up."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weightcast.bits import Bits, Copies, TensorSpec, TensorTable, Weights, elements_of, refuse_no_weights
from weightcast.chain import Chain
from weightcast.checkpoint import SINGLE, save
from weightcast.detect import diff_tensor, refuse_other_table
from weightcast.digest import Fingerprint, fingerprint
from weightcast.errors import BaseError, ChannelError, SpaceError, StoreError, UsageError
from weightcast.files import scratch
from weightcast.keys import Position, check_name
from weightcast.manifest import Lease, Manifest
from weightcast.notes import take_lease, write_index
from weightcast.patch import ModelSize, Patch, TensorPatch, advance, compose
from weightcast.policy import Pinned
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.probe import honours_create
from weightcast.subscriber import Subscriber
from weightcast.wire import encode
from weightcast.workers import Workers

_RETRY_AFTER = 5.0
"""Seconds after which an upload that failed, all retries of the store included, is tried again."""


class Receipt:
    """What became of a `publish`: `result` waits for the commit that carries it, and so does `await`."""

    def __init__(self, step: int | None):
        self.step = step
        self._future: Future[Manifest] = Future()
        self._future.set_running_or_notify_cancel()  # a task that awaits it may be cancelled, the commit may not

    def result(self, timeout: float | None = None) -> Manifest:
        """The commit; raises what prevented it, or `TimeoutError`."""
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Manifest]:
        return asyncio.wrap_future(self._future).__await__()


@dataclass
class _Job:
    """A patch on its way, and those who wait for it."""

    patch: Patch
    base: Copies | None
    """The weights it begins from; gone for a merged patch, which is coded without them."""
    step: int | None
    receipts: list[Receipt]
    coded: tuple[str, bytes] | None = None
    """Codec and bytes, once they are made."""
    manifest: Manifest | None = None
    """Set once a commit was tried: from then on it is this one or a conflict, since the store may have taken it."""

    def merged(self, later: _Job) -> _Job:
        step = later.step if later.step is not None else self.step
        return _Job(compose(self.patch, later.patch), None, step, self.receipts + later.receipts)


class Publisher:
    """The one writer of a channel.

    `publish` returns once it knows what changed; coding and upload go on in the background. While one patch is under
    way the next waits, and those that come meanwhile are merged into it.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        weights: Weights,
        *,
        codec: str = "banded",
        writer: str | None = None,
        threads: int | None = None,
    ):
        """Take up the channel where it is. Weights that are not the head's are published as a first patch.

        ``weights`` are what `publish` reads from then on: arrays that training changes in place, for one.
        """
        refuse_no_weights(weights)
        self.writer = check_name(writer, "writer") if writer else new_writer()
        self._weights, self._codec = weights, codec
        self._chain = open_for_writing(channel, weights.table, self.writer)
        self._workers = Workers(threads)
        self._lock = threading.Condition()
        self._detecting = threading.Lock()
        self._active: _Job | None = None
        self._again: _Job | None = None
        self._pending: _Job | None = None
        self._kicked = self._closing = False
        self._failures = 0
        self._failure: StoreError | SpaceError | None = None
        self._dead: BaseException | None = None
        try:
            self._shadow = Copies.of(weights)
            self._standing = fingerprint(self._shadow, self._workers)
            self._committed = self._take_up()
            announce(self._chain, self.writer)
        except BaseException:
            self._workers.close()
            raise
        self._thread = threading.Thread(target=self._run, name="weightcast-publisher", daemon=True)
        self._thread.start()

    @property
    def position(self) -> Position:
        """What is durably committed."""
        return self._committed

    # -- take up the channel -------------------------------------------------------------------------------------------

    def _take_up(self) -> Position:
        head = self._chain.head()
        if head is None:
            hint = "Finish it with `weightcast init URL CHECKPOINT`."
            raise ChannelError("the channel has no version yet", file=self._chain.store.url, hint=hint)
        if head.position.digest == self._standing.position:
            return head.position
        state = Copies.of(self._shadow)
        try:
            with Subscriber(self._chain.store, state, Pinned(head.position.version)) as subscriber:
                staged = subscriber.poll()
                if staged is not None:
                    subscriber.apply(staged)
        except ChannelError:
            return self._publish_anchor(head.position.version + 1)
        patch = self._diff(state, Fingerprint(state.table, staged.standing.digests) if staged else self._standing)
        job = _Job(patch, state, None, [])
        self._committed = head.position
        self._commit(job)
        return self._committed

    def _publish_anchor(self, version: int) -> Position:
        """Where the head's own weights cannot be had any more, ours begin anew."""
        position = Position(version, self._standing.position)
        with scratch() as folder:
            save(self._shadow, folder)
            ref = self._chain.put_anchor(position, {SINGLE: folder / SINGLE})
        elements = self._shadow.table.elements
        self._chain.commit(self._chain.draft(position, None, ref, None, elements, None, self.writer))
        write_index(self._chain)
        return position

    # -- detect --------------------------------------------------------------------------------------------------------

    def publish(self, step: int | None = None, weights: Weights | None = None) -> Receipt:
        """Publish the weights as they are now, or other ``weights`` of the same table. Returns after detection."""
        with self._lock:
            self._refuse_dead()
        source = weights if weights is not None else self._weights
        refuse_other_table(self._shadow.table, source.table)
        receipt = Receipt(step)
        with self._detecting:  # one behind the other: each begins where the one before ended
            base, standing = self._shadow, self._standing
            patch, tensors = self._detect(source, base, standing)
            job = _Job(patch, base, step, [receipt])
            reached = advance(standing, patch)
            with self._lock:
                self._refuse_dead()
                self._pending = job if self._pending is None else self._pending.merged(job)
                self._lock.notify_all()
            self._shadow, self._standing = base.with_tensors(tensors), reached
        return receipt

    def _refuse_dead(self) -> None:
        if self._closing:
            raise UsageError("the publisher is closed", hint="Open a new one: it goes on from the head.")
        if self._dead is not None:
            raise self._dead

    def _detect(self, new: Weights, base: Copies, standing: Fingerprint) -> tuple[Patch, dict[str, Bits]]:
        def one(spec: TensorSpec) -> tuple[TensorPatch, Bits]:
            # Training may go on while we look: take the bits once.
            now = new.read(spec.name).copy()
            return diff_tensor(spec, base.read(spec.name), now, standing[spec.name], self._workers), now

        found = list(self._workers.stream(one, base.table, elements_of))
        reached = Fingerprint(base.table, tuple(tensor.digest for tensor, _ in found))
        changed = {tensor.spec.name: bits for tensor, bits in found if tensor.changed}
        tensors = tuple(tensor for tensor, _ in found if tensor.changed)
        return Patch(standing.position, reached.position, ModelSize.of(base.table), tensors), changed

    def _diff(self, old: Copies, standing: Fingerprint) -> Patch:
        return self._detect(self._shadow, old, standing)[0]

    # -- encode and commit, behind ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._again is None and self._pending is None and not self._closing:
                    self._lock.wait()
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
        if job.manifest is None:
            if job.patch.base != self._committed.digest:
                problem, found = "the patch does not begin at the last commit", str(job.patch.base)
                raise BaseError(problem, expected=self._committed.digest, found=found)
            codec, data = job.coded = job.coded or self._encode(job)
            position = Position(self._committed.version + 1, job.patch.result)
            ref = self._chain.put_delta(position, data)
            changed = job.patch.changed
            job.manifest = self._chain.draft(position, self._committed, ref, codec, changed, job.step, self.writer)
        self._chain.commit(job.manifest)
        self._committed = job.manifest.position
        for receipt in job.receipts:
            receipt._future.set_result(job.manifest)

    def _encode(self, job: _Job) -> tuple[str, bytes]:
        codec = self._codec if job.base is not None else "gap"
        data = encode(job.patch, codec, job.base, self._workers)
        job.base = None
        return codec, data

    def _put_back(self, job: _Job, error: StoreError | SpaceError) -> None:
        """Keep what could not be sent, and wait a while, or until someone is in a hurry."""
        with self._lock:
            self._failure, self._failures = error, self._failures + 1
            self._again = job
            self._active = None
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._kicked or self._closing, _RETRY_AFTER)

    def _die(self, jobs: list[_Job | None], error: BaseException) -> None:
        with self._lock:
            self._dead = error
            _fail([*jobs, self._again, self._pending], error)
            self._active = self._again = self._pending = None
            self._lock.notify_all()

    def _give_up(self) -> None:
        hint = "Open a publisher again: it publishes what is missing."
        lost = StoreError("closed before this could be sent", url=self._chain.store.url, hint=hint)
        if self._again is not None or self._pending is not None:
            self._dead = lost
        _fail([self._again, self._pending], lost)
        self._again = self._pending = None
        self._lock.notify_all()

    # -- wait ----------------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> Position:
        """Wait until all that was published is committed; raises what prevents it, and keeps it for another try."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            before = self._failures
            while any(job is not None for job in (self._active, self._again, self._pending)):
                self._kicked = True
                self._lock.notify_all()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError("not everything is committed yet")
                self._lock.wait(left)
                if self._failures > before and self._failure is not None:
                    raise self._failure
            if self._dead is not None:
                raise self._dead
            return self._committed

    def close(self) -> None:
        """`flush`, then end. If that fails, what is not committed is given up: the receipts say so."""
        try:
            if self._dead is None:
                self.flush()
        finally:
            with self._lock:
                self._closing = True
                self._lock.notify_all()
            self._thread.join()
            self._workers.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _fail(jobs: list[_Job | None], error: BaseException) -> None:
    for job in jobs:
        for receipt in job.receipts if job is not None else ():
            if not receipt.done():
                receipt._future.set_exception(error)


def new_writer() -> str:
    """A name that no other writer has."""
    host = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname())[:60].strip("-.") or "host"
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def open_for_writing(channel: str | Path | Store, table: TensorTable, writer: str) -> Chain:
    """The channel, once it is sure that its store can fence writers off as it should, and that the table is its own."""
    chain = Chain.open(open_store(channel) if isinstance(channel, (str, Path)) else channel)
    try:
        refuse_other_table(chain.channel.table, table)
    except UsageError as error:
        hint = "A channel has one table for ever: publish to another place, or start over with `weightcast reset`."
        raise UsageError(error.problem, tensor=error.tensor, hint=hint) from None
    if chain.channel.fence == "create" and not honours_create(chain.store):
        hint = "Two writers could overwrite each other here. Use the store that the channel was made on."
        raise ChannelError("this store does not honour create-if-absent", file=chain.store.url, hint=hint)
    return chain


def announce(chain: Chain, writer: str) -> None:
    """Say who writes."""
    take_lease(chain, Lease(writer, socket.gethostname() or "host", os.getpid(), time.time()))
