"""Stale hints, listings and clocks; and a collector that must not make damage worse."""

from __future__ import annotations

import shutil
import time

import pytest
from cases import same_bits
from damages import DAMAGES, keys_of
from faults import INJECTED, FaultyStore
from scripted_store import Request, ScriptedStore
from worlds import DAY, World, follow, nothing_like, opened

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import (
    ANCHORS,
    DELTAS,
    HEAD,
    INDEX,
    MANIFESTS,
    PINS,
    REPLICAS,
    WRITER,
    Position,
)
from weightcast.channel.pins import pin
from weightcast.channel.policy import Pinned
from weightcast.channel.records import head_to_json
from weightcast.channel.retention import Retention
from weightcast.errors import WeightcastError
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.publisher import Publisher
from weightcast.upkeep.collect import collect

ZERO = "0" * 64


@pytest.mark.parametrize(
    "hint",
    [b"", b"{", b"[]", b"null", head_to_json(Position(0, ZERO)), head_to_json(Position(2, ZERO)),
     head_to_json(Position(99, ZERO)), head_to_json(Position(10**12 - 1, ZERO)), b"x" * ((1 << 26) + 2)],
    ids=["empty", "cut", "a list", "null", "old", "older", "ahead", "far ahead", "huge"],
)  # fmt: skip
def test_head_is_found_with_any_hint(world: World, hint: bytes) -> None:
    world.store.put(HEAD, hint)
    INJECTED["lies"] += 1
    assert world.head() == 4
    assert world.pull() == 4
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        assert publisher.publish(weights=world.states[5]).result(30).position.version == 5
    world.check_readers([5])


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_stale_listings_and_a_stale_hint_hide_no_version(world: World, lacking: int) -> None:
    """Neither shows the last few versions: later ones are probed for."""
    store = FaultyStore(world.store, "stale", 10**6, lacking)
    for old in (None, 0, 2):
        store.old_head = None if old is None else head_to_json(Position(old, ZERO))
        head = Chain.open(store).head()
        assert head is not None
        assert head.position.version == 4
        assert world.pull(store=store) == 4
        INJECTED["lies"] += 1


@pytest.mark.parametrize("hint", [None, 0, 2, 4])
@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_collect_with_stale_listings_loses_nothing(world: World, lacking: int, hint: int | None) -> None:
    """The head's hint is missing, older or right; listings of the channel's objects lack their last keys."""
    world.store.now += 1000 * DAY
    calls = FaultyStore(world.store, "stale", 10**6, lacking)
    with pytest.raises(WeightcastError):
        collect(Chain.open(calls), Retention())

    stale = ScriptedStore(world.store)
    if hint is None:
        stale.hide(HEAD)
    else:
        position = world.chain.manifest(hint).position
        stale.answer("get", HEAD, lambda _: head_to_json(position))
    stale.answer("list", lambda prefix: prefix in (MANIFESTS, DELTAS, ANCHORS), lambda found: found[:-lacking])
    for _ in range(3):
        world.store.now += 1000.0
        collect(Chain.open(stale), Retention(100.0, 10.0, 100.0))
        world.check_readers([4])


