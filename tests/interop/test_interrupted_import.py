"""An import that is killed, or whose bucket fails, is finished by another one."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from faults import INJECTED, Crash, FaultyStore, faults_of
from killer import killer
from operations import IMPORT, IMPORTED, every_version
from worlds import World

from weightcast.errors import WeightcastError

AT_MOST = 6
"""Kills, and faults, spread evenly."""


def finish(world: World) -> None:
    """Import again, and find every step."""
    IMPORT.check(world)
    IMPORT.attempt(world, world.store)
    world.check_readers((IMPORTED,))
    every_version(world)
    assert [world.chain.manifest(version).step for version in world.chain.versions()] == list(range(IMPORTED + 1))


def test_import_killed_at_a_chosen_operation_on_files_is_finished_by_another(ram: Path) -> None:
    before = IMPORT.make(ram / "before", memory=False)
    with killer() as deadly:
        _, count = deadly.run(IMPORT.name, before.clone(ram / "counted").root)
        for number in range(1, count + 1, max(1, count // AT_MOST)):
            root = before.clone(ram / "world").root
            killed, _ = deadly.run(IMPORT.name, root, number)
            assert killed == signal.SIGKILL
            INJECTED[f"{IMPORT.name}, SIGKILL"] += 1
            finish(World.at(root))
            shutil.rmtree(root)


def test_import_whose_bucket_fails_is_finished_by_another(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    before = IMPORT.make(ram / "before")
    calls = FaultyStore(before.clone(ram / "clean").store)
    IMPORT.attempt(before.clone(ram / "run"), calls)
    faults = list(faults_of(calls.calls))
    for number, fault in faults[:: max(1, len(faults) // AT_MOST)]:
        world = before.clone(ram / "world")
        store = FaultyStore(world.store, fault, number)
        try:
            IMPORT.attempt(world, store)
        except (WeightcastError, Crash):
            INJECTED[IMPORT.name] += 1
        store.settle()
        finish(world)
        shutil.rmtree(world.root)
