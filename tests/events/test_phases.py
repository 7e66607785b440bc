"""Timing phases: every moment belongs to one, and a phase inside another interrupts it."""

from __future__ import annotations

import threading

import pytest
from fake_clock import FakeClock

from weightcast.events.phases import Phases, Span


class Clock(FakeClock):
    """One that began 1,000 seconds after 1970."""

    def wall(self) -> float:
        return 1000.0 + self.time

    def passes(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_that_alternate_are_added_up_and_begin_where_they_first_did(clock: Clock) -> None:
    phases = Phases(clock)
    with phases.phase("fetch"):
        clock.passes(1)
        for _ in range(3):
            phases.enter("decode")
            clock.passes(2)
            phases.enter("verify")
            clock.passes(4)
        phases.enter("fetch")
        clock.passes(8)
    clock.passes(100)
    assert phases.seconds == {"fetch": 9, "decode": 6, "verify": 12}
    assert phases.spans({"fetch": 7}) == (Span("fetch", 1000, 9, 7), Span("decode", 1001, 6), Span("verify", 1003, 12))


def test_phase_inside_another_interrupts_it(clock: Clock) -> None:
    phases = Phases(clock)
    with phases.phase("fetch"):
        clock.passes(1)
        with phases.phase("find"):
            clock.passes(2)
        clock.passes(4)
    assert phases.seconds == {"fetch": 5, "find": 2}


def test_phase_that_raises_has_its_time(clock: Clock) -> None:
    phases = Phases(clock)

    def load() -> None:
        with phases.phase("load"):
            clock.passes(3)
            raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        load()
    with phases.phase("load"):
        clock.passes(4)
    assert phases.seconds == {"load": 7}


def test_jump_of_the_calendar_changes_no_duration(clock: Clock) -> None:
    phases = Phases(clock)
    with phases.phase("encode"):
        clock.passes(1)
        clock.wall = lambda: 5.0  # type: ignore[method-assign]
        clock.passes(1)
    with phases.phase("upload"):
        clock.passes(1)
    assert phases.spans() == (Span("encode", 1000, 2), Span("upload", 1002, 1))
