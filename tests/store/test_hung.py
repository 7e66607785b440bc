"""A store whose calls never come back: a bounded number of them is left behind, and a clear error said meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from weightcast.errors import UnreachableError
from weightcast.store.base import Data, Listed
from weightcast.store.memory import MemoryStore
from weightcast.store.retry import Patient

MOST = 16


class Hung(MemoryStore):
    """Answers nothing until it is released, as a mount whose server is gone."""

    def __init__(self) -> None:
        super().__init__("hung")
        self.release = threading.Event()
        self.threads: set[int] = set()

    def _hang(self) -> None:
        self.threads.add(threading.get_ident())
        self.release.wait(60)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._hang()
        return b"late"

    def put(self, key: str, data: Data) -> None:
        self._hang()

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        self._hang()
        return iter(())


@pytest.fixture
def store() -> Iterator[Hung]:
    store = Hung()
    yield store
    store.release.set()


def test_hung_calls_leave_a_bounded_number_of_threads(store: Hung) -> None:
    patient = Patient(store, attempts=3, timeout=0.001, sleep=lambda seconds: None)
    said = []
    for _ in range(20):
        for call in (lambda: patient.get("a", 0, 0), lambda: patient.put("a", b""), lambda: list(patient.list(""))):
            with pytest.raises(UnreachableError) as caught:
                call()
            said.append(str(caught.value))
    assert len(store.threads) == MOST
    assert "no answer within" in said[0]
    assert "16 earlier calls hang without an answer" in said[-1]
    assert caught.value.hint


def test_calls_at_once_that_hang_are_bounded_too(store: Hung) -> None:
    patient = Patient(store, attempts=50, timeout=0.001, concurrency=4, sleep=lambda seconds: None)

    def call() -> None:
        with pytest.raises(UnreachableError):
            patient.get("a", 0, 0)

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert MOST <= len(store.threads) < MOST + 4


def test_calls_go_on_once_hung_ones_come_back(store: Hung) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == MOST + 5:
            assert len(store.threads) == MOST
            store.release.set()
        if store.release.is_set():
            time.sleep(0.01)

    assert Patient(store, attempts=1000, timeout=0.02, sleep=sleep).get("a", 0, 0) == b"late"
    assert len(pauses) >= MOST + 5


def test_forked_child_has_no_hung_calls() -> None:
    code = """
import os, threading
from weightcast.errors import UnreachableError
from weightcast.store.memory import MemoryStore
from weightcast.store.retry import Patient
parent = os.getpid()
class Hung(MemoryStore):
    def get(self, key, start=0, length=None):
        if os.getpid() == parent:
            threading.Event().wait()
        return b"child"
patient = Patient(Hung(), attempts=17, timeout=0.02, sleep=lambda seconds: None)
try:
    patient.get("a", 0, 0)
except UnreachableError as error:
    assert "earlier calls hang" in str(error)
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(patient.get("a", 0, 0) != b"child")
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60).returncode == 0
