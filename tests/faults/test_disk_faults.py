"""Every operation on files fails, finds the disk full, is done by half, or is the last before a kill or a power cut.

A kill leaves what was written; a loss of power what was synced, and perhaps some of the rest. They are tried apart.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import INJECTED, Crash
from faulty_disk import FaultyDisk
from operations import OPERATIONS
from worlds import Operation

from weightcast.errors import SpaceError, WeightcastError
from weightcast.store.file import FileStore

MIRRORS = [
    operation
    for operation in OPERATIONS
    if operation.name in ("publish a folder", "pull from nothing", "pull by deltas", "pull by a squash", "pull back",
                          "squash", "fold", "fold beside updates")
]  # fmt: skip
BUCKETS = [operation for operation in OPERATIONS if operation.name in ("init", "publish a folder", "gc")]

names = pytest.mark.parametrize("operation", MIRRORS, ids=lambda operation: operation.name)


def attempts(operation: Operation, ram: Path, faults: dict[str, tuple[str, ...]], memory: bool = True) -> Iterator:
    """(world, disk, what raised) for each fault at each operation on files that it makes sense for."""
    before = operation.make(ram / "before", memory=memory)
    clean = before.clone(ram / "clean")
    with FaultyDisk(clean.root) as counting:
        operation.attempt(clean, clean.store)
    operation.complete(clean)
    for number, call in enumerate(counting.calls, 1):
        for fault, calls in faults.items():
            if calls and not call.startswith(calls):
                continue
            world = before.clone(ram / "world")
            raised: BaseException | None = None
            with FaultyDisk(world.root, fault, number) as disk:
                try:
                    operation.attempt(world, world.store)
                except (WeightcastError, OSError, Crash) as error:
                    raised = error
            assert len(disk.calls) >= number
            INJECTED[operation.name] += 1
            try:
                yield world, disk, raised
                world = world.reopened()
                operation.check(world)
                operation.attempt(world, world.store)
                operation.complete(world, thoroughly=not memory)
                assert world.litter() <= clean.litter()
            except Exception as error:
                error.add_note(f"{fault} at operation {number}, {call}")
                raise
            shutil.rmtree(world.root)


WRITES = ("write", "pwrite", "open", "mkdir", "copy_file_range", "sendfile", "rename", "link")


@names
def test_state_is_intact_after_a_failure_of_any_disk_operation(operation: Operation, ram: Path) -> None:
    for _, _, raised in attempts(operation, ram, {"eio": (), "short": ("write", "pwrite")}):
        assert not isinstance(raised, Crash)


@names
def test_state_is_intact_after_a_full_disk_at_any_moment(operation: Operation, ram: Path) -> None:
    for _, _, raised in attempts(operation, ram, {"full": WRITES}):
        if raised is not None and not isinstance(raised, SpaceError):
            raise raised


@names
def test_state_is_intact_after_a_kill_at_any_operation(operation: Operation, ram: Path) -> None:
    for _, _, raised in attempts(operation, ram, {"die": ()}):
        assert isinstance(raised, Crash)


@names
def test_state_is_intact_after_a_power_cut_at_any_operation(operation: Operation, ram: Path) -> None:
    luck = random.Random(operation.name)
    for i, (_, disk, _) in enumerate(attempts(operation, ram, {"die": ()})):
        disk.lose_power(luck if i % 2 else None)


@names
def test_finished_work_survives_a_power_cut(operation: Operation, ram: Path) -> None:
    world = operation.make(ram / "world")
    with FaultyDisk(world.root) as disk:
        operation.attempt(world, world.store)
    disk.lose_power()
    INJECTED[operation.name] += 1
    operation.complete(world)


@pytest.mark.parametrize("operation", BUCKETS, ids=lambda operation: operation.name)
def test_bucket_on_the_same_disk_survives_a_power_cut(operation: Operation, ram: Path) -> None:
    luck = random.Random(operation.name)
    for i, (world, disk, _) in enumerate(attempts(operation, ram, {"die": ()}, memory=False)):
        disk.lose_power(luck if i % 2 else None)
        world.store.store = FileStore(world.root / "bucket")  # nobody remembers what was there before
