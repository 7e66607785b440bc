"""A store whose calls never come back: a bounded number of them is left behind, and a clear error said meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from scripted_store import ScriptedStore
from waiting import until

from weightcast.errors import UnreachableError
from weightcast.store.retry import Patient

MOST = 16


@pytest.fixture
def store() -> Iterator[ScriptedStore]:
    """Answers nothing until it is released, as a mount whose server is gone."""
    store = ScriptedStore()
    store.put("a", b"late")
    store.calls.clear()
    store.hang()
    yield store
    store.behave()


def test_hung_calls_leave_a_bounded_number_of_threads(store: ScriptedStore) -> None:
    patient = Patient(store, attempts=1, timeout=0.001)
    errors = []
    for _ in range(10):
        for call in (lambda: patient.get("a", 0, 0), lambda: patient.put("a", b""), lambda: list(patient.list(""))):
            with pytest.raises(UnreachableError) as caught:
                call()
            errors.append(caught.value)
    assert all(error.problem == "no answer within 0.001 s" for error in errors[:MOST])
    assert all(error.problem == "16 earlier calls hang without an answer" for error in errors[MOST:])
    assert all(error.hint for error in errors)
    until(lambda: store.count() >= MOST)  # a thread may begin its call after the call was abandoned
    assert store.count() == MOST


def test_concurrent_hung_calls_are_bounded(store: ScriptedStore) -> None:
    patient = Patient(store, attempts=1, timeout=0.001, concurrency=4)
    abandoned: list[str] = []

    def call() -> None:
        for _ in range(10):
            with pytest.raises(UnreachableError) as caught:
                patient.get("a", 0, 0)
            if "no answer within" in str(caught.value):
                abandoned.append(str(caught.value))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert MOST <= len(abandoned) < MOST + 4
    until(lambda: store.count() >= len(abandoned))
    assert store.count() == len(abandoned)


def test_calls_continue_once_hung_ones_return(store: ScriptedStore) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == MOST + 5:
            until(lambda: store.count() >= MOST)
            assert store.count() == MOST
            store.behave()
        if len(pauses) >= MOST + 5:
            time.sleep(0.001)

    assert Patient(store, attempts=100_000, timeout=0.02, sleep=sleep).get("a", 0, 4) == b"late"
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
