"""Mirrors in known states: which objects an update fetched, edits by another program, a log that is not folded."""

from __future__ import annotations

import os
from pathlib import Path

from faults import FaultyStore
from worlds import World, follow, opened

import weightcast as wc
from weightcast.channel.policy import Pinned
from weightcast.follow.mirror import Mirror
from weightcast.follow.staging import stage_route


def fetched(world: World, folder: Path | None = None, version: int = 4) -> list[str]:
    """Follow, and say which objects that took, by the letter of their kind and their version."""
    calls = FaultyStore(world.store)
    assert follow(world, calls, folder) == version
    keys = {key for key in calls.asked("get") if key.endswith(".safetensors")}
    return sorted({key[0] + key.partition("/")[2][:12].lstrip("0").zfill(1) for key in keys})


def edit(world: World, name: str = "a", *, folder: Path | None = None, hidden: bool = False) -> None:
    """Flip a bit of a tensor, as another program would; ``hidden``: so that size and time of the file do not tell."""
    folder = folder or world.mirror
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    with wc.Checkpoint(folder, writable=True, interrupted=True) as files:
        bits = files.read(name)
        bits[-1] ^= 1
        files.write(name, bits)
    for path, when in times.items() if hidden else ():
        os.utime(path, ns=(when, when))


def advance(world: World, mirror: Mirror, version: int) -> None:
    """Stage and apply the delta to ``version``."""
    goal = world.chain.manifest(version)
    route = (next(edge for edge in world.chain.edges(version - 1, version) if edge.base == version - 1),)
    mirror.apply(stage_route(world.chain, mirror, route, goal))


def shard_of(world: World, name: str) -> Path:
    """The file of the mirror that holds a tensor."""
    for path in world.mirror.glob("*.safetensors"):
        with wc.Checkpoint(path) as files:
            if name in files.table:
                return path
    raise AssertionError(name)


def logged(world: World) -> None:
    """Files at version 2, a log that leads to 4."""
    follow(world, policy=Pinned(2))
    follow(world)
    with opened(world) as mirror:
        assert (mirror.version, mirror.folded.version if mirror.folded else None) == (4, 2)
