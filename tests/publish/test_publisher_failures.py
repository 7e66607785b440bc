"""A publisher whose store fails, or which fails itself: what is kept, what is given up, and who is told."""

from __future__ import annotations

import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import same_bits
from channels import blank, pull, small_model, train
from scripted_store import ScriptedStore
from waiting import until

import weightcast as wc
from weightcast.errors import ConflictError, MissingError, StoreError, UnreachableError, UsageError
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


class Unreadable(np.ndarray):
    """Bits that no other thread than a test's own can read: whatever works on them in the background fails."""

    @property
    def ctypes(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        return super().ctypes


class UnreadableModel:
    """A model whose scans succeed and cannot be resolved."""

    def __init__(self, model: wc.Arrays):
        self._model = model
        self.table = model.table

    def read(self, name: str) -> np.ndarray:
        return self._model.read(name).view(Unreadable)


def test_failure_in_the_background_reaches_every_receipt(store: Store) -> None:
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
    second = publisher.publish(weights=UnreadableModel(wc.Arrays.copy_of(model)))
    train(model, 3)
    third = publisher.publish()  # its old bits are those that cannot be read
    for receipt in (first, second, third):
        with pytest.raises(MemoryError):
            receipt.result(30)
    with pytest.raises(MemoryError):
        publisher.publish()
    publisher.close()


def test_upload_that_fails_after_the_publisher_ended_resolves_every_receipt(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    failing = ScriptedStore(store)
    publisher = wc.Publisher(failing, model, threads=1)
    held, _ = failing.hang("put", "deltas/"), failing.fail("put", "deltas/")
    train(model, 1)
    first = publisher.publish()
    assert held.reached.wait(30)
    train(model, 2)
    publisher.publish(weights=UnreadableModel(wc.Arrays.copy_of(model)))
    train(model, 3)
    last = publisher.publish()  # its old bits are those that cannot be read
    with pytest.raises(MemoryError):
        last.result(30)
    assert not first.done()
    held.end()
    with pytest.raises(MemoryError):
        first.result(30)
    publisher.close()
