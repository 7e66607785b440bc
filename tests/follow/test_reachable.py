"""Damaged, missing or refused objects: the newest version that can be reached, detours, and what is reported."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from cases import same_bits
from fake_clock import FakeClock
from scripted_store import ScriptedStore
from worlds import World, damage, delta_of, follow, nothing_like, opened

import weightcast as wc
from weightcast.channel.keys import MAX_FILE_NAME, anchor_folder, manifest_key
from weightcast.channel.policy import AtLeast, Every, Pinned
from weightcast.channel.records import Anchor, ObjectRef, dump_record
from weightcast.errors import (
    AccessError,
    MissingError,
    NoRouteError,
)
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor

PATH_MAX = 4096
"""Of Linux, with the zero at the end."""


def test_damaged_head_leaves_a_late_replica_at_the_version_before_it(world: World) -> None:
    damage(world, delta_of(world, 4))
    held = nothing_like(world.states[0])
    with Subscriber(world.store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert (staged.position.version, staged.short_of) == (3, world.chain.manifest(4).position)
        assert isinstance(staged.reason, NoRouteError)
        assert "version 4 cannot be reached" in str(staged.reason)
        subscriber.apply(staged)
    assert same_bits(held, world.states[3])


@pytest.mark.parametrize("at", [0, 1])
def test_replica_stops_before_damage_in_the_middle(world: World, at: int) -> None:
    """Versions 3 and 4 need the damaged delta: from any version, 2 is the newest reachable one."""
    follow(world, policy=Pinned(at))
    damage(world, delta_of(world, 3))
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 2
    world.check_mirror([2])


def test_replica_stops_before_a_missing_object(world: World) -> None:
    world.store.delete(delta_of(world, 3))
    held = nothing_like(world.states[0])
    with Subscriber(world.store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert (staged.position.version, staged.short_of and staged.short_of.version) == (2, 4)


def test_damage_after_the_current_version_is_reported_and_not_fetched_again_at_once(world: World) -> None:
    clock = FakeClock()
    bad = delta_of(world, 4)
    good = damage(world, bad)
    calls = ScriptedStore(world.store)
    with Subscriber(calls, world.mirror, threads=1, clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        before = calls.count("get", bad)
        assert before
        for _ in range(5):
            with pytest.raises(NoRouteError, match="version 4 cannot be reached"):
                subscriber.poll()
        assert calls.count("get", bad) == before
        world.store.put(bad, good)
        clock.time += 60.0 * 1.2
        staged = subscriber.poll()
        assert staged is not None
        assert staged.short_of is None
        assert subscriber.apply(staged).version == 4
    world.check_mirror([4])


def test_damaged_object_is_not_fetched_for_every_later_version(world: World) -> None:
    clock, calls = FakeClock(), ScriptedStore(world.store)
    follow(world, policy=Pinned(3))
    bad = delta_of(world, 4)
    damage(world, bad)
    with Subscriber(calls, world.mirror, threads=1, clock=clock) as subscriber:
        for _ in range(3):
            with pytest.raises(NoRouteError):
                subscriber.poll()
            world.publish_next()
        assert calls.count("get", bad) == 1


def test_new_detour_around_damage_is_taken_at_once(world: World) -> None:
    clock = FakeClock()
    follow(world, policy=Pinned(3))
    damage(world, delta_of(world, 4))
    with Subscriber(world.store, world.mirror, threads=1, clock=clock) as subscriber:
        with pytest.raises(NoRouteError):
            subscriber.poll()
        position = world.chain.manifest(4).position
        files = {path.name: path for path in world.checkpoint(4).iterdir()}
        world.chain.put_anchor(position, files)
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    world.check_mirror([4])


def test_unreachable_pinned_version_is_an_error(world: World) -> None:
    damage(world, delta_of(world, 3))
    for version in (3, 4):
        with (
            Subscriber(world.store, nothing_like(world.states[0]), Pinned(version), threads=1) as subscriber,
            pytest.raises(NoRouteError, match=f"version {version} cannot be reached"),
        ):
            subscriber.poll()


@pytest.mark.parametrize(("policy", "reached"), [(Every(), 2), (AtLeast(1), 2), (AtLeast(3), None)])
def test_policy_decides_which_older_version_is_accepted(world: World, policy: wc.Newest, reached: int | None) -> None:
    damage(world, delta_of(world, 3))
    with Subscriber(world.store, nothing_like(world.states[0]), policy, threads=1) as subscriber:
        if reached is None:
            with pytest.raises(NoRouteError):
                subscriber.poll()
        else:
            staged = subscriber.poll()
            assert staged is not None
            assert staged.position.version == reached


def test_refused_object_is_planned_around(world: World) -> None:
    with opened(world) as mirror:
        assert mirror.version is None
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    store = ScriptedStore(world.store)
    anchor = next(edge for edge in world.chain.anchor_edges() if edge.result == 4)
    store.fail("get", anchor.key, AccessError)
    held = nothing_like(world.states[0])
    with Subscriber(store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    assert same_bits(held, world.states[4])


def test_refusal_is_reported_if_there_is_no_other_route(world: World) -> None:
    follow(world, policy=Pinned(3))
    store, key = ScriptedStore(world.store), delta_of(world, 4)
    store.fail("get", key, AccessError("access denied", url=store.url, key=key, hint="Ask for the permission."))
    with (
        Subscriber(store, world.mirror, threads=1) as subscriber,
        pytest.raises(AccessError, match=r"access denied.*Ask for the permission"),
    ):
        subscriber.poll()


def test_anchor_with_a_file_name_the_disk_refuses_is_planned_around(ram: Path) -> None:
    """The mirror's path is so long that the longest name that we allow does not fit into what the system takes."""
    deep = ram
    while (room := PATH_MAX - MAX_FILE_NAME - len(str(deep / "world" / "mirror"))) > 0:
        deep /= "d" * min(room, 200)
    world = World.make(deep / "world").begin(4)
    follow(world, policy=Pinned(0))
    position, data = world.chain.manifest(4).position, b"1"
    folder = anchor_folder(position, "f" * 64)
    ref = ObjectRef(f"{folder}{'x' * (MAX_FILE_NAME - 12)}.safetensors", 1, hashlib.sha256(data).hexdigest())
    world.store.put(ref.key, data)
    world.store.put(f"{folder}anchor.json", dump_record(Anchor(world.chain.channel.id, position, (ref,))))
    assert follow(world) == 4
    world.check_mirror([4])


def test_follower_of_a_pinned_version_stays_when_that_was_collected(world: World) -> None:
    held = nothing_like(world.states[0])
    with Subscriber(world.store, held, Pinned(0), threads=1) as subscriber:
        subscriber.sync()
        world.store.delete(manifest_key(2))
        subscriber.policy = Pinned(2)
        with pytest.raises(MissingError):
            subscriber.sync()
    assert same_bits(held, world.states[0])


def test_follower_of_every_version_continues_after_a_collected_one(world: World) -> None:
    follow(world, policy=Pinned(1))
    position = world.chain.manifest(3).position
    world.chain.put_anchor(position, {path.name: path for path in world.checkpoint(3).iterdir()})
    world.store.delete(delta_of(world, 2))
    world.store.delete(manifest_key(2))
    assert follow(world, policy=Every()) == 3
    world.check_mirror([3])
