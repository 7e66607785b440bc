"""Jobs of a worker: what takes long never holds up the thread that the engine computes in."""

from __future__ import annotations

import threading

import pytest
from waiting import until

pytest.importorskip("torch")

from weightcast.engine.background import Job, Jobs
from weightcast.engine.messages import Staged

NOTHING = Staged({}, 0, 0, False)


def test_update_that_is_cancelled_holds_nobody_up_and_its_successor_waits_for_its_end() -> None:
    jobs, going_on, order = Jobs(), threading.Event(), list[str]()

    def stuck(job: Job) -> Staged:
        order.append("first begins")
        assert going_on.wait(60)
        order.append("first ends")
        job.refuse_cancelled()
        raise AssertionError("it was cancelled")

    def next_one(job: Job) -> Staged:
        order.append("third begins")
        return NOTHING

    def never(job: Job) -> Staged:
        raise AssertionError("it was cancelled before it began")

    jobs.start_update("first", stuck)
    until(lambda: order)
    jobs.start_update("second", never)  # in this thread: it would wait for ever
    jobs.start_update("third", next_one)
    assert [jobs.report(name).state for name in ("first", "second", "third")] == ["gone", "gone", "running"]
    going_on.set()
    until(lambda: jobs.report("third").state == "done")
    assert order == ["first begins", "first ends", "third begins"]
