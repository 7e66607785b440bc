"""Channels to be damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from damages import mirrored
from worlds import World, follow, opened

from weightcast.channel.policy import Pinned
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.upkeep.squash import squash


@pytest.fixture
def world(ram: Path) -> World:
    """A channel with versions 0 to 4."""
    return World.make(ram / "world").begin(4)


@pytest.fixture
def rich(world: World) -> World:
    """Every version can be reached in two ways: two anchors, a squash beside every pair of deltas."""
    mirrored(world)
    follow(world, folder=world.root / "other", policy=Pinned(2))
    with opened(world, world.root / "other") as mirror:
        cut_anchor(world.chain, mirror)
    list(squash(world.chain, world.root / "scratch", levels=(2,)))
    return world
