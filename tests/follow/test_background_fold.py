"""Folding beside updates: only readers of the files wait for it, all bits stay exact, and failures are raised."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cases import moved, same_bits
from faults import Crash
from faulty_disk import FaultyDisk
from mirrors import advance, edit
from waiting import until
from worlds import World, follow, model_of, opened

import weightcast as wc
from weightcast.channel.policy import Every, Pinned
from weightcast.disk.checkpoint import MIRROR
from weightcast.errors import CheckpointError, SpaceError, WeightcastError
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_reader import mirror_status, reading, reading_held
from weightcast.follow.staging import stage_route
from weightcast.follow.subscriber import Subscriber

HEAD = 7


@pytest.fixture
def world(ram: Path) -> World:
    """A channel with versions 0 to 7, and a mirror at version 2."""
    world = World.make(ram / "world").begin(HEAD)
    follow(world, policy=Pinned(2), fold=True)
    return world


def log_of(world: World) -> list[Path]:
    return sorted((world.mirror / MIRROR / "log").iterdir())


def fold_calls(world: World) -> list[str]:
    """Operations on files of a fold from version 2 to 4, from a clean run on a copy."""
    copy = world.clone(world.root.parent / "counted")
    with FaultyDisk(copy.root) as disk, opened(copy) as mirror:
        advance(copy, mirror, 3)
        advance(copy, mirror, 4)
        before = len(disk.calls)
        mirror.fold()
    shutil.rmtree(copy.root)
    return disk.calls[before:]


@contextmanager
def folding(world: World, at: int | str = "pwrite", which: int = 0) -> Iterator[tuple[Mirror, FaultyDisk]]:
    """A mirror at version 4 and its disk, which holds a fold from version 2 at an operation, by its number or name."""
    if isinstance(at, str):
        at = [number for number, call in enumerate(fold_calls(world), 1) if call.startswith(at)][which]
    with FaultyDisk(world.root) as disk, opened(world) as mirror:
        advance(world, mirror, 3)
        advance(world, mirror, 4)
        disk.hold(at)
        mirror.begin_fold()
        assert disk.held.wait(30)
        try:
            yield mirror, disk
        finally:
            if disk.fault == "hold":
                disk.let_go()


def calls_of_an_update(world: World) -> int:
    """How many operations on files it takes to stage and apply version 4 after version 3."""
    copy = world.clone(world.root.parent / "counted")
    with FaultyDisk(copy.root) as disk, opened(copy) as mirror:
        advance(copy, mirror, 3)
        before = len(disk.calls)
        advance(copy, mirror, 4)
        count = len(disk.calls) - before
    shutil.rmtree(copy.root)
    return count


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def exact(mirror: Mirror, state: wc.Arrays) -> bool:
    """Through files and log, and as the next version is decoded."""
    assert mirror.weights is not None
    assert mirror.base is not None
    return same_bits(wc.Arrays.copy_of(mirror.weights), state) and same_bits(wc.Arrays.copy_of(mirror.base), state)


def test_updates_during_a_fold_are_staged_and_applied_with_exact_bits(world: World) -> None:
    """At every operation of the fold: files that are half written are never seen."""
    for at in range(1, len(fold_calls(world)) + 1):
        copy = world.clone(world.root.parent / "copy")
        with folding(copy, at) as (mirror, disk):
            assert exact(mirror, copy.states[4])
            for version in (5, 6):
                advance(copy, mirror, version)
                assert exact(mirror, copy.states[version])
            disk.let_go()
            advance(copy, mirror, 7)
            assert exact(mirror, copy.states[7])
        assert copy.check_mirror([7]) == 7
        shutil.rmtree(copy.root)


def test_apply_begins_a_fold_and_does_not_wait_for_it(world: World) -> None:
    """What is held is an operation that only the fold has."""
    update = calls_of_an_update(world)
    with FaultyDisk(world.root) as disk, opened(world, fold_every=2) as mirror:
        advance(world, mirror, 3)
        disk.hold(update + 1)
        advance(world, mirror, 4)
        assert disk.held.wait(30)
        advance(world, mirror, 5)
        assert exact(mirror, world.states[5])
        disk.let_go()
    assert world.check_files() == 4


def test_layers_that_a_fold_has_deleted_are_read_until_the_next_call(world: World) -> None:
    with opened(world, fold_every=2) as mirror:
        advance(world, mirror, 3)
        advance(world, mirror, 4)
        weights = mirror.weights
        assert weights is not None
        until(lambda: not log_of(world))
        assert same_bits(wc.Arrays.copy_of(weights), world.states[4])


def test_tensors_that_are_stored_whole_are_exact_during_a_fold(ram: Path) -> None:
    """All elements change in every version: layers hold whole tensors, without indices."""
    rng = np.random.default_rng(1)
    world = World.make(ram / "world")
    for version in range(1, len(world.states)):
        old = world.states[version - 1]
        bits = {spec.name: moved(rng, old.read(spec.name), 1.0) for spec in old.table}
        world.states[version] = model_of(bits)
    world.begin(6)
    follow(world, policy=Pinned(2), fold=True)
    for what in ("pwrite", "fsync mirror/model", "unlink mirror/.weightcast/log"):
        copy = world.clone(ram / "copy")
        with folding(copy, what) as (mirror, _):
            assert exact(mirror, copy.states[4])
            advance(copy, mirror, 5)
            assert exact(mirror, copy.states[5])
        assert copy.check_mirror([5]) == 5
        shutil.rmtree(copy.root)


def test_fold_covers_the_log_at_its_beginning_and_keeps_what_came_after(world: World) -> None:
    with folding(world) as (mirror, disk):
        advance(world, mirror, 5)
        disk.let_go()
    assert world.check_files() == 4
    assert [path.name[10:] for path in log_of(world)] == [f"{4:012d}-{5:012d}.safetensors"]
    with opened(world) as mirror:
        assert mirror.fold()
    assert world.check_files() == 5


def test_requested_fold_waits_for_the_one_in_the_background_and_folds_the_rest(world: World) -> None:
    with folding(world) as (mirror, disk):
        advance(world, mirror, 5)
        requested = in_thread(mirror.fold)
        requested.join(0.2)
        assert requested.is_alive()
        disk.let_go()
        requested.join(30)
        assert mirror.folded == world.chain.manifest(5).position
    assert world.check_files() == 5


def test_follower_goes_back_over_a_fold_with_later_versions(world: World) -> None:
    """What the fold overwrote is recorded from its own layers, not from those that were appended meanwhile."""
    with folding(world) as (mirror, disk):
        advance(world, mirror, 5)
        disk.let_go()
        mirror.fold()
        for version in (4, 3, 2):
            staged = mirror.stage_back(world.chain.manifest(version).position)
            assert staged is not None
            mirror.apply(staged)
            mirror.fold()
            assert exact(mirror, world.states[version])


def test_closing_waits_for_the_fold(world: World) -> None:
    with folding(world) as (mirror, disk):
        closing = in_thread(mirror.close)
        closing.join(0.2)
        assert closing.is_alive()
        disk.let_go()
        closing.join(30)
        assert world.check_files() == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weightcast-fold")]


def test_anchor_is_installed_after_the_fold(world: World) -> None:
    with folding(world) as (mirror, disk):
        route, goal = (next(iter(world.chain.anchor_edges())),), world.chain.manifest(0)
        staged = stage_route(world.chain, mirror, route, goal)
        applying = in_thread(lambda: mirror.apply(staged))
        applying.join(0.2)
        assert applying.is_alive()
        disk.let_go()
        applying.join(30)
        assert exact(mirror, world.states[0])
    assert world.check_files() == 0


def test_examination_waits_for_the_fold_but_a_poll_does_not(world: World) -> None:
    """The files' times change during a fold; that is no sign of another program."""
    with folding(world) as (mirror, disk):
        mirror.examine_if_changed()
        results: list[bool] = []
        examining = in_thread(lambda: results.append(mirror.examine()))
        examining.join(0.2)
        assert examining.is_alive()
        disk.let_go()
        examining.join(30)
        assert results == [True]
        assert mirror.version == 4


