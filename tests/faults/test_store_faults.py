"""Every call that an operation makes to its store fails, is cut, delayed or repeated, or is the last one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from faults import INJECTED, READS, Crash, FaultyStore, faults_of
from operations import OPERATIONS
from worlds import Operation

from weightcast.errors import WeightcastError

OVER_A_STORE = [operation for operation in OPERATIONS if operation.name != "fold"]


@pytest.mark.parametrize("operation", OVER_A_STORE, ids=lambda operation: operation.name)
def test_state_is_intact_after_a_failure_of_any_store_call(
    operation: Operation, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    before = operation.make(ram / "before")
    clean = before.clone(ram / "clean")
    calls = FaultyStore(clean.store)
    operation.attempt(clean, calls)
    operation.complete(clean)
    for number, fault in faults_of(calls.calls):
        if fault.startswith("die") and not operation.dies:
            continue
        world = before.clone(ram / "world")
        store = FaultyStore(world.store, fault, number)
        failed = False
        try:
            operation.attempt(world, store)
        except (WeightcastError, Crash):
            failed = True
        store.settle()
        assert store.hit
        INJECTED[operation.name] += 1
        try:
            if failed:
                operation.check(world)
                operation.attempt(world, world.store)
            reads = calls.calls[number - 1][0] in READS
            operation.complete(world, thoroughly=not reads)
            assert world.litter() <= clean.litter()
        except Exception as error:
            error.add_note(f"{fault} at call {number}, {calls.calls[number - 1]}")
            raise
        shutil.rmtree(world.root)