@pytest.mark.parametrize("skew", [-3e8, 3e8])
def test_ages_are_measured_by_the_clock_of_the_store(
    world: World, skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is ten years off writes and collects: nothing young goes, and what is old does."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        publisher.publish(weights=world.states[5]).result(30)
    with Subscriber(world.store, nothing_like(world.states[0]), threads=1, replica="skewed") as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    before = world.objects()
    assert not any(collect(world.chain, Retention()).versions)
    assert world.objects() == before
    world.store.now += 100 * DAY
    assert collect(world.chain, Retention()).versions == (0, 1, 2, 3, 4)
    world.check_readers([5])


def test_damaged_hints_are_ignored(world: World) -> None:
    pin(world.chain, 2)
    for key in (f"{REPLICAS}junk.json", f"{PINS}junk.json", WRITER, INDEX, "doomed/junk.json", f"{DELTAS}junk",
                f"{ANCHORS}junk/x", f"{MANIFESTS}junk", "elsewhere/x"):  # fmt: skip
        world.store.put(key, b"\xff{")
    world.store.now += 1000 * DAY
    collect(world.chain, Retention())
    world.check_readers([4])
    world.pull(2)
    left = world.objects()
    assert {f"{DELTAS}junk", f"{ANCHORS}junk/x", f"{MANIFESTS}junk", "elsewhere/x"} <= left, "not ours to delete"


def test_replica_without_heartbeats_for_long_is_forgotten(world: World) -> None:
    with Subscriber(world.store, nothing_like(world.states[0]), threads=1, replica="pod-1") as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert keys_of(world, REPLICAS)
    world.store.now += 10 * DAY
    collect(world.chain, Retention())
    assert keys_of(world, REPLICAS)
    world.store.now += 30 * DAY
    collect(world.chain, Retention())
    assert keys_of(world, REPLICAS) == []


def test_collecting_does_not_make_damage_worse(world: World) -> None:
    """A delta is lost, and an anchor leads to the versions after it: it is neither the newest nor the oldest."""
    for version in (3, 4):
        follow(world, policy=Pinned(version))
        with opened(world) as mirror:
            cut_anchor(world.chain, mirror)
    world.store.delete(world.chain.manifest(2).objects[0].key)
    for _ in range(3):
        world.store.now += 2.0
        collect(world.chain, Retention(window=1e9, grace=1.0))
    for version in (0, 1, 3, 4):
        world.pull(version)


@pytest.mark.parametrize("damage", ["missing", "empty", "one byte short"])
@pytest.mark.parametrize("kind", [f"{ANCHORS}000000000002", f"{DELTAS}000000000003", f"{DELTAS}000000000004"])
def test_collecting_does_not_rely_on_damaged_objects(rich: World, kind: str, damage: str) -> None:
    """The cheapest route to the head is damaged; the other route must not be deleted."""
    with Publisher(rich.store, wc.Arrays.copy_of(rich.states[4]), threads=1) as publisher:
        publisher.publish(weights=rich.states[5]).result(30)
    for key in keys_of(rich, kind):
        world = rich.clone(rich.root.parent / "spoilt")
        DAMAGES[damage](world.store, key, key)
        for _ in range(3):
            world.store.now += 1000.0
            collect(world.chain, Retention(100.0, 10.0, 100.0))
        assert world.pull() == 5, key
        shutil.rmtree(world.root)


def test_versions_of_a_new_anchor_stay_reachable_within_the_window(world: World) -> None:
    """An anchor in the middle of the window and a newer one after it: the versions between need the first."""
    position = Position(5, wc.fingerprint(world.states[5]).digest)
    ref = world.chain.put_anchor(position, {path.name: path for path in world.checkpoint(5).iterdir()})
    world.chain.commit(world.chain.draft(position, None, ref, None, 0, None, "anew"))
    for version in (6, 7):
        with Publisher(world.store, wc.Arrays.copy_of(world.states[version]), threads=1) as publisher:
            assert publisher.publish().result(30).position.version == version
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    for _ in range(3):
        world.store.now += 2.0
        collect(world.chain, Retention(window=1e9, grace=1.0))
    for version in range(8):
        world.pull(version)


def test_trainer_restarted_from_an_older_checkpoint_continues_from_the_head(world: World) -> None:
    with Publisher(world.store, wc.Arrays.copy_of(world.states[2]), threads=1) as publisher:
        assert publisher.publish().result(30).position.version == 5
        publisher.publish(weights=world.states[6]).result(30)
    world.states[5] = world.states[2]
    world.check_readers([6])
    world.pull(5)


def test_manifests_collected_during_a_slow_read_are_skipped(world: World) -> None:
    """It has listed everything; before it fetches, all but the newest anchor is deleted."""
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)

    def collect_all(_: Request) -> None:
        for _ in range(3):
            world.store.now += 1000.0
            collect(world.chain, Retention(100.0, 10.0, 100.0))

    slow = ScriptedStore(world.store)
    slow.before("get", (ANCHORS, DELTAS), collect_all, times=1)
    with pytest.raises(WeightcastError):
        world.pull(1, slow)
    assert world.pull(store=slow) == 4
    behind = wc.Arrays.copy_of(world.states[2])
    with Subscriber(world.store, behind, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    assert same_bits(behind, world.states[4])