# -- readers -----------------------------------------------------------------------------------------------------------


def test_reader_waits_for_the_fold_alone(world: World) -> None:
    """Nothing else has to be called: whoever keeps the mirror may be waiting for this reader."""
    seen: list[object] = []
    channel = world.chain.channel

    def load() -> None:
        with reading(world.mirror) as files:
            seen.append(world.which(files))
        with reading_held(world.mirror, channel.table, channel.id) as held:
            seen.append(same_bits(held.weights, world.states[5]))
            seen.extend(position.version for position in (held.files_at, held.log_at) if position)

    with folding(world) as (mirror, disk):
        advance(world, mirror, 5)
        reader = in_thread(load)
        reader.join(0.2)
        assert reader.is_alive()
        status = mirror_status(world.mirror)
        assert status is not None
        assert (status.files_at.version, status.log_at, status.is_changing) == (2, 5, True)
        disk.let_go()
        reader.join(30)
        assert seen == [4, True, 4, 5]


def test_reader_prevents_a_fold_in_the_background_and_the_next_update_tries_again(world: World) -> None:
    with opened(world, fold_every=2) as mirror:
        with reading(world.mirror) as files:
            for version in (3, 4, 5):
                advance(world, mirror, version)
            assert not mirror.fold(wait=False)
            assert world.which(files) == 2
        advance(world, mirror, 6)
    assert world.check_files() == 6


