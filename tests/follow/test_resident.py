"""A mirror that follows keeps its weights in memory: always the bits of its files and log, read once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import same_bits
from mirrors import advance, edit
from worlds import World, opened

import weightcast as wc
from weightcast.channel.policy import Pinned
from weightcast.follow.mirror import Mirror
from weightcast.follow.resident import available_memory
from weightcast.follow.subscriber import Subscriber


def held(mirror: Mirror) -> wc.Arrays:
    assert mirror.base is not None
    return wc.Arrays.copy_of(mirror.base)


@pytest.fixture
def at_one(world: World) -> World:
    with Subscriber(world.store, world.mirror, Pinned(1), threads=1) as subscriber:
        subscriber.sync()
    return world


def test_what_is_kept_is_what_files_and_log_hold(at_one: World) -> None:
    with opened(at_one) as mirror:
        for version in (2, 3, 4):
            advance(at_one, mirror, version)
            assert mirror.weights is not None
            assert same_bits(held(mirror), at_one.states[version])
            assert same_bits(wc.Arrays.copy_of(mirror.weights), at_one.states[version])


def test_tensors_are_read_once_from_the_second_version_on(at_one: World) -> None:
    """A single pull keeps nothing: it needs a few tensors at a time."""
    with opened(at_one) as mirror:
        kept = []
        for version in (2, 3):
            base = mirror.base
            assert base is not None
            kept.append(all(np.shares_memory(base.read(one.name), base.read(one.name)) for one in base.table))
            advance(at_one, mirror, version)
    assert kept == [False, True]


def test_nothing_is_kept_of_files_that_another_program_changed(at_one: World) -> None:
    with opened(at_one) as mirror:
        advance(at_one, mirror, 2)
        held(mirror)
        mirror.fold()
        edit(at_one)
        assert not mirror.examine()
        assert mirror.weights is not None
        assert same_bits(held(mirror), wc.Arrays.copy_of(mirror.weights))


def test_available_memory_is_part_of_the_machine() -> None:
    total = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < available_memory() <= total
