"""Two writers at once: one wins, the other is told, and the chain stays whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub
import pytest
from cases import same_bits
from faults import Crash, FaultyStore
from scripted_store import ScriptedStore
from worlds import World, follow, nothing_like, opened, states
from writers import SOON, loses, publisher_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import CHANNEL, DELTAS, MANIFESTS, manifest_key
from weightcast.channel.policy import Pinned
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
from weightcast.store.file import FileStore
from weightcast.upkeep.collect import collect, reset
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify, verify_deep

# -- stores that fence -------------------------------------------------------------------------------------------------


def test_second_commit_of_a_version_is_a_conflict_and_leaves_no_trace(world: World) -> None:
    first, second = (publisher_of(world.store, world.states[2]) for _ in range(2))
    assert first.publish(weights=world.states[3]).result(30).position.version == 3
    loses(second, world.states[5])
    assert first.publish(weights=world.states[4]).result(30).position.version == 4
    first.close()
    world.check_readers([4])


def test_loser_of_a_conflict_continues_from_the_head_after_a_restart(world: World) -> None:
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


def test_two_processes_publishing_at_once_make_one_chain(tmp_path: Path) -> None:
    bits = states(8)
    init(FileStore(tmp_path / "bucket"), bits[0])
    answers = race(str(tmp_path / "bucket"), bits)
    assert sorted(kind for kind, _ in answers.values()) == ["all", "conflict"]
    assert sum(len(versions) for _, versions in answers.values()) == 7


def test_two_processes_publishing_at_once_without_a_fence_make_one_chain(tmp_path: Path) -> None:
    """At least one gets a conflict. Both may, if each saw the other's: then one starts again; nothing is lost."""
    bits = states(8)
    with hub.found(tmp_path / "hub") as hugging_face:
        url = hugging_face.make_bucket("race")
        init(url, bits[0])
        answers = race(url, bits)
    assert "conflict" in {kind for kind, _ in answers.values()}


def test_two_inits_at_once_make_one_channel(ram: Path) -> None:
    world = World.make(ram / "world")
    rival = ScriptedStore(world.store)
    rival.before("create", CHANNEL, lambda _: init(world.store, world.states[0]), times=1)
    with pytest.raises(ConflictError, match="another writer created a channel here"):
        init(rival, world.states[1])
    world.check_readers([0])


@pytest.mark.parametrize("fault", ["refuse", "lose", "twice", "delay"])
def test_commit_whose_response_was_lost_is_recognised(world: World, fault: str) -> None:
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


def test_writer_suspended_while_others_publish_gets_a_conflict(world: World) -> None:
    """The manifest that would fence it off is collected: only the head shows that it is late."""
    sleeper = publisher_of(world.store, world.states[2])
    grow_and_collect(world)
    loses(sleeper, world.states[6])
    assert list(world.chain.versions()) == [5]
    world.check_readers([5])


def test_folder_with_an_outdated_mirror_is_published_on_top_of_the_head(world: World) -> None:
    follow(world)
    grow_and_collect(world)
    assert publish(world.store, world.checkpoint(6), world.mirror).manifest.position.version == 6
    world.check_readers([6])


def test_outdated_mirror_is_noticed_at_once(world: World) -> None:
    """One poll, as `weightcast pull` does: the next version is collected, which is not to say that there is none."""
    follow(world)
    grow_and_collect(world)
    assert follow(world) == 5
    world.check_mirror([5])


def test_writer_of_a_reset_channel_leaves_nothing_in_the_new_one(world: World) -> None:
    writer = publisher_of(world.store, world.states[2])
    reset(world.store)
    init(world.store, world.states[5])
    world.states[0] = world.states[5]
    with pytest.raises(ChannelError):
        writer.publish(weights=world.states[3]).result(30)
    writer.close()
    assert [key for key in world.objects() if key.startswith(MANIFESTS)] == [manifest_key(0)]
    world.check_readers([0])


# -- one writer and its own threads ------------------------------------------------------------------------------------


def test_publishing_from_several_threads_is_serialised(world: World) -> None:
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


def test_publisher_that_could_not_send_can_be_closed_twice(world: World) -> None:
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


def test_publish_to_a_full_bucket_is_retried(world: World) -> None:
    store = ScriptedStore(world.store)
    with Publisher(store, wc.Arrays.copy_of(world.states[2]), threads=1, retry_after=0.05) as publisher:
        full = store.fail("put", DELTAS, SpaceError("the disk of the store is full"))
        receipt = publisher.publish(weights=world.states[3])
        with pytest.raises(SpaceError):
            publisher.flush()
        full.end()
        assert receipt.result(30).position.version == 3
    world.check_readers([3])


def test_publish_during_a_commit_in_doubt_waits_for_it(world: World) -> None:
    """The first commit took effect but its response was lost: it stays, and later publishes are one more version."""
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


def test_interrupted_reset_can_be_repeated(world: World) -> None:
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


def test_two_squashes_at_once_make_the_same_objects(world: World) -> None:
    with ThreadPoolExecutor(2) as pool:
        cut = list(pool.map(lambda name: list(squash(world.chain, world.root / name, levels=(2,))), ["one", "two"]))
    assert {edge.key for edges in cut for edge in edges} == {edge.key for edge in world.chain.squash_edges(0)}
    assert len(list(world.chain.squash_edges(0))) == 1
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep") if finding] == []


def test_second_squash_in_the_same_folder_is_refused(ram: Path) -> None:
    world = World.make(ram / "world").begin(4)
    going = squash(world.chain, world.root / "scratch", levels=(2,))
    next(going)
    with pytest.raises(CheckpointError, match="another follower"):
        list(squash(world.chain, world.root / "scratch", levels=(2,)))
    assert [(edge.base, edge.result) for edge in going] == [(2, 4)]
    world.check_readers([4])
