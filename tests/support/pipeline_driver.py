"""A pipeline of one number, whose three threads are played one event at a time.

A scan is the number it saw, a patch leads from one number to another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.errors import StoreError, UnreachableError
from weightcast.format.codec.ranks import Ranks
from weightcast.format.patch import ModelSize, Patch, TensorPatch
from weightcast.format.spec import TensorSpec, TensorTable
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
from weightcast.store.memory import MemoryStore

SPEC = TensorSpec("w", "U64", (1,))
CHAIN = Chain.create(MemoryStore("pipeline"), TensorTable.of([SPEC]))
RANKS: dict[str, Ranks] = {}
UNREACHABLE = UnreachableError("no answer", url="memory://pipeline")
LOST = StoreError("closed before this could be sent", url="memory://pipeline")


def digest(value: int) -> str:
    return f"{value:064x}"


def patch(old: int, new: int, known: bool = True) -> Patch:
    tensors = ()
    if old != new:
        bits = [np.array([value], np.uint64) for value in (old, new)]
        tensors = (TensorPatch(SPEC, np.zeros(1, np.int64), bits[1], bits[0] if known else None, new),)
    return Patch(digest(old), digest(new), ModelSize(1, 1, 8), tensors)


def update(old: int, new: int, *receipts: Receipt) -> Resolved:
    return Resolved(patch(old, new), RANKS, receipts)


def manifest(version: int, value: int, base: Position | None = None, step: int | None = None) -> Manifest:
    ref = ObjectRef(f"deltas/{version}", 1, "0" * 64)
    codec = None if base is None else "banded"
    return CHAIN.draft(Position(version, digest(value)), base, ref, codec, 1, step, "writer")


def uploaded(encoded: Encoded, head: Manifest) -> Uploaded:
    value, step = int(encoded.update.patch.result, 16), encoded.update.step
    return Uploaded(encoded.update, manifest(head.position.version + 1, value, head.position, step))


Event = Callable[["Driver"], object]


class Driver:
    """A pipeline, the work its threads have in hand, and the channel that commits go to."""

    def __init__(self, owed: int = 0) -> None:
        self.channel = [manifest(0, 0)]
        self.pipeline = Pipeline(self.channel[0], update(0, owed) if owed else None)
        self.resolved_to = owed
        self.published: list[tuple[int, Receipt]] = []
        self.in_merge: Resolved | None = None
        self.in_send: Stage | None = None
        self.is_resting = False

    # -- the trainer

    def publish(self, value: int) -> None:
        receipt = Receipt(len(self.published))
        self.pipeline.add(Scanned(value, receipt))  # type: ignore[arg-type]
        self.published.append((value, receipt))

    # -- the resolver

    @property
    def can_resolve(self) -> bool:
        return self.in_merge is None and self.pipeline.scanned is not None

    def resolve(self) -> None:
        scanned = self.pipeline.scanned
        assert scanned is not None
        value: int = scanned.scan  # type: ignore[assignment]
        found = update(self.resolved_to, value, scanned.receipt)
        self.resolved_to = value
        waiting = self.pipeline.begin_merge()
        self.in_merge = found if waiting is None else update_of(merged(waiting, found))

    def end_merge(self) -> None:
        assert self.in_merge is not None
        self.pipeline.resolved(self.in_merge)
        self.in_merge = None

    # -- the sender

    @property
    def can_send(self) -> bool:
        return self.in_send is None and not self.is_resting and (self.pipeline.can_send or self.pipeline.is_over)

    def begin_send(self) -> None:
        parts = self.pipeline.begin_send()
        if not parts:
            return
        stage = joined(parts)
        if changes(stage, self.pipeline.head.position):
            self.pipeline.reached(stage)
            self.in_send = stage
        else:
            self.pipeline.committed(self.pipeline.head, is_new=False)

    def advance(self, lost: bool = False) -> None:
        """One stage on. If the answer is ``lost``, a commit takes effect and the sender does not hear of it."""
        stage = self.in_send
        if isinstance(stage, Resolved):
            self.in_send = Encoded(stage, codec_for(stage, "banded"), b"")
        elif isinstance(stage, Encoded):
            self.in_send = uploaded(stage, self.pipeline.head)
        else:
            assert stage is not None
            self._commit(stage.manifest)
            if not lost:
                self.pipeline.committed(stage.manifest)
            self.in_send = None
        if self.in_send is not None:
            self.pipeline.reached(self.in_send)
        elif lost:
            self.pipeline.store_failed(UNREACHABLE)
            self.is_resting = True

    def _commit(self, new: Manifest) -> None:
        """As a store that creates: a version that is there already is this very one."""
        version = new.position.version
        if version < len(self.channel):
            assert self.channel[version] is new
        else:
            assert new.base == self.channel[-1].position, "a patch does not begin at the last commit"
            self.channel.append(new)

    def fail(self) -> bool:
        self.in_send, self.is_resting = None, True
        return self.pipeline.store_failed(UNREACHABLE)

    def end_rest(self) -> None:
        """Once after each failure."""
        if self.is_resting:
            self.is_resting = False
            self.pipeline.retry()

    # -- all of them

    def work(self) -> None:
        """Until nothing is left to do; nothing fails any more."""
        while True:
            if self.in_merge is not None:
                self.end_merge()
            elif self.can_resolve:
                self.resolve()
            elif self.in_send is not None:
                self.advance()
            elif self.is_resting:
                self.end_rest()
            elif self.pipeline.can_send and not self.pipeline.is_over:
                self.begin_send()
            else:
                return

    def close(self) -> None:
        """As the shell does: the sender goes on until it has nothing more to do."""
        self.pipeline.close(LOST)
        self.end_rest()
        while self.in_send is not None or (self.pipeline.can_send and not self.pipeline.ended):
            if self.in_send is None:
                self.begin_send()
            else:
                self.advance()
        assert self.pipeline.begin_send() == ()

    def outcome(self, receipt: Receipt) -> Manifest | BaseException | None:
        if not receipt.done():
            return None
        try:
            return receipt.result(0)
        except Exception as error:  # noqa: BLE001
            return error

    def check(self) -> None:
        """No version is lost, reordered or made up, and receipts say what the channel has."""
        values = [value for value, _ in self.published]
        committed = [int(one.position.digest, 16) for one in self.channel]
        at = -1
        for version, value in enumerate(committed[1:], 1):
            assert value != committed[version - 1], "an empty version"
            at = values.index(value, at + 1)
        carried: dict[int, int] = {}
        for value, receipt in self.published:
            found = self.outcome(receipt)
            if isinstance(found, Manifest):
                assert self.channel[found.position.version] is found
                assert found.position.version >= max(carried, default=0), "receipts are out of order"
                if receipt.is_new:
                    carried[found.position.version] = value
        for version, last in carried.items():
            assert committed[version] == last, "a version is not what its last publish was"
        if self.pipeline.ended is None:
            assert self.pipeline.is_idle == all(receipt.done() for _, receipt in self.published)
        assert self.pipeline.head in self.channel

    def versions(self) -> list[int | type]:
        """What each receipt says: a version, or the kind of error."""
        found = [self.outcome(receipt) for _, receipt in self.published]
        return [one.position.version if isinstance(one, Manifest) else type(one) for one in found]