@pytest.mark.parametrize("left", [1, 2])
def test_layers_left_by_a_killed_fold_are_no_part_of_the_log(world: World, left: int) -> None:
    def die() -> None:
        with folding(world, "unlink mirror/.weightcast/log", -left) as (mirror, disk):
            advance(world, mirror, 5)
            disk.let_go("die")

    with pytest.raises(Crash):
        die()
    assert len(log_of(world)) == left + 1
    status = mirror_status(world.mirror)
    assert status is not None
    assert (status.files_at.version, status.log_at, status.is_changing) == (4, 5, True)
    assert world.check_mirror([5]) == 5
    assert log_of(world) == []


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "error"), [("eio", CheckpointError), ("full", SpaceError)])
@pytest.mark.parametrize("call", ["poll", "apply an anchor", "fold", "examine", "close"])
def test_failed_fold_is_raised_by_the_next_call(
    world: World, fault: str, error: type[WeightcastError], call: str
) -> None:
    with folding(world) as (mirror, disk):
        route, goal = (next(iter(world.chain.anchor_edges())),), world.chain.manifest(0)
        staged = stage_route(world.chain, mirror, route, goal)
        calls: dict[str, Callable[[], object]] = {
            "poll": lambda: until(mirror.take_up_fold),
            "apply an anchor": lambda: mirror.apply(staged),
            "fold": mirror.fold,
            "examine": mirror.examine,
            "close": mirror.close,
        }
        disk.let_go(fault)
        with pytest.raises(error):
            calls[call]()
        assert mirror.version is None
    assert world.check_mirror([4]) == 4


def test_follower_goes_on_after_a_failed_fold(world: World) -> None:
    at = fold_calls(world).index("pwrite mirror/model-00001-of-00002.safetensors")
    with (
        FaultyDisk(world.root) as disk,
        Subscriber(world.store, world.mirror, Pinned(4), threads=1) as subscriber,
    ):
        subscriber.sync()
        disk.hold(at + 1)
        subscriber.mirror.begin_fold()
        disk.let_go("eio")
        subscriber.policy = wc.Newest()
        with pytest.raises(CheckpointError, match="the system refused"):
            until(lambda: subscriber.poll() is subscriber)  # never so: until a poll finds that the fold has ended
        assert subscriber.position is None
        subscriber.sync()
        assert subscriber.position == world.chain.manifest(HEAD).position
    assert world.check_files() == HEAD


def test_edit_that_a_fold_in_the_background_finds_is_raised_and_repaired(world: World) -> None:
    edit(world, hidden=True)
    with Subscriber(world.store, world.mirror, Every(), threads=1, fold_every=2) as subscriber:
        with pytest.raises(CheckpointError, match="changed by another program"):
            until(lambda: subscriber.sync() is None and subscriber.fold())
        while subscriber.sync() is not None:
            pass
        assert subscriber.position == world.chain.manifest(HEAD).position
    assert world.check_files() == HEAD
