"""Boxes of the Wordle example that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wordle_boxes import box


@pytest.fixture(scope="session")
def environment() -> Iterator[str]:
    with box("environment") as url:
        yield url
