"""Threads: results in order, nesting without deadlock, errors and bounds kept."""

import threading
import time

import pytest

from weightcast.format.workers import Workers


def large(item: int) -> int:
    return 1 << 20


def test_results_come_in_order() -> None:
    with Workers(4) as workers:
        assert workers.map(lambda i: i * i, range(100)) == [i * i for i in range(100)]
        for elements in (large, lambda i: 1, lambda i: (i % 3) << 20):
            assert list(workers.stream(lambda i: i * i, range(100), elements)) == [i * i for i in range(100)]


def test_map_inside_stream_inside_map_does_not_deadlock() -> None:
    with Workers(2) as workers:

        def inner(i: int) -> int:
            return sum(workers.map(lambda j: i * j, range(10)))

        for _ in range(50):
            assert list(workers.stream(inner, range(20), large)) == [45 * i for i in range(20)]


def test_error_in_any_item_is_raised() -> None:
    def fail_at_seven(i: int) -> int:
        if i == 7:
            raise KeyError(i)
        return i

    with Workers(3) as workers:
        with pytest.raises(KeyError):
            workers.map(fail_at_seven, range(20))
        with pytest.raises(KeyError):
            list(workers.stream(fail_at_seven, range(20), large))
        assert workers.map(abs, [-1, -2, -3]) == [1, 2, 3]


def test_stream_begins_only_a_few_items_ahead() -> None:
    begun, lock = 0, threading.Lock()

    def begin(i: int) -> int:
        nonlocal begun
        with lock:
            begun += 1
        return i

    with Workers(2) as workers:
        for taken, _ in enumerate(workers.stream(begin, range(100), large), 1):
            time.sleep(0.001)
            with lock:
                assert begun <= taken + 3


def test_error_stops_the_rest_and_nothing_keeps_running() -> None:
    begun: list[int] = []  # appending, adding and discarding are atomic
    running: set[int] = set()
    failed = threading.Event()

    def fail_at_one(i: int) -> None:
        begun.append(i)
        running.add(i)
        try:
            if i == 1:
                failed.set()
                raise KeyError(i)
            failed.wait()
            time.sleep(0.001)
        finally:
            running.discard(i)

    with Workers(3) as workers:
        with pytest.raises(KeyError):
            workers.map(fail_at_one, range(10_000))
        assert len(begun) < 10_000
        assert not running
        with pytest.raises(KeyError):
            list(workers.stream(fail_at_one, range(10_000), large))
        assert not running
