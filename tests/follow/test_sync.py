"""`Subscriber.sync`: one update with its phases, or None; what a busy mirror leaves for the next call."""

from __future__ import annotations

import threading

import pytest
from cases import same_bits
from scripted_store import ScriptedStore
from worlds import World, damage, delta_of, follow

import weightcast as wc
from weightcast.channel.policy import Pinned
from weightcast.errors import BusyError, NoRouteError, UsageError
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber


def test_sync_applies_one_update_and_says_what_it_took(world: World) -> None:
    head = world.chain.manifest(4)
    held = wc.Arrays.copy_of(world.states[3])
    with Subscriber(world.store, held, threads=1) as subscriber:
        update = subscriber.sync()
        assert update is not None
        assert (update.before, update.position) == (head.base, head.position)
        assert (update.nbytes, update.short) == (head.nbytes, None)
        assert update.seconds.keys() == {"find", "fetch", "decode", "verify", "stage", "apply"}
        assert update.total_seconds == sum(update.seconds.values()) > 0
        assert subscriber.sync() is None
    assert same_bits(held, world.states[4])


def test_update_to_an_older_version_says_why(world: World) -> None:
    damage(world, delta_of(world, 4))
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        update = subscriber.sync()
        assert update is not None
        assert (update.before, update.position.version) == (None, 3)
        assert isinstance(update.short, NoRouteError)
        with pytest.raises(NoRouteError):
            subscriber.sync()


@pytest.fixture
def anchored(world: World) -> World:
    """A mirror at version 2, whose route to version 4 begins at an anchor."""
    follow(world, policy=Pinned(2))
    files = {path.name: path for path in world.checkpoint(4).iterdir()}
    world.chain.put_anchor(world.chain.manifest(4).position, files)
    world.store.delete(delta_of(world, 3))
    return world


def test_update_that_was_busy_is_applied_by_the_next_sync_without_a_request(anchored: World) -> None:
    store = ScriptedStore(anchored.store)
    with Subscriber(store, anchored.mirror, threads=1, patience=0.01) as subscriber:
        with reading(anchored.mirror), pytest.raises(BusyError):
            subscriber.sync()
        requests = len(store.calls)
        update = subscriber.sync()
        assert update is not None
        assert update.position.version == 4
        assert len(store.calls) == requests
    anchored.check_mirror([4])


def test_another_policy_drops_an_update_that_was_busy(anchored: World) -> None:
    with Subscriber(anchored.store, anchored.mirror, threads=1, patience=0.01) as subscriber:
        with reading(anchored.mirror), pytest.raises(BusyError):
            subscriber.sync()
        subscriber.policy = Pinned(2)
        assert subscriber.sync() is None
        assert subscriber.mirror.version == 2


def test_policy_set_while_an_update_waits_for_readers_drops_it(anchored: World) -> None:
    with Subscriber(anchored.store, anchored.mirror, threads=1, patience=0.5) as subscriber:
        setting = threading.Timer(0.1, setattr, (subscriber, "policy", Pinned(2)))
        setting.start()
        with reading(anchored.mirror), pytest.raises(BusyError):
            subscriber.sync()
        setting.join()
        assert subscriber.sync() is None
        assert subscriber.mirror.version == 2


def test_subscriber_of_arrays_has_no_mirror(world: World) -> None:
    with Subscriber(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as subscriber:
        assert subscriber.weights is not None
        with pytest.raises(UsageError, match="not a mirror"):
            _ = subscriber.mirror
