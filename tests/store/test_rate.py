"""A store with a limit on its bytes per second, by a clock that only waiting moves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fake_clock import FakeClock

from weightcast.errors import UsageError
from weightcast.store.base import Store
from weightcast.store.contract import StoreContract
from weightcast.store.memory import MemoryStore
from weightcast.store.rate import Allowance, Limited


def test_calls_wait_until_those_before_are_paid_for() -> None:
    clock = FakeClock()
    store = Limited(MemoryStore(), 100, clock)
    store.put("a", b"x" * 250)
    assert clock.time == 0
    store.put("b", b"x" * 50)
    assert clock.time == 2.5
    assert store.get("a") == b"x" * 250
    assert clock.time == 3
    assert store.get("a", 10, 20) == b"x" * 20
    assert clock.time == 5.5
    assert store.create("c", b"x")
    assert clock.time == pytest.approx(5.7)


def test_small_calls_add_up_to_the_rate() -> None:
    clock = FakeClock()
    store = Limited(MemoryStore(), 1000, clock)
    for i in range(101):
        store.put(f"k{i}", b"x" * 10)
    assert clock.time == pytest.approx(1)


def test_time_without_traffic_earns_nothing() -> None:
    clock = FakeClock()
    allowance = Allowance(10, clock)
    clock.time = 1000
    allowance.spend(100)
    allowance.wait()
    assert clock.time == 1010


def test_wait_of_centuries_is_made_of_waits_that_python_takes() -> None:
    waits = []

    class Watched(FakeClock):
        def wait(self, stopped: threading.Event, seconds: float) -> None:
            waits.append(seconds)
            super().wait(stopped, 2**40 if seconds > 1 else seconds)

    allowance = Allowance(1, Watched())
    allowance.spend(2**40)
    allowance.wait()
    assert 0 < max(waits) < threading.TIMEOUT_MAX


def test_objects_put_together_are_paid_for_together(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Limited(MemoryStore(), 10, clock)
    (tmp_path / "f").write_bytes(b"x" * 30)
    put: list[str] = []
    store.put_all({"a": b"x" * 20, "b": tmp_path / "f"}, put.append)
    store.get("a")
    assert put == ["a", "b"]
    assert clock.time == 5


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_malformed_rate_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="cannot limit the rate"):
        Limited(MemoryStore(), rate)


class TestContract(StoreContract):
    """A limited store is a store like any other."""

    @pytest.fixture
    def store(self) -> Store:
        return Limited(MemoryStore(), 1e12)
