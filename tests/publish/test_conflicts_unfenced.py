"""Two writers on stores that cannot create an object only if it is absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hub
import pytest
from cases import same_bits
from scripted_store import ScriptedStore
from worlds import NOW, World, follow, opened
from writers import SOON, loses, publisher_of

import weightcast as wc
from weightcast.channel.keys import MANIFESTS, manifest_key
from weightcast.errors import (
    ChannelError,
    ConflictError,
)
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.publisher import Publisher
from weightcast.store.hub import HubStore
from weightcast.upkeep.collect import collect


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


def test_store_that_overwrites_is_detected(careless: World, world: World) -> None:
    assert careless.chain.channel.fence == "list"
    moved = ScriptedStore(world.store.store)
    moved.overwrite()
    with pytest.raises(ChannelError, match="does not honour create-if-absent"):
        publisher_of(moved, world.states[2])


def test_versions_are_published_without_a_fence(careless: World) -> None:
    with publisher_of(careless.store, careless.states[2]) as publisher:
        publisher.publish(weights=careless.states[3]).result(30)
    careless.check_readers([3])
    for version in range(4):
        careless.pull(version)


def test_second_commit_without_a_fence_is_a_conflict(careless: World) -> None:
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
def test_one_of_two_commits_without_a_fence_wins(careless: World, names: tuple[str, str], behind: bool) -> None:
    """The other commits right before or right after our write: whatever its name, the first to write wins."""
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
def test_writer_without_a_fence_withdraws_when_it_sees_a_rival(careless: World, name: str) -> None:
    """Both have written and neither has listed: neither may assume that it won."""
    rival = manifest_key(3, name)

    store = ScriptedStore(careless.store)
    store.after("put", MANIFESTS, lambda _: careless.store.put(rival, b"another writer's"), times=1)
    loses(Publisher(store, wc.Arrays.copy_of(careless.states[2]), threads=1, writer="m"), careless.states[3])
    assert [key for key in careless.objects() if key.startswith(f"{MANIFESTS}000000000003")] == [rival]


@pytest.mark.parametrize("memory", [True, False])
def test_replica_at_a_withdrawn_version_moves_to_the_committed_one(careless: World, memory: bool) -> None:
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


def test_collect_without_a_fence_keeps_the_chain_intact(careless: World) -> None:
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
