"""The updates of a publisher as states and events: no thread, no lock, no clock, no I/O.

An update passes through `Scanned`, `Resolved`, `Encoded` and `Uploaded`; then it is committed. `Pipeline` knows which
updates are where, which are merged, what is tried again after the store failed, and how each receipt is resolved. The
caller (`weightcast.publish.publisher`) does the work and reports each event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.errors import BaseError, SpaceError, StoreError, UsageError
from weightcast.events.phases import Span
from weightcast.format.codec import CodecName
from weightcast.format.codec.coded import Parts, Prepared
from weightcast.format.coding import Coding
from weightcast.format.patch import Patch, compose
from weightcast.format.scan import Scan
from weightcast.publish.receipt import Receipt

AHEAD = 2
"""Scans that may wait to be resolved before `publish` waits: each holds what changed, and nothing else limits them."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Scanned:
    """A scan whose changes may still be on a device."""

    scan: Scan
    receipt: Receipt
    spans: tuple[Span, ...] = ()
    """What it took, as far as it has come; so in later states."""


@dataclass(frozen=True, eq=False)
class Resolved:
    """A patch, and the receipts of every `publish` that it carries.

    Without receipts it is *owed*: not published yet, so it waits to be merged into the first update that is.
    """

    patch: Patch
    prepared: Mapping[str, Prepared | Parts] | None
    """What `banded` needs, or what a device coded; None for a merged patch."""
    receipts: tuple[Receipt, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def step(self) -> int | None:
        """The last one given."""
        return _last(receipt.step for receipt in self.receipts)

    @property
    def label(self) -> str | None:
        """The last one given."""
        return _last(receipt.label for receipt in self.receipts)


def _last(given: Iterable[T | None]) -> T | None:
    known = [value for value in given if value is not None]
    return known[-1] if known else None


@dataclass(frozen=True, eq=False)
class Encoded:
    """Bytes that are to be uploaded; they are kept when the upload fails."""

    update: Resolved
    codec: CodecName
    data: bytes


@dataclass(frozen=True, eq=False)
class Uploaded:
    """A commit that is being tried. From now on it is this one or a conflict: the store may have taken it already."""

    update: Resolved
    manifest: Manifest


Stage = Resolved | Encoded | Uploaded


def update_of(stage: Stage) -> Resolved:
    return stage if isinstance(stage, Resolved) else stage.update


def merged(first: Stage, later: Resolved) -> Stage:
    """One update that carries both. A commit that was tried cannot be merged any more."""
    assert not isinstance(first, Uploaded)
    update = update_of(first)
    receipts, spans = update.receipts + later.receipts, update.spans + later.spans
    if later.patch.tensors:
        # What the smallest codec needs is right for a change of what was there before alone.
        prepared = None if update.patch.tensors else later.prepared
        return Resolved(compose(update.patch, later.patch), prepared, receipts, spans)
    # Nothing changed since: keep what the smallest codec needs, and the bytes.
    same = replace(update, receipts=receipts, spans=spans)
    return replace(first, update=same) if isinstance(first, Encoded) else same


def joined(parts: Sequence[Stage]) -> Stage:
    """What is sent together, as one update."""
    first, *later = parts
    return reduce(merged, map(update_of, later), first)


def changes(stage: Stage, head: Position) -> bool:
    """Whether it leads away from the head; `BaseError` if it does not begin there."""
    patch = update_of(stage).patch
    if patch.base == patch.result == head.digest:
        return False
    if patch.base != head.digest:
        raise BaseError("the patch does not begin at the last commit", expected=head.digest, found=str(patch.base))
    return True


def codec_for(update: Resolved, wanted: CodecName) -> CodecName:
    """The codec that can carry the patch: `plain` without the old bits, `gap` where `banded` is not prepared."""
    if any(tensor.old is None for tensor in update.patch.tensors):
        return "plain"
    return "gap" if wanted == "banded" and update.prepared is None else wanted


def prepared_for(codec: CodecName, update: Resolved, coding: Coding) -> Mapping[str, Prepared | Parts] | None:
    """What was prepared for a codec; nothing for another one, since a device may have coded the blocks already."""
    return update.prepared if codec == coding.codec else None


class Pipeline:
    """All updates of one publisher. At most one is being sent; all that are resolved meanwhile become the next one."""

    def __init__(self, head: Manifest, owed: Resolved | None = None):
        """``owed`` leads from the head to the weights, where they differ when the publisher opens."""
        self.head = head
        """The last commit."""
        self.ended: BaseException | None = None
        """What ended it for good."""
        self.is_closing = False
        self.was_raised = False
        """Whether what ended it was raised to the caller."""
        self.failures = 0
        """How often the store has failed."""
        self.is_hurried = False
        """Whether a caller waits for what failed: it is retried at once."""
        self._scanned: deque[Scanned] = deque()
        self._merging: Resolved | None = None
        self._waiting = owed
        self._sending: tuple[Stage, ...] = ()
        self._failed: Stage | None = None
        self._lacking: int | None = None
        """What failed is tried again once this many more scans are resolved; None until its pause is over."""
        self._failure: StoreError | SpaceError | None = None
        self._lost: StoreError | None = None

    @property
    def is_over(self) -> bool:
        return self.is_closing or self.ended is not None

    # -- scan ----------------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another scan may be taken."""
        return len(self._scanned) < AHEAD

    def refuse_over(self) -> None:
        """Raise why nothing can be published any more, if so."""
        if self.is_closing:
            raise UsageError("the publisher is closed", hint="Open a new one: it goes on from the head.")
        if self.ended is not None:
            self.was_raised = True
            raise self.ended

    def add(self, scanned: Scanned) -> None:
        self.refuse_over()
        self._scanned.append(scanned)

    # -- resolve and merge -----------------------------------------------------------------------------------------

    @property
    def scanned(self) -> Scanned | None:
        """What is to be resolved next. It stays here until it is."""
        return self._scanned[0] if self._scanned else None

    def begin_merge(self) -> Resolved | None:
        """Take what waits to be sent, or is owed: what was just resolved is to be merged into it."""
        self._merging, self._waiting = self._waiting, None
        return self._merging

    def resolved(self, update: Resolved) -> None:
        """The first scan is resolved, and merged with what `begin_merge` gave."""
        self._merging = None
        if self.ended is not None:  # its receipts have failed already
            return
        self._scanned.popleft()
        self._waiting = update
        if self._lacking:
            self._lacking -= 1

    # -- send ------------------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether something is to be sent. What failed goes together with all scans there were when its turn came."""
        return self._has_waiting if self._failed is None else self._lacking == 0

    @property
    def _has_waiting(self) -> bool:
        return self._waiting is not None and bool(self._waiting.receipts)

    def begin_send(self) -> tuple[Stage, ...]:
        """What to merge and send now; nothing if it is over.

        What failed before a commit was tried goes together with what waits. While closing, what waits is still sent,
        until the store fails: then the rest is given up.
        """
        if self.ended is not None:
            return ()
        if self.is_closing and (self._failure is not None or not self._has_waiting):
            if not self.is_idle:
                assert self._lost is not None
                self.end(self._lost)
                self.was_raised = True
            return ()
        assert self.can_send
        parts: list[Stage] = []
        if self._failed is not None:
            parts.append(self._failed)
        if self._has_waiting and not isinstance(self._failed, Uploaded):
            assert self._waiting is not None
            parts.append(self._waiting)
            self._waiting = None
        self._failed = self._lacking = None
        self.is_hurried = False
        self._sending = tuple(parts)
        return self._sending

    def reached(self, stage: Stage) -> None:
        """What is being sent has come this far."""
        self._sending = (stage,)

    def committed(self, manifest: Manifest, *, is_new: bool = True) -> None:
        """What was being sent is in the channel; or, if it is not new, it was there already."""
        self.head = manifest
        for receipt in _receipts(self._sending):
            receipt.succeed(manifest, is_new)
        self._sending, self._failure = (), None

    # -- failures ------------------------------------------------------------------------------------------------------

    def store_failed(self, error: StoreError | SpaceError) -> bool:
        """Keep what could not be sent, at the stage it has reached; returns whether this is the first failure."""
        is_first = self._failure is None
        self._failure = error
        self.failures += 1
        if self.ended is not None:
            self._fail_sending(self.ended)
        else:
            assert len(self._sending) == 1
            (self._failed,) = self._sending
            self._sending = ()
        return is_first

    def retry(self) -> None:
        """The pause after a failure is over."""
        if self._failed is not None:
            self._lacking = len(self._scanned)

    def sending_failed(self, error: BaseException) -> None:
        """What is being sent can never be sent."""
        self._fail_sending(error)
        self.end(error)

    def end(self, error: BaseException) -> None:
        """Nothing can be published any more: every receipt fails, except for what is being sent, which may succeed."""
        if self.ended is None:
            self.ended = error
        parts = [part for part in (self._failed, self._merging, self._waiting) if part is not None]
        for receipt in (*_receipts(parts), *(scanned.receipt for scanned in self._scanned)):
            receipt.fail(error)
        self._failed = self._lacking = self._merging = self._waiting = None
        self._scanned.clear()

    def _fail_sending(self, error: BaseException) -> None:
        for receipt in _receipts(self._sending):
            receipt.fail(error)
        self._sending = ()

    def close(self, lost: StoreError) -> None:
        """Take no more scans; what cannot be sent any more is ``lost``."""
        self.is_closing = True
        self._lost = lost

    # -- flush ---------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether all that was published is committed."""
        return not (self._scanned or self._has_waiting or self._sending or self._failed)

    def is_flushed(self, since: int) -> bool:
        """Whether all is committed. Raises what ended it, or a failure of the store after the first ``since``."""
        if self.ended is not None:
            self.was_raised = True
            raise self.ended
        if self.is_idle:
            return True
        if self.failures > since and self._failure is not None:
            raise self._failure
        self.is_hurried = True
        return False


def _receipts(stages: Sequence[Stage]) -> tuple[Receipt, ...]:
    return tuple(receipt for stage in stages for receipt in update_of(stage).receipts)
