"""What a losing writer leaves in the bucket is neither read nor relied on; uploads in flight are not collected."""

from __future__ import annotations

from cases import same_bits
from faults import FaultyStore
from scripted_store import Request, ScriptedStore
from worlds import DAY, World, follow, opened
from writers import SOON, publisher_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, Position
from weightcast.channel.retention import Retention
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.upkeep.collect import collect
from weightcast.upkeep.verify import verify, verify_deep


def orphan_anchor(world: World, version: int, state: int) -> str:
    """An anchor that was uploaded for a version which another writer then committed with other weights."""
    position = Position(version, wc.fingerprint(world.states[state]).digest)
    folder = world.checkpoint(state)
    return world.chain.put_anchor(position, {path.name: path for path in folder.iterdir()}).key


def orphan_delta(world: World, version: int, state: int) -> str:
    patch = wc.encode(wc.diff(world.states[version - 1], world.states[state]), "banded", world.states[version - 1])
    return world.chain.put_delta(Position(version, wc.fingerprint(world.states[state]).digest), patch).key


def test_anchor_of_a_loser_is_neither_read_nor_relied_on(world: World) -> None:
    """It is at a committed version, with other bits, and would be the cheapest route to everything after it."""
    orphan_anchor(world, 1, state=6)
    calls = FaultyStore(world.store)
    assert world.pull(store=calls) == 2
    assert not calls.asked("get", f"{ANCHORS}000000000001"), "it was downloaded"
    for version in range(3):
        world.pull(version)
    assert list(verify(world.chain)) == []
    for _ in range(3):
        world.store.now += 1000.0
        collect(world.chain, SOON)
    world.check_readers([2])
    assert not [key for key in world.objects() if key.startswith(f"{ANCHORS}000000000001")]


def test_delta_of_a_loser_is_neither_read_nor_relied_on(world: World) -> None:
    key = orphan_delta(world, 2, state=6)
    for version in range(3):
        world.pull(version)
    assert list(verify(world.chain)) == []
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep") if finding] == []
    for _ in range(2):
        world.store.now += 1000.0
        collect(world.chain, Retention(window=1e9, grace=10.0))
    assert key not in world.objects()
    world.check_readers([2])


def test_delta_of_a_loser_to_a_version_committed_as_an_anchor_is_not_an_edge(world: World) -> None:
    """The only delta of that version, but what was committed is an anchor."""
    position = Position(3, wc.fingerprint(world.states[3]).digest)
    ref = world.chain.put_anchor(position, {path.name: path for path in world.checkpoint(3).iterdir()})
    world.chain.commit(world.chain.draft(position, None, ref, None, 0, None, "winner"))
    orphan_delta(world, 3, state=6)
    with publisher_of(world.store, world.states[3]) as publisher:
        publisher.publish(weights=world.states[4]).result(30)
    for version in range(5):
        world.pull(version)
    world.store.now += 1000.0
    collect(world.chain, Retention(window=1e9, grace=10.0))
    for version in range(5):
        world.pull(version)
    world.check_readers([4])


def test_weights_of_a_loser_are_not_a_version(world: World) -> None:
    """A replica that holds them, such as the loser itself, is updated to the head like any newcomer."""
    orphan_delta(world, 2, state=6)
    orphan_anchor(world, 1, state=5)
    for state in (5, 6):
        held = wc.Arrays.copy_of(world.states[state])
        with Subscriber(world.store, held, threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            assert staged.start is None
            assert subscriber.apply(staged).version == 2
        assert same_bits(held, world.states[2])


def test_running_upload_is_not_collected_at_any_age(world: World) -> None:
    """A delta that waits for its commit: its writer was slow, or has just been restarted and sent the same again."""
    position = Position(3, wc.fingerprint(world.states[3]).digest)
    data = wc.encode(wc.diff(world.states[2], world.states[3]), "banded", world.states[2])
    ref = world.chain.put_delta(position, data)
    world.store.now += 100 * DAY
    collect(world.chain, SOON)
    world.chain.commit(world.chain.draft(position, world.chain.manifest(2).position, ref, "banded", 1, None, "slow"))
    world.check_readers([3])


def test_running_upload_of_the_next_anchor_is_not_collected_at_any_age(world: World) -> None:
    """Nor once it has its record, until another writer commits that version with other weights."""
    key = orphan_anchor(world, 3, state=3)
    files = {key for key in world.objects() if key.startswith(f"{ANCHORS}000000000003")}
    for left in (files, files - {key}):
        world.store.now += 100 * DAY
        collect(world.chain, SOON)
        assert left <= world.objects()
        world.store.delete(key)
    with publisher_of(world.store, world.states[2]) as publisher:
        publisher.publish(weights=world.states[4]).result(30)
    world.states[3] = world.states[4]
    world.store.now += 100 * DAY
    collect(world.chain, SOON)
    assert not files & world.objects()
    world.check_readers([3])


def test_running_upload_of_an_anchor_is_not_collected(world: World) -> None:
    """Its first file is older than the grace period when the last one arrives."""

    def collect_meanwhile(_: Request) -> None:
        world.store.now += 8.0
        collect(world.chain, Retention(window=1e9, grace=10.0))

    follow(world)
    slow = ScriptedStore(world.store)
    slow.after("put", ANCHORS, collect_meanwhile)
    with opened(world) as mirror:
        cut_anchor(Chain(slow, world.chain.channel), mirror)
    assert [edge.result for edge in world.chain.anchor_edges()] == [0, 2]
    world.check_readers([2])
