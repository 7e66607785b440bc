"""Going back over the last versions from what a mirror kept: no download, proven bits, and a cache that may be lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from faults import Crash
from faulty_disk import FaultyDisk
from scripted_store import ScriptedStore
from worlds import World, follow, opened

from weightcast.channel.keys import ANCHORS, DELTAS
from weightcast.channel.policy import Every, Pinned
from weightcast.disk.checkpoint import MIRROR
from weightcast.follow.history import MOST
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber

HEAD = 7


@pytest.fixture
def world(ram: Path) -> World:
    return World.make(ram / "world").begin(HEAD)


def fetched(world: World, version: int, *, fold: bool = True) -> int:
    """Go to a version; how many objects with weights were asked for."""
    calls = ScriptedStore(world.store)
    assert follow(world, calls, policy=Pinned(version), fold=fold) == version
    assert world.check_mirror([version]) == version
    return calls.count("get", (DELTAS, ANCHORS))


def step_by_step(world: World, *, fold: bool, head: int = HEAD) -> None:
    """A follower that takes every version by itself; ``fold``: it ends after each, as a cron job would."""
    follow(world, policy=Pinned(0), fold=True)
    for _ in range(head):
        follow(world, policy=Every(), fold=fold)


@pytest.mark.parametrize("fold", [False, True], ids=["one fold", "a fold for each version"])
@pytest.mark.parametrize("version", range(HEAD))
def test_follower_goes_back_without_a_download(world: World, fold: bool, version: int) -> None:
    step_by_step(world, fold=fold)
    assert fetched(world, version) == 0
    assert world.check_files() == version


def test_follower_goes_back_and_forth(world: World) -> None:
    step_by_step(world, fold=True)
    for version in (3, 1, 2):
        fetched(world, version)
    assert fetched(world, 1) == 0
    assert fetched(world, HEAD) > 0


def test_log_that_goes_back_is_read_in_order(world: World) -> None:
    """Not folded in between: versions in the log go down and up again."""
    step_by_step(world, fold=True)
    for version in (4, 2):
        assert fetched(world, version, fold=False) == 0
    follow(world)
    with opened(world) as mirror:
        assert mirror.version == HEAD
        assert mirror.fold()
    assert world.check_files() == HEAD


def test_going_back_during_a_read_is_a_download(world: World) -> None:
    """A log that cannot be folded leaves no history; what is fetched waits for the reader as always."""
    follow(world, policy=Pinned(5), fold=True)
    follow(world)
    with Subscriber(world.store, world.mirror, Pinned(6), threads=1, patience=0.1) as subscriber:
        with reading(world.mirror):
            staged = subscriber.poll()
        assert staged is not None
        assert staged.nbytes > 0
        assert subscriber.apply(staged).version == 6
    world.check_mirror([6])


def patches(world: World) -> list[Path]:
    return sorted((world.mirror / MIRROR / "history").glob("*"))


LONG = MOST + 3


@pytest.fixture
def long_world(ram: Path) -> World:
    """More versions than a mirror can go back."""
    return World.make(ram / "world", LONG + 1).begin(LONG)


def test_history_is_bounded(long_world: World) -> None:
    step_by_step(long_world, fold=True, head=LONG)
    assert len(patches(long_world)) == MOST
    assert fetched(long_world, LONG - MOST) == 0
    assert len(patches(long_world)) <= MOST


def test_long_fold_keeps_the_newest_history(long_world: World) -> None:
    follow(long_world, policy=Pinned(0), fold=True)
    with reading(long_world.mirror):  # nothing is folded meanwhile
        for _ in range(LONG):
            follow(long_world, policy=Every())
    assert not patches(long_world)
    follow(long_world, fold=True)
    assert len(patches(long_world)) == MOST
    assert fetched(long_world, LONG - MOST) == 0


@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone", "exchanged"])
def test_history_is_verified_before_it_is_used(world: World, which: int, how: str) -> None:
    step_by_step(world, fold=True)
    path = patches(world)[which]
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "exchanged":
        other = patches(world)[3]
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes({"flipped": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-9], "empty": b""}[how])
    fetched(world, 0)
    assert world.check_files() == 0


def test_follower_killed_while_going_back_recovers(world: World) -> None:
    follow(world, policy=Pinned(5), fold=True)
    follow(world)

    def back(world: World) -> None:
        assert follow(world, policy=Pinned(5), fold=True) == 5

    clean = world.clone(world.root.parent / "clean")
    with FaultyDisk(clean.root) as counting:
        back(clean)
    for at in range(1, len(counting.calls) + 1, 3):  # every operation of a fold is in test_faults_disk
        spoilt = world.clone(world.root.parent / "spoilt")
        with FaultyDisk(spoilt.root, "die", at) as disk, pytest.raises(Crash):
            back(spoilt)
        if at % 2:
            disk.lose_power()
        spoilt.check_mirror([5, 6, 7])
        back(spoilt)
        assert spoilt.check_files() == 5
        assert not list((spoilt.mirror / MIRROR / "history").glob("*.partial"))
        shutil.rmtree(spoilt.root)


def test_new_anchor_drops_the_history(world: World) -> None:
    step_by_step(world, fold=True)
    patches(world)[-1].unlink()
    assert fetched(world, 2) > 0
    assert fetched(world, 1) > 0
