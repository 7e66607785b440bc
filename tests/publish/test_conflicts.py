"""Two writers at once: one wins, the other is told, and the chain stays whole, on stores that fence and on others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub
import pytest
from cases import same_bits
from faults import Crash, FaultyStore
from scripted_store import Request, ScriptedStore
from worlds import DAY, NOW, World, follow, nothing_like, opened, states

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, CHANNEL, DELTAS, MANIFESTS, Position, manifest_key
from weightcast.channel.policy import Pinned
from weightcast.channel.retention import Retention
from weightcast.errors import (
    ChannelError,
    CheckpointError,
    ConflictError,
    SpaceError,
    StoreError,
    UnreachableError,
    UsageError,
)
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.file import FileStore
from weightcast.store.hub import HubStore
from weightcast.upkeep.collect import collect, reset
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify, verify_deep

SOON = Retention(window=100.0, grace=10.0, patience=100.0)


@pytest.fixture
def world(ram: Path) -> World:
    return World.make(ram / "world").begin(2)


def publisher_of(store: Store, weights: wc.Arrays, writer: str | None = None) -> Publisher:
    return Publisher(store, wc.Arrays.copy_of(weights), threads=1, writer=writer)


def loses(publisher: Publisher, weights: wc.Arrays) -> None:
    """Publishing with it fails for good, and says why."""
    with pytest.raises(ConflictError, match="Only one may write"):
        publisher.publish(weights=weights).result(30)
    with pytest.raises(ConflictError):
        publisher.publish(weights=weights)
    with pytest.raises(ConflictError):
        publisher.flush()
    publisher.close()


# -- stores that fence -------------------------------------------------------------------------------------------------


def test_the_second_to_commit_a_version_is_told_and_nothing_of_it_is_visible(world: World) -> None:
    first, second = (publisher_of(world.store, world.states[2]) for _ in range(2))
    assert first.publish(weights=world.states[3]).result(30).position.version == 3
    loses(second, world.states[5])
    assert first.publish(weights=world.states[4]).result(30).position.version == 4
    first.close()
    world.check_readers([4])


def test_who_lost_goes_on_from_the_head_after_a_restart(world: World) -> None:
    first, second = (publisher_of(world.store, world.states[2]) for _ in range(2))
    first.publish(weights=world.states[3]).result(30)
    first.close()
    loses(second, world.states[4])
    with publisher_of(world.store, world.states[4]) as again:
        assert again.publish().result(30).position.version == 4
    world.check_readers([4])


def test_many_writers_in_threads_make_one_chain(world: World) -> None:
    """Each tries to commit everything; whatever is acknowledged is committed, to one of them."""
    acknowledged: dict[int, list[str]] = {}
    ready = threading.Barrier(4)

    def write(name: str) -> None:
        publisher = publisher_of(world.store, world.states[2], name)
        ready.wait()
        try:
            for weights in world.states[3:8]:
                version = publisher.publish(weights=weights).result(30).position.version
                acknowledged.setdefault(version, []).append(name)
        except ConflictError:
            return
        finally:
            publisher.close()

    threads = [threading.Thread(target=write, args=(f"writer-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(acknowledged) == [3, 4, 5, 6, 7]
    for version, writers in acknowledged.items():
        assert writers == [world.chain.manifest(version).writer]
    world.check_readers([7])


WRITER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import weightcast as wc
from worlds import states
from weightcast.errors import ConflictError
from weightcast.publish.publisher import Publisher

wc.warm_up()
url, name = sys.argv[2:]
bits = states(8)
publisher = Publisher(url, wc.Arrays.copy_of(bits[0]), threads=1, writer=name)
print("ready", flush=True)
sys.stdin.readline()
done = []
try:
    for weights in bits[1:]:
        done.append(publisher.publish(weights=weights).result(60).position.version)
    print(json.dumps(["all", done]), flush=True)
except ConflictError:
    print(json.dumps(["conflict", done]), flush=True)
publisher.close()
"""


