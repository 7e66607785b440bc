"""Transfers that wait briefly and are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_time_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sync waits as long as all others."""
    pytest.importorskip("torch")
    from weightcast.integrations import trl

    monkeypatch.setattr(trl, "_JOINING", 0.0)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Makes transfers that are ended when the test is."""
    from weightcast.integrations.trl import WeightcastTransfer

    made: list[WeightcastTransfer] = []

    def make(store: Any, **options: Any) -> Any:
        made.append(WeightcastTransfer(store, **({"threads": 1, "patience": 30.0, "retry_after": 0.05} | options)))
        return made[-1]

    yield make
    for transfer in made:
        transfer.destroy()
