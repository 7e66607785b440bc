"""A trainer for the engines of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from local_engine import Training


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A trainer and its channel."""
    from local_engine import Training  # needs torch

    begun = Training(tmp_path)
    yield begun
    begun.close()
