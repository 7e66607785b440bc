"""Mirrors and the readers of their files: who waits for whom, and when the log is folded."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from cases import same_bits
from faults import Crash
from faulty_disk import FaultyDisk
from mirrors import logged
from worlds import World, follow, opened

import weightcast as wc
from weightcast.channel.policy import Every, Pinned
from weightcast.follow.mirror_reader import reading


def test_reader_delays_a_fold_but_not_updates(world: World) -> None:
    follow(world, policy=Pinned(1), fold_every=1)
    with reading(world.mirror) as files:
        for version in (2, 3):
            follow(world, policy=Pinned(version), fold_every=1)
            assert same_bits(files, world.states[1])
        with opened(world) as mirror:
            assert (mirror.version, mirror.folded.version if mirror.folded else None) == (3, 1)
            assert not mirror.fold(wait=False)
    assert follow(world, fold_every=1) == 4
    assert world.check_files() == 4


def test_log_is_folded_once_the_reader_is_done(world: World) -> None:
    follow(world, policy=Pinned(0), fold_every=1)
    release, loaded = threading.Event(), threading.Event()

    def load() -> None:
        with reading(world.mirror) as files:
            loaded.set()
            release.wait(30)
            assert same_bits(files, world.states[0])

    reader = threading.Thread(target=load)
    reader.start()
    loaded.wait(30)
    followed = threading.Thread(target=lambda: [follow(world, policy=Every(), fold_every=1) for _ in range(4)])
    followed.start()
    followed.join(30)
    assert not followed.is_alive()
    with opened(world) as mirror:
        assert (mirror.version, mirror.folded.version if mirror.folded else None) == (4, 0)
    release.set()
    reader.join(30)
    with opened(world) as mirror:
        mirror.fold()
    assert world.check_files() == 4


def test_requested_fold_waits_for_readers(world: World) -> None:
    logged(world)
    with opened(world) as mirror:
        with reading(world.mirror) as files:
            folding = threading.Thread(target=mirror.fold)
            folding.start()
            folding.join(0.3)
            assert folding.is_alive()
            assert same_bits(files, world.states[2])
        folding.join(30)
    assert world.check_files() == 4


def test_readers_are_refused_while_the_files_change(world: World) -> None:
    logged(world)
    with FaultyDisk(world.root) as counting, opened(world) as mirror:
        opening = len(counting.calls)
        copy = world.clone(world.root.parent / "copy")
    with FaultyDisk(copy.root) as counting, opened(copy) as mirror:
        mirror.fold()
    refused = 0
    for at in range(opening + 1, len(counting.calls) + 1):
        spoilt = world.clone(world.root.parent / f"spoilt-{at}")
        with FaultyDisk(spoilt.root, "die", at), pytest.raises(Crash), opened(spoilt) as mirror:
            mirror.fold()
        refused += spoilt.check_files() is None
    assert refused > 5


def test_log_is_folded_every_few_versions(world: World) -> None:
    follow(world, policy=Pinned(0), fold_every=2)
    folded = []
    for _ in range(4):
        follow(world, policy=Every(), fold_every=2)
        folded.append(world.check_files())
    assert folded == [0, 2, 2, 4]


LOADER = """
import sys
from pathlib import Path
import weightcast as wc
positions, loads = set(), 0
while loads < 20:
    try:
        with wc.reading(Path(sys.argv[1])) as files:
            positions.add(wc.fingerprint(files).digest)
            loads += 1
    except wc.WeightcastError:
        pass
print(*sorted(positions))
"""


def test_reader_in_another_process_sees_whole_versions_only(world: World) -> None:
    follow(world, policy=Pinned(0), fold_every=1)
    command = [sys.executable, "-c", LOADER, str(world.mirror)]
    loader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    version = 0
    while loader.poll() is None:
        version = 4 - version
        follow(world, policy=Pinned(version), fold_every=1)
        with opened(world) as mirror:
            mirror.fold()
    positions = loader.communicate()[0].split()
    assert positions
    assert set(positions) <= {wc.fingerprint(world.states[version]).digest for version in (0, 4)}
