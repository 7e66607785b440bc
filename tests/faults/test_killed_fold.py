"""Killed at every operation of a fold in the background: what `apply` returned for is held, with the right bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import INJECTED, Crash
from faulty_disk import FaultyDisk
from mirrors import advance
from worlds import World, follow, opened

from weightcast.channel.policy import Pinned
from weightcast.follow.mirror import Mirror

MakeLog = Callable[[World, Mirror], None]


def straight(world: World, mirror: Mirror) -> None:
    """A log from version 2 to 4."""
    advance(world, mirror, 3)
    advance(world, mirror, 4)


def back_and_forth(world: World, mirror: Mirror) -> None:
    """A log from version 4 over 2 to 4: its first layer leads on from where the fold ends."""
    straight(world, mirror)
    mirror.fold()
    staged = mirror.stage_back(world.chain.manifest(2).position)
    assert staged is not None
    mirror.apply(staged)
    straight(world, mirror)


def count(world: World, make_log: MakeLog) -> int:
    """Operations on files that the fold takes."""
    copy = world.clone(world.root.parent / "counted")
    with FaultyDisk(copy.root) as disk, opened(copy) as mirror:
        make_log(copy, mirror)
        before = len(disk.calls)
        mirror.fold()
        return len(disk.calls) - before


def die(world: World, disk: FaultyDisk, make_log: MakeLog, at: int, *, appends: bool) -> None:
    """Begin a fold, apply version 5 while it is held if it ``appends``, and be killed there."""
    with disk, opened(world) as mirror:
        make_log(world, mirror)
        disk.hold(at)
        mirror.begin_fold()
        assert disk.held.wait(30)
        if appends:
            advance(world, mirror, 5)
        disk.let_go("die")


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize("make_log", [straight, back_and_forth])
def test_kill_or_power_cut_at_any_operation_of_a_fold_loses_no_version(
    ram: Path, make_log: MakeLog, appends: bool
) -> None:
    before = World.make(ram / "before").begin(5)
    follow(before, policy=Pinned(2), fold=True)
    luck, held = random.Random(0), 5 if appends else 4
    for at in range(1, count(before, make_log) + 1):
        world = before.clone(ram / "world")
        disk = FaultyDisk(world.root)
        with pytest.raises(Crash):
            die(world, disk, make_log, at, appends=appends)
        INJECTED["fold in the background"] += 1
        killed = world.clone(ram / "killed")
        disk.lose_power(luck if at % 2 else None)
        for found in (killed, world):
            try:
                assert found.check_files() in (2, 4, None)
                assert found.check_mirror([held]) == held
                assert follow(found, fold=True) == 5
                assert found.check_files() == 5
            except Exception as error:
                error.add_note(f"at operation {at}, {disk.calls[disk.at - 1]}, {found.root.name}")
                raise
            shutil.rmtree(found.root)
