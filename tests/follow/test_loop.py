"""The loop of every follower: when the next round begins, what it yields, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice, pairwise

import pytest
from fake_clock import FakeClock

from weightcast.errors import BusyError, UnreachableError, WeightcastError
from weightcast.follow.loop import rounds


class Script:
    """A step that returns or raises what it is given, one a round, and notes when it was called."""

    def __init__(self, clock: FakeClock, outcomes: list[int | WeightcastError | None]):
        self._clock, self._outcomes = clock, iter(outcomes)
        self.called: list[float] = []

    def __call__(self) -> int | None:
        self.called.append(self._clock.now())
        outcome = next(self._outcomes, None)
        if isinstance(outcome, WeightcastError):
            raise outcome
        return outcome

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in pairwise(self.called)]


def outage() -> UnreachableError:
    return UnreachableError("no answer", url="memory://x")


def test_results_come_without_a_pause_and_idle_rounds_with_one() -> None:
    clock = FakeClock()
    step = Script(clock, [1, 2, None, None, 3])
    found = list(islice(rounds(step, every=10.0, stopped=threading.Event(), clock=clock), 5))
    assert found == [1, 2, None, None, 3]
    assert step.pauses[:2] == [0, 0]
    assert all(8 <= pause <= 12 for pause in step.pauses[2:])


def test_failures_are_reported_and_make_pauses_twice_as_long_up_to_a_limit() -> None:
    clock, told = FakeClock(), list[WeightcastError]()
    step = Script(clock, [*(outage() for _ in range(2000)), None, None, 7])
    running = rounds(step, every=1.0, stopped=threading.Event(), on_error=told.append, clock=clock, longest=30.0)
    assert list(islice(running, 2003)) == [None] * 2002 + [7]
    assert len(told) == 2000
    doubled = [2, 4, 8, 16, *([30] * 1996)]
    assert all(0.8 * due <= pause <= 1.2 * due for due, pause in zip(doubled, step.pauses, strict=False))
    assert all(pause <= 1.2 for pause in step.pauses[2000:]), "one success ends the long pauses"


def test_interval_longer_than_the_limit_is_kept_while_steps_fail() -> None:
    clock = FakeClock()
    step = Script(clock, [outage(), BusyError("a reader stays", file="x"), None])
    list(islice(rounds(step, every=300.0, stopped=threading.Event(), on_error=print, clock=clock), 3))
    assert all(240 <= pause <= 360 for pause in step.pauses)


def test_first_error_without_a_handler_ends_the_loop() -> None:
    clock = FakeClock()
    running = rounds(Script(clock, [1, outage()]), every=1.0, stopped=threading.Event(), clock=clock)
    assert next(running) == 1
    with pytest.raises(UnreachableError):
        next(running)


def test_error_raised_by_the_handler_ends_the_loop() -> None:
    def refuse(error: WeightcastError) -> None:
        raise error

    clock = FakeClock()
    running = rounds(Script(clock, [outage()]), every=1.0, stopped=threading.Event(), on_error=refuse, clock=clock)
    with pytest.raises(UnreachableError):
        next(running)


@pytest.mark.parametrize("outcome", [lambda: 1, lambda: None, outage], ids=["result", "idle", "failure"])
def test_stop_ends_the_loop_before_the_next_step(outcome: Callable[[], int | WeightcastError | None]) -> None:
    clock, stopped = FakeClock(), threading.Event()
    step = Script(clock, [outcome(), outcome()])
    running = rounds(step, every=1.0, stopped=stopped, on_error=lambda error: None, clock=clock)
    next(running)
    stopped.set()
    assert not list(running)
    assert len(step.called) == 1
