"""Real processes, killed with SIGKILL: at operations on files that were chosen, and at moments that nobody chose."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import INJECTED
from killer import Killer, killer
from operations import OPERATIONS
from worlds import Operation, World

AT_MOST = 40
"""Kills for each operation, spread evenly."""


@pytest.fixture(scope="module")
def deadly() -> Iterator[Killer]:
    with killer() as running:
        yield running


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_killed_at_chosen_operations(operation: Operation, deadly: Killer, ram: Path) -> None:
    before = operation.make(ram / "before", memory=False)
    clean = before.clone(ram / "clean")
    assert deadly.run(operation.name, clean.root)[0] == 0
    _, count = deadly.run(operation.name, before.clone(ram / "counted").root)
    step = max(1, count // AT_MOST)
    for number in range(1, count + 1, step):
        root = before.clone(ram / "world").root
        killed, _ = deadly.run(operation.name, root, number)
        assert killed == signal.SIGKILL
        INJECTED[f"{operation.name}, SIGKILL"] += 1
        world = World.at(root)
        try:
            operation.check(world)
            operation.attempt(world, world.store)
            operation.complete(world, thoroughly=number % 3 == 0)
        except Exception as error:
            error.add_note(f"killed at {number} of {count}")
            raise
        shutil.rmtree(root)
