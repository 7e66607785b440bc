"""A bucket that is away does not stop training, and one training continues another."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from local_engine import Local  # noqa: E402
from scripted_store import Rule  # noqa: E402
from sharded_engine import SHAPES, stream, weights_of  # noqa: E402
from trl_transfer import (  # noqa: E402
    Attended,
    Bucket,
    Opened,
    Trainer,
    begun,
    holds,
    model,
    step,
    sync,
    versions,
)

from weightcast.channel.keys import REPLICAS  # noqa: E402
from weightcast.errors import (  # noqa: E402
    StoreError,
    UsageError,
)
from weightcast.integrations.trl import WeightcastTransfer  # noqa: E402

# -- a bucket that is away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbs", ["", "put create"], ids=["away", "full"])
def test_training_continues_during_an_outage_and_everything_arrives_afterwards(
    verbs: str, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    step(tensors, 1)
    sync(transfer, tensors)
    transfer.patience = 0.2
    outage = store.fail(verbs)
    for number in range(2, 6):
        step(tensors, number)
        caplog.clear()
        began = time.monotonic()
        done = sync(transfer, tensors)
        assert time.monotonic() - began >= 0.2
        assert (done.version, done.live, done.changed, done.nbytes, done.pause) == (1, False, 0, 0, None)
        assert "memory://bucket did not take the weights in 0.2 s" in caplog.text
        assert "training goes on" in caplog.text
        assert "not live" not in "".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    outage.end()
    transfer.patience = 30.0
    step(tensors, 6)
    done = sync(transfer, tensors)
    assert done.live
    assert done.version in (2, 3)  # five syncs: together, or those of the outage before the last
    assert versions(store)[-1] == done.version
    holds(store, tensors)


def test_bucket_that_returns_while_a_sync_waits_causes_no_warning(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    outage = store.fail()
    step(tensors, 1)
    back = threading.Timer(0.3, outage.end)
    back.start()
    done = sync(transfer, tensors)
    back.join()
    assert (done.version, done.live) == (1, True)
    holds(store, tensors)


def test_bucket_lost_after_the_upload_causes_a_warning(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    store.fail("list", REPLICAS)
    transfer.patience = 0.2
    step(tensors, 1)
    done = sync(transfer, tensors)
    assert (done.version, done.live) == (1, False)
    assert "version 1 is not live after 0.2 s: no answer" in caplog.text
    holds(store, tensors)


def unsent(opened: Opened) -> tuple[Attended, dict[str, Any], WeightcastTransfer, Rule]:
    """A bucket that is away until the rule ends, and what it was to get."""
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    transfer.patience = 0.1
    outage = store.fail()
    step(tensors, 1)
    sync(transfer, tensors)
    return store, tensors, transfer, outage


def test_destroy_sends_what_was_not_sent(opened: Opened) -> None:
    store, tensors, transfer, outage = unsent(opened)
    outage.end()
    transfer.destroy()
    holds(store, tensors)


def test_destroy_reports_what_could_not_be_sent_and_the_next_training_sends_it(opened: Opened) -> None:
    store, tensors, transfer, outage = unsent(opened)
    with pytest.raises(StoreError, match="no answer"):
        transfer.destroy()
    transfer.destroy()
    outage.end()
    assert versions(store) == [0]
    begun(opened(store), tensors)
    assert versions(store) == [0, 1]
    holds(store, tensors)


# -- trainings, one behind the other -----------------------------------------------------------------------------------


def test_transfer_can_be_destroyed_twice_and_used_again() -> None:
    store, tensors = Attended(), model()
    transfer = WeightcastTransfer(store, threads=1)
    transfer.destroy()
    trainer = Trainer(transfer, lambda: tensors.items())
    for training in range(3):
        trainer.begin()
        step(tensors, training)
        done = trainer.sync()
        assert (done.version, done.live) == (training + 1, True)
        trainer.end()
        trainer.end()
        with pytest.raises(UsageError, match="init_weight_transfer"):
            trainer.sync()
        holds(store, tensors)
    assert versions(store) == [0, 1, 2, 3]


def test_ended_training_leaves_no_thread(tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    before = set(threading.enumerate())
    transfer = WeightcastTransfer(
        Bucket(), engine=Local(weights), mirror=tmp_path / "mirror", dtype=None, patience=30.0, threads=2
    )
    begun(transfer, stream(weights))
    sync(transfer, stream(changed(weights, 0.05, 1)))
    transfer.destroy()
    assert set(threading.enumerate()) <= before


def test_training_started_before_the_last_ended_publishes_its_own_weights(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    others = model(seed=5)
    begun(transfer, others)
    holds(store, others)
    step(others, 1)
    assert sync(transfer, others).version == 2
    holds(store, others)


def test_next_trainer_continues_after_a_killed_one(opened: Opened) -> None:
    store, tensors, last = Attended(), model(), -1
    for life in range(4):
        transfer = begun(opened(store), tensors)  # the one before never ends, and never says anything again
        assert transfer.last is not None
        assert transfer.last.version >= last
        for number in range(2):
            step(tensors, 10 * life + number)
            done = sync(transfer, tensors)
            assert done.version > last
            last = done.version
        holds(store, tensors)
        if life % 2:
            step(tensors, 99 + life)  # trained on, and killed before it could say so
    assert versions(store) == list(range(last + 1))


def test_trainer_resumed_from_an_older_checkpoint_publishes_it(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    older = {name: tensor.clone() for name, tensor in tensors.items()}
    step(tensors, 1)
    sync(transfer, tensors)
    done = begun(opened(store), older).last
    assert done is not None
    assert (done.version, done.live) == (2, True)
    holds(store, older)
