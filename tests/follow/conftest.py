"""A channel to follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import World


@pytest.fixture
def world(ram: Path) -> World:
    """A channel with versions 0 to 4."""
    return World.make(ram / "world").begin(4)
