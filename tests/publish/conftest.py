"""A bucket without a channel, and a channel to continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import World

from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def world(ram: Path) -> World:
    """A channel with versions 0 to 2."""
    return World.make(ram / "world").begin(2)
