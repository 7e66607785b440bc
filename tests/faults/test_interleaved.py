"""Two at work at once: one pauses at every call to the store in turn, and the other does all it has to meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from faults import INJECTED
from operations import LEVELS, RETENTION
from scripted_store import ScriptedStore
from worlds import World, follow, nothing_like, opened

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS
from weightcast.channel.policy import Pinned
from weightcast.errors import ConflictError, WeightcastError
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.store.base import Store
from weightcast.upkeep.collect import collect
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify

Work = Callable[[World, Store], object]


def _publish(state: int) -> Work:
    def work(world: World, store: Store) -> None:
        head = world.head()
        assert head is not None
        with Publisher(store, wc.Arrays.copy_of(world.states[head]), threads=1) as publisher:
            publisher.publish(weights=world.states[state]).result(30)

    return work


def _restart(world: World, store: Store) -> None:
    """From weights that were some version once."""
    with Publisher(store, wc.Arrays.copy_of(world.states[1]), threads=1) as publisher:
        publisher.publish()


def _publish_folder(world: World, store: Store) -> None:
    publish(store, world.checkpoint(6), world.root / "keeper")


def _pull(world: World, store: Store) -> None:
    fresh = nothing_like(world.states[0])
    with Subscriber(store, fresh, threads=1) as subscriber:
        staged = subscriber.poll()
        if staged is not None:
            position = subscriber.apply(staged)
            assert wc.fingerprint(fresh).digest == position.digest
            assert position.digest in digests(world)


def _follow(world: World, store: Store) -> None:
    follow(world, store, world.root / "late")


def _squash(world: World, store: Store) -> None:
    list(squash(Chain.open(store), world.root / "scratch", levels=LEVELS))


def _collect(world: World, store: Store) -> None:
    """Both halves: what is deleted at once, and what a list of an earlier run says."""
    collect(Chain.open(store), RETENTION)


def _sleep(world: World, store: Store) -> None:
    """So much time passes, and so much is collected, that nobody could count on what was in flight."""
    for _ in range(3):
        world.store.now += 1000.0
        collect(Chain.open(store), RETENTION)


def _anchor(world: World, store: Store) -> None:
    with opened(world) as mirror:
        cut_anchor(Chain.open(store), mirror)


def _begin_anew(world: World, store: Store) -> None:
    """The bucket lost its anchors: a publisher of other weights makes one of the next version."""
    for listed in list(world.store.list(ANCHORS)):
        world.store.delete(listed.key)
    with suppress(ConflictError), Publisher(store, wc.Arrays.copy_of(world.states[5]), threads=1) as publisher:
        publisher.publish()


WORKS: dict[str, Work] = {
    "publish": _publish(5),
    "publish other": _publish(7),
    "restart": _restart,
    "begin anew": _begin_anew,
    "publish a folder": _publish_folder,
    "pull": _pull,
    "follow": _follow,
    "squash": _squash,
    "collect": _collect,
    "anchor": _anchor,
    "sleep": _sleep,
}

PAIRS = [
    ("collect", "publish"), ("collect", "restart"), ("collect", "follow"), ("collect", "squash"), ("collect", "anchor"),
    ("collect", "collect"), ("publish", "collect"), ("publish", "publish other"), ("publish", "publish a folder"),
    ("restart", "collect"), ("restart", "publish other"), ("begin anew", "collect"), ("publish a folder", "collect"),
    ("publish a folder", "publish other"), ("pull", "collect"), ("pull", "publish"), ("follow", "collect"),
    ("follow", "squash"), ("squash", "collect"), ("squash", "publish"), ("anchor", "collect"),
]  # fmt: skip
SLEEPERS = ["publish", "restart", "begin anew", "publish a folder", "pull", "follow", "squash", "collect", "anchor"]
AT_MOST = 12
"""Pauses of one pair, spread evenly."""


def digests(world: World) -> set[str]:
    return {wc.fingerprint(state).digest for state in world.states}


def old_channel(root: Path) -> World:
    """Versions 0 to 4, all of them old, anchors of 0 and 2, a mirror at 4 with its log; half of it is collected."""
    world = World.make(root).begin(4)
    follow(world, policy=Pinned(2))
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    follow(world)
    world.checkpoint(6)
    world.store.now += 1000.0
    collect(world.chain, replace(RETENTION, window=1000.0))
    world.store.now += 2 * RETENTION.grace
    return world


def paused_at(number: int, world: World, meanwhile: Work) -> ScriptedStore:
    """The world's store, in which others get their turn right before one request."""
    store = ScriptedStore(world.store)
    store.before("", "", lambda _: meanwhile(world, world.store), skip=number - 1, times=1)
    return store


def paused(first: Work, second: Work, ram: Path) -> Iterator[tuple[World, Callable[[], object]]]:
    """(world, ``first`` with ``second`` in the midst of it), for every call of ``first`` in turn."""
    before = old_channel(ram / "before")
    counted = before.clone(ram / "counted")
    calls = ScriptedStore(counted.store)
    first(counted, calls)
    for number in range(1, len(calls.calls) + 1, max(1, len(calls.calls) // AT_MOST)):
        world = before.clone(ram / "world")
        store = paused_at(number, world, second)
        INJECTED["interleaved"] += 1
        where = f"paused at call {number}, {calls.calls[number - 1]}"
        try:
            yield world, partial(first, world, store)
            check(world)
        except Exception as error:
            error.add_note(where)
            raise
        shutil.rmtree(world.root)


@pytest.mark.parametrize("pair", PAIRS, ids=" while another is at ".join)
def test_chain_stays_intact_whichever_process_pauses(pair: tuple[str, str], ram: Path) -> None:
    publishing = [name for name in pair if name.startswith(("publish", "restart"))]
    for _, run in paused(WORKS[pair[0]], WORKS[pair[1]], ram):
        with suppress(*[ConflictError][: len(publishing) - 1]):
            run()


@pytest.mark.parametrize("name", SLEEPERS)
def test_process_suspended_for_days_may_fail_and_does_no_damage(name: str, ram: Path) -> None:
    for world, run in paused(WORKS[name], _sleep, ram):
        try:
            run()
        except WeightcastError:
            WORKS[name](world, world.store)  # another attempt is all it takes


def check(world: World) -> None:
    """The head can be had, is one of those published, and nothing is amiss; after more collecting, too."""
    assert list(verify(world.chain)) == []
    _sleep(world, world.store)
    assert list(verify(world.chain)) == []
    _pull(world, world.store)
    assert world.head() is not None


def test_two_interleaved_inits_make_one_channel(ram: Path) -> None:
    world = World.make(ram / "world")
    calls = ScriptedStore(World.make(ram / "counted").store)
    init(calls, world.states[0])
    for number in range(1, len(calls.calls) + 1):
        world = World.make(ram / f"world-{number}")
        store = paused_at(number, world, _begin)
        with suppress(ConflictError):
            init(store, world.states[1])
        INJECTED["interleaved"] += 1
        head = world.chain.head()
        assert head is not None
        assert head.position.version == 0
        assert head.position.digest in digests(world)
        _pull(world, world.store)
        assert list(verify(world.chain)) == []


def _begin(world: World, store: Store) -> None:
    with suppress(ConflictError):
        init(store, world.states[0])