def race(url: str, bits: list[wc.Arrays]) -> dict[str, tuple[str, list[int]]]:
    """Two processes write to a channel at once: how it ended for each, and the versions that it was told are its own.

    Every version is as its writer was told, and has the right bits.
    """
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parents[1] / "support"), url]
    writers = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    }
    for process in writers.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in writers.values():
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {name: json.loads(process.communicate()[0]) for name, process in writers.items()}
    chain = Chain.open(open_store(url))
    for name, (_, versions) in answers.items():
        assert all(chain.manifest(version).writer == name for version in versions)
    assert list(verify(chain)) == []
    acknowledged = sorted(version for _, versions in answers.values() for version in versions)
    assert acknowledged == list(range(1, len(acknowledged) + 1)) == list(chain.versions(0))
    for version in range(len(acknowledged) + 1):
        fresh = nothing_like(bits[0])
        with Subscriber(chain.store, fresh, Pinned(version), threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
        assert same_bits(fresh, bits[version])
    return answers


def test_two_processes_at_once(tmp_path: Path) -> None:
    bits = states(8)
    init(FileStore(tmp_path / "bucket"), bits[0])
    answers = race(str(tmp_path / "bucket"), bits)
    assert sorted(kind for kind, _ in answers.values()) == ["all", "conflict"]
    assert sum(len(versions) for _, versions in answers.values()) == 7


def test_two_processes_at_once_without_a_fence(tmp_path: Path) -> None:
    """At least one is told. Both may be, if each saw the other's: then one must start again, and nothing is lost."""
    bits = states(8)
    with hub.found(tmp_path / "hub") as hugging_face:
        url = hugging_face.make_bucket("race")
        init(url, bits[0])
        answers = race(url, bits)
    assert "conflict" in {kind for kind, _ in answers.values()}


def test_two_channels_begun_at_once_are_one(ram: Path) -> None:
    world = World.make(ram / "world")
    rival = ScriptedStore(world.store)
    rival.before("create", CHANNEL, lambda _: init(world.store, world.states[0]), times=1)
    with pytest.raises(ConflictError, match="another writer created a channel here"):
        init(rival, world.states[1])
    world.check_readers([0])


@pytest.mark.parametrize("fault", ["refuse", "lose", "twice", "delay"])
def test_a_commit_whose_answer_was_lost_is_ours(world: World, fault: str) -> None:
    store = FaultyStore(world.store)
    with Publisher(store, wc.Arrays.copy_of(world.states[2]), threads=1, retry_after=0.05) as publisher:
        store.fault, store.at_request = fault, ("create", manifest_key(3))
        assert publisher.publish(weights=world.states[3]).result(30).position.version == 3
    world.check_readers([3])


# -- who slept ---------------------------------------------------------------------------------------------------------


def grow_and_collect(world: World) -> None:
    """Others publish on, and all but the head is collected."""
    with publisher_of(world.store, world.states[2]) as other:
        for version in (3, 4, 5):
            other.publish(weights=world.states[version]).result(30)
    follow(world, folder=world.root / "other")
    with opened(world, world.root / "other") as mirror:
        cut_anchor(world.chain, mirror)
    for _ in range(3):
        world.store.now += 1000.0
        collect(world.chain, SOON)
    assert list(world.chain.versions()) == [5]


def test_a_writer_that_slept_while_others_went_on_cannot_write_into_the_past(world: World) -> None:
    """The manifest that would fence it off is collected: nothing but the head tells it that it is late."""
    sleeper = publisher_of(world.store, world.states[2])
    grow_and_collect(world)
    loses(sleeper, world.states[6])
    assert list(world.chain.versions()) == [5]
    world.check_readers([5])


def test_a_folder_whose_mirror_slept_is_published_on_top_of_the_head(world: World) -> None:
    follow(world)
    grow_and_collect(world)
    assert publish(world.store, world.checkpoint(6), world.mirror).manifest.position.version == 6
    world.check_readers([6])


def test_a_mirror_that_slept_notices_at_once(world: World) -> None:
    """One poll, as `weightcast pull` does: the next version is collected, which is not to say that there is none."""
    follow(world)
    grow_and_collect(world)
    assert follow(world) == 5
    world.check_mirror([5])


def test_a_writer_of_a_channel_that_was_started_over_leaves_nothing_in_the_new_one(world: World) -> None:
    writer = publisher_of(world.store, world.states[2])
    reset(world.store)
    init(world.store, world.states[5])
    world.states[0] = world.states[5]
    with pytest.raises(ChannelError):
        writer.publish(weights=world.states[3]).result(30)
    writer.close()
    assert [key for key in world.objects() if key.startswith(MANIFESTS)] == [manifest_key(0)]
    world.check_readers([0])


# -- what losers leave -------------------------------------------------------------------------------------------------


def orphan_anchor(world: World, version: int, state: int) -> str:
    """An anchor that was uploaded for a version which another writer then committed with other weights."""
    position = Position(version, wc.fingerprint(world.states[state]).digest)
    folder = world.checkpoint(state)
    return world.chain.put_anchor(position, {path.name: path for path in folder.iterdir()}).key


def orphan_delta(world: World, version: int, state: int) -> str:
    patch = wc.encode(wc.diff(world.states[version - 1], world.states[state]), "banded", world.states[version - 1])
    return world.chain.put_delta(Position(version, wc.fingerprint(world.states[state]).digest), patch).key


def test_an_anchor_of_a_loser_is_neither_read_nor_relied_on(world: World) -> None:
    """It stands at a committed version, with other bits, and would be the cheapest way to everything behind it."""
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


def test_a_delta_of_a_loser_is_neither_read_nor_relied_on(world: World) -> None:
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


def test_a_delta_of_a_loser_to_a_version_that_began_anew_is_no_way(world: World) -> None:
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


def test_weights_of_a_loser_are_no_version(world: World) -> None:
    """Whoever holds them, the loser itself for one, is brought to the head like any stranger."""
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


def test_an_upload_in_flight_is_not_collected_however_old_it_is(world: World) -> None:
    """A delta that waits for its commit: its writer was slow, or has just been restarted and sent the same again."""
    position = Position(3, wc.fingerprint(world.states[3]).digest)
    data = wc.encode(wc.diff(world.states[2], world.states[3]), "banded", world.states[2])
    ref = world.chain.put_delta(position, data)
    world.store.now += 100 * DAY
    collect(world.chain, SOON)
    world.chain.commit(world.chain.draft(position, world.chain.manifest(2).position, ref, "banded", 1, None, "slow"))
    world.check_readers([3])


def test_an_anchor_of_the_next_version_in_flight_is_not_collected_however_old_it_is(world: World) -> None:
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


def test_an_anchor_in_flight_is_not_collected(world: World) -> None:
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


# -- stores that do not fence ------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "hub"])
def careless(ram: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """On a store that says it creates and overwrites, and on one that never said so: the Hub's buckets."""
    world = World.make(ram / "careless")
    if request.param == "memory":
        world.store = ScriptedStore(now=NOW)
        world.store.overwrite()
        yield world.begin(2)
        return
    with hub.found(ram / "hub") as hugging_face:
        world.store = ScriptedStore(HubStore(hugging_face.make_bucket("careless")), now=NOW)
        yield world.begin(2)


def test_a_store_that_overwrites_is_found_out(careless: World, world: World) -> None:
    assert careless.chain.channel.fence == "list"
    moved = ScriptedStore(world.store.store)
    moved.overwrite()
    with pytest.raises(ChannelError, match="does not honour create-if-absent"):
        publisher_of(moved, world.states[2])


def test_versions_go_on_without_a_fence(careless: World) -> None:
    with publisher_of(careless.store, careless.states[2]) as publisher:
        publisher.publish(weights=careless.states[3]).result(30)
    careless.check_readers([3])
    for version in range(4):
        careless.pull(version)


def test_without_a_fence_the_second_is_told_too(careless: World) -> None:
    for names in (("a", "b"), ("b", "a")):
        head = careless.head()
        assert head is not None
        first, second = (publisher_of(careless.store, careless.states[head], name) for name in names)
        first.publish(weights=careless.states[head + 1]).result(30)
        first.close()
        loses(second, careless.states[7])
        careless.check_readers([head + 1])


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("behind", [False, True])
def test_without_a_fence_one_of_two_wins(careless: World, names: tuple[str, str], behind: bool) -> None:
    """The other commits right before, or right behind, our writing: whatever its name, who wrote first has won."""
    other = publisher_of(careless.store, careless.states[2], names[0])
    won: list[str] = []

    def write(publisher: Publisher, name: str) -> None:
        try:
            publisher.publish(weights=careless.states[3]).result(30)
            won.append(name)
        except ConflictError:
            pass
        publisher.close()

    store = ScriptedStore(careless.store)
    (store.after if behind else store.before)("put", MANIFESTS, lambda _: write(other, "other"), times=1)
    write(Publisher(store, wc.Arrays.copy_of(careless.states[2]), threads=1, writer=names[1]), "ours")
    assert won == (["ours"] if behind else ["other"])
    careless.check_readers([3])


@pytest.mark.parametrize("name", ["a", "z"])
def test_without_a_fence_who_sees_a_rival_withdraws(careless: World, name: str) -> None:
    """Both have written and neither has looked: nobody may count on having won."""
    rival = manifest_key(3, name)

    store = ScriptedStore(careless.store)
    store.after("put", MANIFESTS, lambda _: careless.store.put(rival, b"another writer's"), times=1)
    loses(Publisher(store, wc.Arrays.copy_of(careless.states[2]), threads=1, writer="m"), careless.states[3])
    assert [key for key in careless.objects() if key.startswith(f"{MANIFESTS}000000000003")] == [rival]


@pytest.mark.parametrize("memory", [True, False])
def test_who_holds_a_version_that_was_withdrawn_is_brought_to_what_was_committed(careless: World, memory: bool) -> None:
    """Without a fence a reader may see a manifest that its writer takes back."""
    held = wc.Arrays.copy_of(careless.states[2])
    with Subscriber(careless.store, held if memory else careless.mirror, threads=1) as reader:
        ghost = publisher_of(careless.store, careless.states[2], "ghost")
        ghost.publish(weights=careless.states[5]).result(30)
        ghost.close()
        staged = reader.poll()
        assert staged is not None
        assert reader.apply(staged).version == 3
        (ghostly,) = [listed.key for listed in careless.store.list(MANIFESTS) if "-ghost-" in listed.key]
        careless.store.delete(ghostly)
        with publisher_of(careless.store, careless.states[2]) as publisher:
            for version in (3, 4):
                publisher.publish(weights=careless.states[version]).result(30)
        staged = reader.poll()
        assert staged is not None
        assert reader.apply(staged).version == 4
        assert same_bits(reader.weights, careless.states[4])  # type: ignore[arg-type]


# -- one writer and its own threads ------------------------------------------------------------------------------------


def test_publishing_from_several_threads_is_one_behind_the_other(world: World) -> None:
    with publisher_of(world.store, world.states[2]) as publisher:
        threads = [
            threading.Thread(target=lambda w=weights: publisher.publish(weights=w).result(30))
            for weights in world.states[3:8] * 3
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(verify(world.chain)) == []
    head = world.chain.head()
    assert head is not None
    assert head.position.digest in {wc.fingerprint(state).digest for state in world.states[3:8]}
    fresh = nothing_like(world.states[0])
    with Subscriber(world.store, fresh, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged) == head.position


def test_a_publisher_that_could_not_send_can_be_closed_twice(world: World) -> None:
    store = FaultyStore(world.store)
    publisher = Publisher(store, wc.Arrays.copy_of(world.states[2]), threads=1, retry_after=0.05)
    store.fault, store.at = "part", len(store.calls) + 1
    receipt = publisher.publish(weights=world.states[3])
    with pytest.raises(UnreachableError):
        publisher.close()
    with pytest.raises(StoreError, match="closed before this could be sent"):
        receipt.result(0)
    for action in (publisher.close, publisher.close):
        action()
    with pytest.raises(StoreError):
        publisher.flush()
    with pytest.raises((StoreError, UsageError)):
        publisher.publish(weights=world.states[3])
    world.check_readers([2])


def test_a_full_bucket_is_waited_for_like_any_other_trouble(world: World) -> None:
    store = ScriptedStore(world.store)
    with Publisher(store, wc.Arrays.copy_of(world.states[2]), threads=1, retry_after=0.05) as publisher:
        full = store.fail("put", DELTAS, SpaceError("the disk of the store is full"))
        receipt = publisher.publish(weights=world.states[3])
        with pytest.raises(SpaceError):
            publisher.flush()
        full.end()
        assert receipt.result(30).position.version == 3
    world.check_readers([3])


def test_what_comes_while_a_commit_is_in_doubt_waits_for_it(world: World) -> None:
    """The first commit took effect and nobody heard: it stays as it is, and what came meanwhile is one version more."""
    store = FaultyStore(world.store)
    with Publisher(store, wc.Arrays.copy_of(world.states[2]), threads=1, retry_after=0.05) as publisher:
        store.fault, store.at_request = "part-after", ("create", manifest_key(3))
        first = publisher.publish(weights=world.states[3])
        with pytest.raises(UnreachableError):
            publisher.flush()
        others = [publisher.publish(weights=world.states[state]) for state in (4, 5, 6)]
        assert not any(receipt.done() for receipt in (first, *others))
        store.dead = False
        assert first.result(30).position.version == 3
        assert {receipt.result(30).position.version for receipt in others} == {4}
    world.states[4] = world.states[6]
    world.check_readers([4])
    world.pull(3)


def test_a_reset_cut_short_anywhere_can_be_done_again(world: World) -> None:
    """Until it is done, readers find the old channel as it was, or none that they could mistake for it."""
    calls = FaultyStore(world.clone(world.root.parent / "counted").store)
    reset(calls)
    for number in range(1, len(calls.calls) + 1):
        spoilt = world.clone(world.root.parent / "spoilt")
        with pytest.raises(Crash):
            reset(FaultyStore(spoilt.store, "die", number))
        try:
            with Subscriber(spoilt.store, nothing_like(world.states[0]), threads=1) as subscriber:
                staged = subscriber.poll()
                assert staged is None or staged.position.version == 2
        except ChannelError:
            pass
        reset(spoilt.store)
        assert spoilt.objects() == set()
        init(spoilt.store, world.states[5])
        spoilt.states = [world.states[5]]
        spoilt.check_readers([0])
        shutil.rmtree(spoilt.root)


def test_two_who_squash_at_once_make_the_same(world: World) -> None:
    with ThreadPoolExecutor(2) as pool:
        cut = list(pool.map(lambda name: list(squash(world.chain, world.root / name, levels=(2,))), ["one", "two"]))
    assert {edge.key for edges in cut for edge in edges} == {edge.key for edge in world.chain.squash_edges(0)}
    assert len(list(world.chain.squash_edges(0))) == 1
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep") if finding] == []


def test_two_who_squash_in_one_folder_are_one_too_many(ram: Path) -> None:
    world = World.make(ram / "world").begin(4)
    going = squash(world.chain, world.root / "scratch", levels=(2,))
    next(going)
    with pytest.raises(CheckpointError, match="another follower"):
        list(squash(world.chain, world.root / "scratch", levels=(2,)))
    assert [(edge.base, edge.result) for edge in going] == [(2, 4)]
    world.check_readers([4])


def test_collecting_without_a_fence(careless: World) -> None:
    with publisher_of(careless.store, careless.states[2]) as publisher:
        publisher.publish(weights=careless.states[3]).result(30)
    follow(careless)
    with opened(careless) as mirror:
        cut_anchor(careless.chain, mirror)
    for _ in range(3):
        careless.store.now += 1000.0
        collect(careless.chain, SOON)
    assert list(careless.chain.versions()) == [3]
    careless.check_readers([3])
