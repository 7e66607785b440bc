"""What a subscriber promises on stores that behave: poll and apply, policies, resets, and what it leaves."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from cases import same_bits
from channels import channel_of, head_of, pull, small_model, train
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.records import Reference
from weightcast.errors import (
    ChannelError,
    MissingError,
    UnreachableError,
    UsageError,
)
from weightcast.store.base import Store
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import reset
from weightcast.upkeep.squash import squash


@pytest.fixture
def store() -> Store:
    return MemoryStore()


def test_poll_changes_nothing_and_apply_makes_no_request(store: Store) -> None:
    states = channel_of(store, 3)
    there = wc.Arrays.copy_of(states[0])
    counting = ScriptedStore(store)
    with wc.Subscriber(counting, there) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert same_bits(there, states[0])
        asked = len(counting.calls)
        subscriber.apply(staged)
        assert len(counting.calls) == asked
    assert same_bits(there, states[3])


@pytest.mark.parametrize("start", [0, 2, 4])
def test_version_of_the_weights_is_found_by_their_bits(store: Store, start: int) -> None:
    states = channel_of(store, 4)
    there = wc.Arrays.copy_of(states[start])
    counting = ScriptedStore(store)
    assert pull(counting, there) == head_of(store)
    assert not counting.asked("get", "anchors/")
    assert same_bits(there, states[4])


def test_policy_every_skips_no_version(store: Store) -> None:
    states = channel_of(store, 5)
    there = wc.Arrays.copy_of(states[0])
    with wc.Subscriber(store, there, wc.Every()) as subscriber:
        for version in range(1, 6):
            staged = subscriber.poll()
            assert staged is not None
            assert subscriber.apply(staged).version == version
            assert same_bits(there, states[version])
        assert subscriber.poll() is None


def test_policy_pinned_also_goes_back(store: Store) -> None:
    states = channel_of(store, 5)
    there = wc.Arrays.copy_of(states[5])
    with wc.Subscriber(store, there, wc.Pinned(2)) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert same_bits(there, states[2])
        assert subscriber.poll() is None


def test_policy_at_least_stays_until_a_newer_version_is_required(store: Store) -> None:
    states = channel_of(store, 5)
    there = wc.Arrays.copy_of(states[3])
    with wc.Subscriber(store, there, wc.AtLeast(2)) as subscriber:
        assert subscriber.poll() is None
        subscriber.policy = wc.AtLeast(4)
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 5


def test_follow_continues_until_it_is_stopped(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    there = wc.Arrays.copy_of(model)
    seen: list[int] = []
    with wc.Publisher(store, model) as publisher, wc.Subscriber(store, there) as subscriber:

        def follow() -> None:
            for update in subscriber.follow(every=0.01):
                seen.append(update.position.version)
                if update.position.version == 5:
                    subscriber.stop()

        thread = threading.Thread(target=follow)
        thread.start()
        for step in range(1, 6):
            train(model, step)
            publisher.publish(step=step).result(60)
        thread.join(60)
        assert not thread.is_alive()
    assert seen == sorted(set(seen))
    assert seen[-1] == 5
    assert same_bits(there, model)


def test_errors_are_reported_and_follow_continues(store: Store) -> None:
    states = channel_of(store, 1)

    flaky = ScriptedStore(store)
    flaky.fail("get", "manifests/", times=2)
    there, told = wc.Arrays.copy_of(states[0]), []
    with wc.Subscriber(flaky, there) as subscriber:
        for update in subscriber.follow(every=0.01, on_error=told.append):
            assert update.position.version == 1
            subscriber.stop()
    assert [type(error) for error in told] == [UnreachableError, UnreachableError]


def test_error_without_a_handler_ends_follow(store: Store) -> None:
    states = channel_of(store, 1)
    with wc.Subscriber(store, states[0]) as subscriber:
        for listed in list(store.list("channel")) + list(store.list("manifests")) + list(store.list("deltas")):
            store.delete(listed.key)
        with pytest.raises(ChannelError):
            next(subscriber.follow(every=0.01))


def test_follower_survives_a_reset(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 3)
    there = wc.Arrays.copy_of(states[3])
    with wc.Subscriber(store, there) as arrays, wc.Subscriber(store, tmp_path / "mirror") as mirror:
        assert arrays.poll() is None
        staged = mirror.poll()
        assert staged is not None
        mirror.apply(staged)
        reset(store)
        new = small_model(9)
        wc.init(store, new)
        for subscriber in (arrays, mirror):
            assert next(subscriber.follow(every=0.0)).position == head_of(store)
        assert same_bits(there, new)
        weights = mirror.weights
        assert weights is not None
        assert all(np.array_equal(weights.read(spec.name), new.read(spec.name)) for spec in new.table)


def test_idle_follower_notices_that_the_next_version_was_collected(store: Store) -> None:
    states = channel_of(store, 6)
    there = wc.Arrays.copy_of(states[2])
    with wc.Subscriber(store, there) as subscriber:
        subscriber.policy = wc.Pinned(2)
        assert subscriber.poll() is None
        squashed = list(squash(Chain.open(store), _scratch(), levels=(2,)))
        assert squashed
        for version in (3, 5):  # what a collector does once it is old
            store.delete(f"manifests/{version:012d}.json")
        subscriber.policy = wc.Newest()
        assert next(subscriber.follow(every=0.0)).position.version == 6
    assert same_bits(there, states[6])


def _scratch() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="weightcast-test-"))


def test_pull_that_fetches_nothing_leaves_no_folder(store: Store, tmp_path: Path) -> None:
    wc.init(store, small_model(), reference=Reference("org/model", "main"))
    with pytest.raises(ChannelError, match="Download org/model"):
        pull(store, tmp_path / "replica")
    assert not (tmp_path / "replica").exists()


def test_last_heartbeat_has_the_last_position(store: Store) -> None:
    states = channel_of(store, 3)
    there = wc.Arrays.copy_of(states[0])
    with wc.Subscriber(store, there, wc.Every(), replica="eu-1") as subscriber:
        for _ in range(3):
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
    ((beat, _),) = heartbeats(Chain.open(store))
    assert (beat.replica, beat.position, beat.error) == ("eu-1", head_of(store), None)


def test_missing_bucket_is_an_error_not_idleness(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "bucket")
    states = channel_of(store, 1)
    with wc.Subscriber(store, states[1], replica="eu-1") as subscriber:
        assert subscriber.poll() is None
        (tmp_path / "bucket").rename(tmp_path / "elsewhere")
        with pytest.raises(MissingError, match="the folder does not exist"):
            subscriber.poll()
    assert not (tmp_path / "bucket").exists()


def test_replica_ahead_of_a_restored_bucket_follows_the_bucket(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    states = channel_of(bucket, 3)
    pull(bucket, tmp_path / "mirror")
    for kind in ("manifests", "deltas"):
        for listed in list(bucket.list(f"{kind}/000000000003")):
            bucket.delete(listed.key)
    assert pull(bucket, tmp_path / "mirror").version == 2
    with wc.Publisher(bucket, states[2]) as publisher:
        train(states[2], 77)
        publisher.publish().result(60)
    follower = wc.Arrays.copy_of(states[3])
    assert pull(bucket, follower) == head_of(bucket)
    assert same_bits(follower, states[2])
    assert pull(bucket, tmp_path / "mirror") == head_of(bucket)


def test_mirror_of_another_channel_is_refused(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("other", 2)):
        wc.init(FileStore(tmp_path / name), small_model(seed))
    pull(FileStore(tmp_path / "one"), tmp_path / "mirror")
    with pytest.raises(UsageError, match="a mirror of another channel"):
        pull(FileStore(tmp_path / "other"), tmp_path / "mirror")
    assert pull(FileStore(tmp_path / "one"), tmp_path / "mirror").version == 0
    reset(FileStore(tmp_path / "one"))
    new = small_model(3)
    wc.init(FileStore(tmp_path / "one"), new)
    assert pull(FileStore(tmp_path / "one"), tmp_path / "mirror").digest == wc.fingerprint(new).digest


def test_closed_subscriber_releases_its_weights_without_the_garbage_collector(store: Store) -> None:
    there = wc.Arrays.copy_of(channel_of(store, 2)[0])
    released = weakref.ref(there)
    gc.disable()
    try:
        with wc.Subscriber(store, there, threads=1) as subscriber:
            subscriber.sync()
        del there, subscriber
        assert released() is None
    finally:
        gc.enable()
