"""A follower over time: outages, disk errors, readers of its files, and what it leaves at its end."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from cases import same_bits
from fake_clock import FakeClock
from scripted_store import ScriptedStore
from worlds import World, delta_of, follow, opened

import weightcast as wc
from weightcast.channel.policy import Pinned
from weightcast.errors import (
    BusyError,
    CheckpointError,
    WeightcastError,
)
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber


def test_follower_survives_a_day_without_the_bucket(world: World) -> None:
    clock, store = FakeClock(), ScriptedStore(world.store)
    held = wc.Arrays.copy_of(world.states[4])
    waits: list[float] = []
    with Subscriber(store, held, threads=1, clock=clock) as subscriber:

        def trouble(error: WeightcastError) -> None:
            waits.append(clock.time)
            if clock.time > 86_400:
                store.behave()

        rounds = subscriber.rounds(1.0, trouble)
        assert next(rounds) is None
        world.publish_next()
        store.fail("get")
        reached = next(update for update in rounds if update is not None)
    assert reached.position.version == 5
    assert same_bits(held, world.states[5])
    assert len(waits) > 1024
    assert max(after - before for before, after in pairwise(waits)) <= 60 * 1.2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS])
def test_follower_survives_errors_of_the_local_disk(world: World, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real error of the system, at an operation that every version needs."""
    follow(world, policy=Pinned(3))
    clock, told = FakeClock(), []
    real, failing = os.replace, [True]

    def replace(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if failing[0] and "/log/" in str(target):
            raise OSError(number, os.strerror(number), str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with Subscriber(world.store, world.mirror, threads=1, clock=clock) as subscriber:

        def trouble(error: WeightcastError) -> None:
            told.append(error)
            failing[0] = len(told) < 3

        assert next(subscriber.follow(1.0, trouble)).position.version == 4
    assert len(told) == 3
    assert all(isinstance(error, CheckpointError) and error.hint and "/log/" in str(error.file) for error in told)
    world.check_mirror([4])


@pytest.fixture
def anchored(world: World) -> World:
    """A mirror at version 2, whose way on begins at an anchor."""
    follow(world, policy=Pinned(2))
    world.chain.put_anchor(
        world.chain.manifest(4).position, {path.name: path for path in world.checkpoint(4).iterdir()}
    )
    world.store.delete(delta_of(world, 3))
    return world


def test_reader_delays_a_new_anchor_and_the_follower_reports_it(anchored: World) -> None:
    calls, told = ScriptedStore(anchored.store), []
    with (
        Subscriber(calls, anchored.mirror, threads=1, patience=0.1, clock=FakeClock()) as subscriber,
        reading(anchored.mirror) as files,
    ):
        rounds = subscriber.rounds(1.0, told.append)
        assert next(rounds) is None
        fetched = len(calls.calls)
        assert next(rounds) is None
        assert len(calls.calls) == fetched, "what was staged waits for the reader"
        assert [type(error) for error in told] == [BusyError, BusyError]
        assert "a reader of the mirror's files" in str(told[0])
        assert same_bits(files, anchored.states[2])
        files.close()
        assert subscriber.position is not None
        assert subscriber.position.version == 2
    world = anchored
    assert follow(world) == 4
    world.check_mirror([4])


def test_delayed_anchor_is_installed_once_the_reader_is_done(anchored: World) -> None:
    told: list[WeightcastError] = []
    with Subscriber(anchored.store, anchored.mirror, threads=1, patience=0.1, clock=FakeClock()) as subscriber:
        rounds = subscriber.rounds(1.0, told.append)
        with reading(anchored.mirror):
            assert next(rounds) is None
        reached = next(rounds)
        assert reached is not None
        assert reached.position.version == 4
    anchored.check_mirror([4])


def test_requested_fold_gives_up_on_a_reader_that_stays(world: World) -> None:
    follow(world, policy=Pinned(2))
    follow(world)
    with opened(world, patience=0.1) as mirror:
        with reading(world.mirror), pytest.raises(BusyError, match=r"did not finish within 0\.1 s"):
            mirror.fold()
        assert mirror.version == 4
        assert mirror.fold()
    assert world.check_files() == 4


def test_files_hold_the_newest_version_after_a_clean_end(world: World) -> None:
    follow(world, policy=Pinned(1), fold=True)
    assert world.check_files() == 1
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert world.check_files() == 1
    assert world.check_files() == 4


def test_error_in_the_block_still_folds(world: World) -> None:
    follow(world, policy=Pinned(1))
    subscriber = Subscriber(world.store, world.mirror, threads=1)
    with suppress(KeyboardInterrupt), subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        raise KeyboardInterrupt
    assert world.check_files() == 4


def leave_edited(world: World, error: type[Exception] | None) -> None:
    """End a follower whose files somebody else has changed, so that they cannot be folded."""
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        with wc.Checkpoint(world.mirror, writable=True) as files:
            files.write("d", files.read("d") ^ 1)
        if error is not None:
            raise error


def test_failed_fold_at_the_end_is_an_error(world: World, caplog: pytest.LogCaptureFixture) -> None:
    follow(world, policy=Pinned(1))
    with pytest.raises(CheckpointError, match="changed by another program"):
        leave_edited(world, None)
    follow(world, policy=Pinned(1), fold=True)
    with pytest.raises(ZeroDivisionError):  # what ended the block comes first
        leave_edited(world, ZeroDivisionError)
    assert "the files could not be brought up to date" in caplog.text
    follow(world, fold=True)
    assert world.check_files() == 4


def test_reader_does_not_keep_a_follower_from_closing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    follow(world, policy=Pinned(1))
    with reading(world.mirror) as files:
        follow(world, fold=True)
        assert same_bits(files, world.states[1])
    assert "the files lag the log" in caplog.text
    with opened(world) as mirror:
        assert mirror.version == 4
    follow(world, fold=True)
    assert world.check_files() == 4


def test_idle_follower_folds_unless_the_files_are_read(world: World) -> None:
    follow(world, policy=Pinned(1))
    clock = FakeClock()
    with Subscriber(world.store, world.mirror, threads=1, clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        clock.time += 29
        subscriber.poll()
        assert world.check_files() == 1
        clock.time += 2
        with reading(world.mirror):
            subscriber.poll()
        assert world.check_files() == 1
        subscriber.poll()
        assert world.check_files() == 4


def linked(source: Path, target: Path) -> None:
    """As `cp -al`."""
    target.mkdir()
    for path in source.iterdir():
        os.link(path, target / path.name)


def test_mirror_copied_by_hard_links_does_not_change_the_original(world: World) -> None:
    base = world.checkpoint(1)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    linked(base, world.mirror)
    follow(world, fold=True)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert world.check_files() == 4
    world.check_mirror([4])


def test_snapshot_by_hard_links_does_not_change(world: World) -> None:
    follow(world, policy=Pinned(1), fold=True)
    snapshot = world.root / "snapshot"
    snapshot.mkdir()
    for path in world.mirror.iterdir():
        if path.is_file():
            os.link(path, snapshot / path.name)
    follow(world, fold=True)
    with wc.Checkpoint(snapshot) as files:
        assert same_bits(files, world.states[1])
    assert world.check_files() == 4


def test_targets_of_symbolic_links_are_never_written(world: World) -> None:
    base = world.checkpoint(1)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    world.mirror.mkdir()
    for path in base.iterdir():
        (world.mirror / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        follow(world, fold=True)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
