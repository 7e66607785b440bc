"""Threads for kernels that release the interpreter lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from weightcast.format.closing import Closing

T = TypeVar("T")
R = TypeVar("R")

_CORES = len(os.sched_getaffinity(0))
"""More threads than this in one call would only take the cores from each other."""

_WORTH_A_THREAD = 1 << 17


class Workers(Closing):
    """A fixed number of threads: `map` inside one tensor, `stream` across tensors; the two nest."""

    def __init__(self, threads: int | None = None):
        self.threads = threads or _CORES
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="weightcast") if self.threads > 1 else None

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Results in order. The calling thread works too, so a thread of the pool can call this without a deadlock."""
        if self._pool is None or len(items) < 2:
            return [function(item) for item in items]
        turns = iter(range(len(items)))  # next() on it is atomic
        results: dict[int, R] = {}
        failed = False

        def work() -> None:
            nonlocal failed
            try:
                for i in turns:
                    if failed:
                        return
                    results[i] = function(items[i])
            except BaseException:
                failed = True
                raise

        helpers = [self._pool.submit(work) for _ in range(min(self.threads, _CORES, len(items)) - 1)]
        try:
            work()
        finally:
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()
        return [results[i] for i in range(len(items))]

    def stream(self, function: Callable[[T], R], items: Iterable[T], elements: Callable[[T], int]) -> Iterator[R]:
        """Results in order. At most one item per thread is begun ahead of the consumer, so memory stays bounded.

        Items of few ``elements`` run in the calling thread: their time is mostly the interpreter's, which threads slow
        down.
        """
        pool = self._pool
        if pool is None:
            return map(function, items)

        def begin(item: T) -> Future[R]:
            if elements(item) >= _WORTH_A_THREAD:
                return pool.submit(function, item)
            done: Future[R] = Future()
            done.set_result(function(item))
            return done

        return _in_order(map(begin, items), self.threads)

    def ahead(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results in order. The next one is begun before the consumer gets one, and may call `map`.

        Not for a thread of the pool: it would wait for others of it.
        """
        pool = self._pool
        if pool is None:
            return map(function, items)
        return _in_order((pool.submit(function, item) for item in items), 1)

    def batches(self, items: Iterable[T], elements: Callable[[T], int], each: int = 1 << 22) -> Iterator[list[T]]:
        """Consecutive items with about ``each`` elements for a thread: all are busy, and memory stays bounded."""
        batch: list[T] = []
        size = 0
        for item in items:
            batch.append(item)
            size += elements(item)
            if size >= self.threads * each:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _in_order(begun: Iterable[Future[R]], most: int) -> Iterator[R]:
    """The results of what is begun, at most so many ahead of the consumer."""
    ahead: deque[Future[R]] = deque()
    try:
        for future in begun:
            ahead.append(future)
            if len(ahead) > most:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        wait([future for future in ahead if not future.cancel()])


ONE = Workers(1)
"""The calling thread alone."""
