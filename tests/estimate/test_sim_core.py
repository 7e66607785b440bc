"""The simulator's core: the order of events, and transfers that share a server, by hand."""

from __future__ import annotations

import random

import pytest
from sim_core import Bins, Server, Simulation


def server(capacity: float) -> tuple[Simulation, Server]:
    simulation = Simulation()
    return simulation, Server(simulation, capacity, Bins(1.0))


def test_events_happen_by_time_and_then_in_the_order_of_their_planning() -> None:
    simulation, seen = Simulation(), list[str]()
    simulation.at(2, lambda: seen.append("c"))
    simulation.at(1, lambda: seen.append("a"))
    simulation.at(1, lambda: simulation.after(0, lambda: seen.append("b")))
    simulation.at(9, lambda: seen.append("late"))
    simulation.run(until=5)
    assert (seen, simulation.now) == (["a", "b", "c"], 5)


def test_transfers_share_a_server_equally() -> None:
    simulation, shared = server(10)
    ended: dict[str, float] = {}
    shared.start(50, 100, lambda: ended.update(first=simulation.now))
    simulation.at(2, lambda: shared.start(50, 100, lambda: ended.update(second=simulation.now)) and None)
    simulation.run(100)
    # 20 bytes alone, then 5 a second each: the first ends at 2 + 6, and leaves 20 of the second.
    assert ended == pytest.approx({"first": 8, "second": 10})


def test_what_a_slow_transfer_leaves_others_take() -> None:
    simulation, shared = server(10)
    ended: dict[str, float] = {}
    shared.start(20, 2, lambda: ended.update(slow=simulation.now))
    shared.start(80, 100, lambda: ended.update(quick=simulation.now))
    simulation.run(100)
    assert ended == pytest.approx({"slow": 10, "quick": 10})


def test_transfer_that_is_cancelled_says_what_is_left() -> None:
    simulation, shared = server(10)
    flow = shared.start(100, 100, lambda: pytest.fail("it was cancelled"))
    left: list[float] = []
    simulation.at(3, lambda: left.append(shared.cancel(flow)))
    simulation.run(100)
    assert left == pytest.approx([70])
    assert shared.bins.total == pytest.approx(30)
    assert shared.active == 0


def test_every_byte_is_moved_once_and_never_faster_than_allowed() -> None:
    simulation, shared = server(1000)
    draws, ended = random.Random(7), list[float]()
    sizes = [draws.uniform(1, 1e5) for _ in range(300)]
    for nbytes in sizes:
        limit = draws.choice([5.0, 50.0, 5000.0])

        def begin(nbytes: float = nbytes, limit: float = limit) -> None:
            began = simulation.now
            shared.start(nbytes, limit, lambda: ended.append((simulation.now - began) * limit / nbytes))

        simulation.at(draws.uniform(0, 1000), begin)
    simulation.run(1e6)
    assert len(ended) == len(sizes)
    assert min(ended) > 0.999
    assert shared.bins.total == pytest.approx(sum(sizes))
    assert max(shared.bins.rates(1e5)) <= 1000.001


def test_amounts_are_spread_over_intervals() -> None:
    bins = Bins(10)
    bins.spread(5, 25, 2)
    bins.add(25, 7)
    assert bins.rates(30) == pytest.approx([1, 2, 1.7])
    assert bins.total == 47
