"""Transfers that wait briefly and are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def opened() -> Iterator[Any]:
    """Makes transfers that are ended when the test is; their first sync waits as long as all others."""
    from weightcast.integrations.trl import WeightcastTransfer

    made: list[WeightcastTransfer] = []

    def make(store: Any, **options: Any) -> Any:
        usual = {"threads": 1, "patience": 30.0, "joining": 0.0, "retry_after": 0.05}
        made.append(WeightcastTransfer(store, **(usual | options)))
        return made[-1]

    yield make
    for transfer in made:
        transfer.destroy()
