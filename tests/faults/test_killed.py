"""Real processes, killed with SIGKILL: at operations on files that were chosen, and at moments that nobody chose."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import same_bits
from faults import INJECTED
from killer import Killer, killer
from operations import ENDLESS, OPERATIONS, state_at
from worlds import Operation, World, follow, nothing_like

import weightcast as wc
from weightcast.follow.subscriber import Subscriber
from weightcast.upkeep.verify import verify

AT_MOST = 15
"""Kills for each operation, spread evenly."""


@pytest.fixture(scope="module")
def deadly() -> Iterator[Killer]:
    with killer() as running:
        yield running


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_process_killed_at_a_chosen_operation_recovers(operation: Operation, deadly: Killer, ram: Path) -> None:
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


def test_publishers_killed_at_random_moments_recover(deadly: Killer, ram: Path) -> None:
    """One after the other on one channel: what one of them saw acknowledged is committed, and nothing else is wrong."""
    rng = random.Random(0)
    operation = ENDLESS[0]
    world = operation.make(ram / "world", memory=False)
    heads = [0]
    kills = 0
    while kills < 10 or heads[-1] <= 10:  # a slow machine gets more time until it has versions to show
        killed, _ = deadly.run(operation.name, world.root, after=rng.uniform(0.01, 0.15) * max(1, kills / 10))
        assert killed == signal.SIGKILL
        kills += 1
        INJECTED["publish, SIGKILL"] += 1
        head = world.head()
        assert head is not None
        heads.append(head)
        assert list(verify(world.chain)) == []
        fresh = nothing_like(world.states[0])
        with Subscriber(world.store, fresh, threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            assert subscriber.apply(staged).version == head
        assert same_bits(fresh, world.states[state_at(world, head)])
    assert heads == sorted(heads)
    acknowledged = [int(line) for line in (world.root / "acknowledged").read_text().split()]
    assert set(acknowledged) <= set(world.chain.versions())
    assert len(set(acknowledged)) == len(acknowledged)
    digests = [wc.fingerprint(state).digest for state in world.states]
    for version in world.chain.versions():
        assert world.chain.manifest(version).position.digest == digests[state_at(world, version)]


def test_followers_killed_at_random_moments_recover(deadly: Killer, ram: Path) -> None:
    rng = random.Random(1)
    operation = ENDLESS[1]
    world = operation.make(ram / "world", memory=False)
    loaded: set[int | None] = set()
    kills = 0
    while kills < 15 or not loaded & {5, 6, 7}:  # a slow machine gets more time until it has a version to show
        killed, _ = deadly.run(operation.name, world.root, after=rng.uniform(0.01, 0.2) * max(1, kills / 15))
        assert killed == signal.SIGKILL
        kills += 1
        INJECTED["pull, SIGKILL"] += 1
        loaded.add(world.check_files())
        world.check_mirror([None, *range(8)])
    assert follow(world) == 7
    world.check_mirror([7])


def test_upkeep_killed_at_random_moments_recovers(deadly: Killer, ram: Path) -> None:
    rng = random.Random(2)
    operation = ENDLESS[2]
    world = operation.make(ram / "world", memory=False)
    follow(world)
    for _ in range(12):
        killed, _ = deadly.run(operation.name, world.root, after=rng.uniform(0.01, 0.3))
        assert killed == signal.SIGKILL
        INJECTED["squash and gc, SIGKILL"] += 1
        world.check_readers([7])
        world.check_mirror([7])


def test_temporary_folders_of_killed_processes_are_removed(deadly: Killer, ram: Path) -> None:
    """An engine killed at every start leaves one download, not one for each start."""
    operation = next(operation for operation in OPERATIONS if operation.name == "pull into memory")
    world = operation.make(ram / "world", memory=False)
    _, count = deadly.run(operation.name, world.clone(ram / "counted").root)
    for _ in range(4):
        assert deadly.run(operation.name, world.root, count // 2)[0] == signal.SIGKILL
        assert len(list((world.root / "tmp").iterdir())) == 1
    operation.attempt(world, world.store)
    assert list((world.root / "tmp").iterdir()) == []
