"""A publisher whose store fails, or which fails itself: what is kept, what is given up, and who is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from cases import same_bits
from channels import blank, pull, small_model, train
from scripted_store import ScriptedStore
from waiting import until

import weightcast as wc
from weightcast.errors import ConflictError, MissingError, StoreError, UnreachableError, UsageError
from weightcast.format.scan import Change, Scan, Shadowed
from weightcast.format.tensors import Weights
from weightcast.store.base import Store
from weightcast.store.file import FileStore


def test_failed_upload_is_merged_into_the_next_one(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    with wc.Publisher(failing, model) as publisher:
        broken = failing.fail("put")
        train(model, 1)
        first = publisher.publish(step=1)
        with pytest.raises(UnreachableError):
            publisher.flush()
        assert not first.done()
        train(model, 2)
        second = publisher.publish(step=2)
        broken.end()
        assert publisher.flush().version == 1
        assert first.result(0) == second.result(0)
        assert second.result(0).step == 2
    there = blank(model)
    pull(store, there)
    assert same_bits(there, model)


def test_close_that_cannot_send_says_so_on_the_receipts(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    publisher = wc.Publisher(failing, model)
    failing.fail("put")
    train(model, 1)
    receipt = publisher.publish()
    with pytest.raises(UnreachableError):
        publisher.close()
    with pytest.raises(StoreError, match="closed before this could be sent"):
        receipt.result(10)
    with pytest.raises(UsageError, match="the publisher is closed"):
        publisher.publish()


def test_flush_times_out(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    slow = ScriptedStore(store)
    with wc.Publisher(slow, model) as publisher:
        held = slow.hang("put")
        train(model, 1)
        publisher.publish()
        with pytest.raises(TimeoutError):
            publisher.flush(timeout=0.05)
        held.end()


def test_missing_bucket_is_not_created_and_gets_everything_once_it_is_back(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    model = small_model()
    wc.init(FileStore(bucket), model)
    with wc.Publisher(FileStore(bucket), model) as publisher:
        bucket.rename(tmp_path / "away")
        train(model, 1)
        receipt = publisher.publish(step=1)
        with pytest.raises(MissingError, match="the folder"):
            publisher.flush()
        assert not bucket.exists()
        (tmp_path / "away").rename(bucket)
        assert publisher.flush().version == 1
        assert receipt.result(0).step == 1


def test_close_raises_what_ended_the_publisher_unless_it_was_raised_before(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    sleeper = wc.Publisher(store, model)
    with wc.Publisher(store, wc.Arrays.copy_of(model)) as other:
        train(model, 1)
        other.publish(weights=model)
    receipt = sleeper.publish()
    until(receipt.done)  # `result` would tell us
    with pytest.raises(ConflictError):
        sleeper.close()


def test_repeated_failure_is_logged_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    publisher = wc.Publisher(failing, model)
    broken = failing.fail("put")
    train(model, 1)
    publisher.publish()
    for _ in range(3):
        with pytest.raises(UnreachableError):
            publisher.flush()
    assert caplog.text.count("not sent yet") == 1
    broken.end()
    publisher.close()


def test_error_in_the_block_wins_over_the_error_of_close(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)

    def block() -> None:
        with wc.Publisher(failing, model) as publisher:
            failing.fail("put")
            train(model, 1)
            publisher.publish()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()


def test_failed_upload_is_sent_while_publishing_continues(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    with wc.Publisher(failing, model, retry_after=0.05) as publisher:
        broken = failing.fail("put")
        deadline = time.monotonic() + 60
        for step in count():
            train(model, step)
            publisher.publish()
            if step == 3:
                broken.end()
            if publisher.position.version:
                break
            assert time.monotonic() < deadline


class LostScan:
    """A scan whose changes do not arrive."""

    def changes(self) -> Iterator[Change]:
        raise MemoryError("no room for changes")


def lose_scan(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lose the changes of one scan, counted from 1."""
    scan, calls = Shadowed.scan, count(1)

    def scanned(self: Shadowed, weights: Weights | None = None) -> Scan:
        found = scan(self, weights)
        return LostScan() if next(calls) == number else found

    monkeypatch.setattr(Shadowed, "scan", scanned)


def test_failure_in_the_background_reaches_every_receipt(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_scan(monkeypatch, 3)
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    publisher = wc.Publisher(failing, model, threads=1)
    failing.fail("put")
    train(model, 1)
    first = publisher.publish()
    with pytest.raises(UnreachableError):
        publisher.flush()
    train(model, 2)
    second = publisher.publish()
    train(model, 3)
    third = publisher.publish()
    for receipt in (first, second, third):
        with pytest.raises(MemoryError):
            receipt.result(30)
    with pytest.raises(MemoryError):
        publisher.publish()
    publisher.close()


def test_upload_that_fails_after_the_publisher_ended_resolves_every_receipt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_scan(monkeypatch, 3)
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    publisher = wc.Publisher(failing, model, threads=1)
    held, _ = failing.hang("put", "deltas/"), failing.fail("put", "deltas/")
    train(model, 1)
    first = publisher.publish()
    assert held.reached.wait(30)
    train(model, 2)
    publisher.publish()
    train(model, 3)
    last = publisher.publish()
    with pytest.raises(MemoryError):
        last.result(30)
    assert not first.done()
    held.end()
    with pytest.raises(MemoryError):
        first.result(30)
    publisher.close()


def test_scan_that_fails_half_way_records_nothing(store: Store) -> None:
    """Other weights that cannot be read to their end leave what the next scan compares with as it was."""
    arrays = {name: np.zeros(1 << 22, np.uint8) for name in "abc"}  # each a batch of its own
    model, other = wc.Arrays(arrays), wc.Arrays({name: array + 1 for name, array in arrays.items()})
    with wc.Publisher(store, model, threads=1) as publisher:
        with pytest.raises(OSError, match="gone"):
            publisher.publish(weights=Torn(other, "c"))
        assert publisher.publish().result(30).position.version == 0
        assert publisher.publish(weights=other).result(30).changed == 3 << 22
    there = blank(model)
    pull(store, there)
    assert same_bits(there, other)


class Torn:
    """Weights of which one tensor cannot be read."""

    def __init__(self, weights: wc.Arrays, lost: str):
        self.table, self._weights, self._lost = weights.table, weights, lost

    def read(self, name: str) -> np.ndarray:
        if name == self._lost:
            raise OSError("the file is gone")
        return self._weights.read(name)
