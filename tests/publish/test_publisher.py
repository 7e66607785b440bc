"""A publisher on stores that behave: what `publish` sends, what receipts say, how a channel is begun and reopened."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from cases import PACKED_DTYPES, VALUE_DTYPES, Bag, moved, random_bits, same_bits
from channels import blank, channel_of, head_of, pull, small_model, train
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.lease import lease
from weightcast.errors import AccessError, ChannelError, UsageError
from weightcast.format.spec import TensorSpec
from weightcast.publish.pipeline import AHEAD
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore


def test_publisher_creates_a_missing_channel_and_a_subscriber_refuses(store: Store) -> None:
    model = small_model()
    with pytest.raises(ChannelError, match="weightcast init"):
        wc.Subscriber(store, model)
    with wc.Publisher(store, model) as publisher:
        assert publisher.position == Position(0, wc.fingerprint(model).digest)
    here = small_model(seed=1)
    assert pull(store, here).version == 0
    assert same_bits(here, model)


def test_interrupted_init_is_completed_by_a_publisher(store: Store) -> None:
    model = small_model()
    Chain.create(store, model.table)
    with wc.Publisher(store, model) as publisher:
        assert publisher.position.version == 0


def test_every_step_arrives_bit_for_bit(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    there = blank(model)
    with wc.Publisher(store, model) as publisher, wc.Subscriber(store, there) as subscriber:
        for step in range(1, 6):
            train(model, step)
            receipt = publisher.publish(step=step)
            committed = receipt.result(60)
            staged = subscriber.poll()
            assert staged is not None
            assert subscriber.apply(staged) == committed.position
            assert (committed.step, committed.position.version) == (step, step)
            assert same_bits(there, model)
            assert subscriber.poll() is None


def test_receipt_can_be_awaited(store: Store) -> None:
    model = small_model()
    wc.init(store, model)

    async def trainer() -> int:
        with wc.Publisher(store, model) as publisher:
            train(model, 1)
            return (await publisher.publish(step=1)).position.version

    assert asyncio.run(trainer()) == 1


def test_cancelled_task_that_awaits_a_receipt_does_not_cancel_the_commit(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    slow = ScriptedStore(store)

    async def trainer() -> None:
        with wc.Publisher(slow, model) as publisher:
            held = slow.hang("put")
            train(model, 1)
            receipt = publisher.publish(step=1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receipt, 0.05)
            held.end()
            assert publisher.flush().version == 1
            assert receipt.result(0).step == 1

    asyncio.run(trainer())


def test_publish_without_a_change_commits_nothing(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    with wc.Publisher(store, model) as publisher:
        nothing = publisher.publish(step=1)
        assert nothing.result(60).position == wc.Position(0, wc.fingerprint(model).digest)
        assert nothing.is_new is False
        train(model, 1)
        something = publisher.publish(step=2)
        assert something.result(60).position.version == 1
        assert something.is_new is True
    assert head_of(store).version == 1


def test_changes_undone_before_their_upload_commit_nothing(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    start, slow = wc.Arrays.copy_of(model), ScriptedStore(store)
    with wc.Publisher(slow, model) as publisher:
        held = slow.hang("put", "deltas/")
        train(model, 1)
        first = publisher.publish(step=1)
        assert held.reached.wait(60)
        middle = wc.Arrays.copy_of(model)
        # These two wait for the first, and are merged: there and back again.
        receipts = [publisher.publish(step=2, weights=start), publisher.publish(step=3, weights=middle)]
        held.end()
        assert first.result(60).position.version == 1
        assert receipts[-1].result(60).position.digest == wc.fingerprint(middle).digest
    assert head_of(store).digest == wc.fingerprint(middle).digest


def test_publish_takes_the_bits_of_the_moment(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    slow = ScriptedStore(store)
    with wc.Publisher(slow, model) as publisher:
        held = slow.hang("put")
        train(model, 1)
        then = wc.Arrays.copy_of(model)
        receipt = publisher.publish()
        train(model, 2)  # while the upload waits
        held.end()
        receipt.result(60)
    there = blank(model)
    pull(store, there)
    assert same_bits(there, then)


def test_updates_published_during_an_upload_are_merged(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    slow = ScriptedStore(store)
    with wc.Publisher(slow, model) as publisher:
        held = slow.hang("put", "deltas/")
        receipts = []
        for step in range(1, 7):
            train(model, step)
            receipts.append(publisher.publish(step=step))
            assert held.reached.wait(60)
        for _ in range(AHEAD):  # once these return, the updates above are merged
            publisher.publish()
        held.end()
        commits = [receipt.result(60) for receipt in receipts]
    assert [commit.position.version for commit in commits] == [1, 2, 2, 2, 2, 2]
    assert (commits[0].codec, commits[1].codec) == ("banded", "gap")
    assert commits[-1].step == 6
    there = blank(model)
    assert pull(store, there) == commits[-1].position
    assert head_of(store).version == 2
    assert same_bits(there, model)


def test_label_is_committed_and_one_that_cannot_be_is_refused_at_the_call(store: Store) -> None:
    model = small_model()
    with wc.Publisher(store, model) as publisher:
        train(model, 1)
        for bad in ("", "two\nlines", " padded", "x" * 201, 7):
            with pytest.raises(UsageError, match="cannot be a label"):
                publisher.publish(step=1, label=bad)  # type: ignore[arg-type]
        assert publisher.publish(step=1, label="warm-up ends").result(60).label == "warm-up ends"
        train(model, 2)
        assert publisher.publish(step=2).result(60).label is None
    assert Chain.open(store).manifest(1).label == "warm-up ends"


def test_versions_merged_during_an_upload_carry_the_last_label_given(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    slow = ScriptedStore(store)
    with wc.Publisher(slow, model) as publisher:
        held = slow.hang("put", "deltas/")
        receipts = []
        for step, label in enumerate(("sent", "first", "last", None), start=1):
            train(model, step)
            receipts.append(publisher.publish(step=step, label=label))
            assert held.reached.wait(60)
        for _ in range(AHEAD):  # once these return, the updates above are merged
            publisher.publish()
        held.end()
        commits = [receipt.result(60) for receipt in receipts]
    assert [commit.position.version for commit in commits] == [1, 2, 2, 2]
    assert [commit.label for commit in commits] == ["sent", "last", "last", "last"]


def test_model_of_another_table_is_refused(store: Store) -> None:
    wc.init(store, small_model(tensors=3))
    before = [listed.key for listed in store.list("")]
    with pytest.raises(UsageError, match="on one side only"):
        wc.Publisher(store, small_model(tensors=2))
    with pytest.raises(UsageError, match="on one side only"):
        wc.Subscriber(store, small_model(tensors=2))
    assert [listed.key for listed in store.list("")] == before


def test_every_dtype_arrives(store: Store) -> None:
    rng = np.random.default_rng(5)
    specs = [TensorSpec(dtype.lower(), dtype, (40, 4)) for dtype in VALUE_DTYPES + PACKED_DTYPES]
    old = Bag({spec: random_bits(rng, spec) for spec in specs})
    new = Bag({spec: moved(rng, old.read(spec.name), 0.1, 2**62) for spec in specs})
    wc.init(store, old)
    with wc.Publisher(store, old) as publisher:
        publisher.publish(weights=new)
    there = old.copy()
    with wc.Subscriber(store, there) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert same_bits(there, new)


def test_trainer_at_the_head_continues(store: Store) -> None:
    states = channel_of(store, 3)
    with wc.Publisher(store, states[-1]) as publisher:
        assert publisher.position == head_of(store)
        train(states[-1], 99)
        assert publisher.publish().result(60).position.version == 4


def test_trainer_restarted_from_an_older_checkpoint_publishes_the_difference(store: Store) -> None:
    states = channel_of(store, 5)
    with wc.Publisher(store, states[2]) as publisher:
        assert publisher.position.version == 5, "nothing is published unasked"
        receipt = publisher.publish(step=42)
        assert receipt.result(60).position == wc.Position(6, wc.fingerprint(states[2]).digest)
        assert receipt.result().step == 42
        assert receipt.result().codec == "banded"
    follower = wc.Arrays.copy_of(states[5])
    assert pull(store, follower).version == 6
    assert same_bits(follower, states[2])


def test_restart_publishes_an_anchor_if_the_head_cannot_be_fetched() -> None:
    store = MemoryStore()
    states = channel_of(store, 3)
    for listed in list(store.list("deltas/")):
        store.delete(listed.key)
    train(states[-1], 99)
    with wc.Publisher(store, states[-1]) as publisher:
        assert publisher.position.version == 4
    there = blank(states[-1])
    assert pull(store, there).version == 4
    assert same_bits(there, states[-1])


def test_writer_without_delete_permission_can_publish(store: Store) -> None:
    keeping = ScriptedStore(store)
    keeping.fail("delete", error=AccessError)
    model = small_model()
    wc.init(store, model)
    with wc.Publisher(keeping, model) as publisher:
        train(model, 1)
        assert publisher.publish().result(60).position.version == 1


def test_writer_that_fails_to_open_does_not_take_the_lease(store: Store) -> None:
    states = channel_of(store, 1)
    claimed = lease(Chain.open(store))
    with pytest.raises(UsageError):
        wc.Publisher(store, small_model(tensors=1), writer="intruder")
    assert lease(Chain.open(store)) == claimed
    assert states
