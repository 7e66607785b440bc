"""A trainer, an engine and an agent for these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from local_engine import Local, Training

    from weightcast.engine.agent import Agent


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A trainer and its channel."""
    from local_engine import Training  # needs torch

    begun = Training(tmp_path)
    yield begun
    begun.close()


@pytest.fixture
def engine(training: Training) -> Local:
    """An engine with the trainer's first weights."""
    from local_engine import Local

    return Local(training.weights)


@pytest.fixture
def agent(training: Training, engine: Local, tmp_path: Path) -> Iterator[Agent]:
    """Its engine is at version 0, and version 1 is published."""
    from local_engine import attached

    with attached(training, engine, tmp_path) as following:
        following.step()
        training.step(1)
        yield following
