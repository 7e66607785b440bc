"""Patience: what is retried and what is not, how long, how many at once; and calls that never come back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from scripted_store import Request, ScriptedStore
from servers import answering
from waiting import until

from weightcast.errors import AccessError, MissingError, StoreError, UnreachableError
from weightcast.store import threads
from weightcast.store.base import Listed
from weightcast.store.memory import MemoryStore
from weightcast.store.retry import Patient
from weightcast.store.threads import begin


def holding(keys: Iterable[str]) -> ScriptedStore:
    """Objects whose content is their key."""
    store = MemoryStore("held")
    for key in keys:
        store.put(key, key.encode())
    return ScriptedStore(store)


@pytest.fixture
def pauses() -> list[float]:
    return []


def test_transient_errors_are_retried(pauses: list[float]) -> None:
    store = ScriptedStore()
    store.fail(every=3)
    store.fail(skip=1, every=3)
    patient = Patient(store, sleep=pauses.append)
    patient.put("a", b"content")
    assert patient.get("a") == b"content"
    assert patient.create("b", b"")
    patient.delete("b")
    with pytest.raises(MissingError):
        patient.get("b")
    assert store.count() == 15
    assert len(pauses) == 10


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def test_attempts_are_limited_and_pauses_grow(pauses: list[float]) -> None:
    store = ScriptedStore()
    store.fail()
    with pytest.raises(UnreachableError, match="no answer"):
        Patient(store, attempts=10, sleep=pauses.append, random=middle).get("a")
    assert store.count() == 10
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 16, 20, 20]
    pauses.clear()
    with pytest.raises(UnreachableError):
        Patient(store, attempts=3, sleep=pauses.append, random=min).get("a")
    assert pauses == [0.2, 0.4]


@pytest.mark.parametrize("error", [AccessError, MissingError, StoreError])
def test_permanent_errors_are_not_retried(pauses: list[float], error: type[StoreError]) -> None:
    store = ScriptedStore()
    store.fail(error=error)
    patient = Patient(store, sleep=pauses.append)
    for call in (lambda: patient.get("a"), lambda: patient.put("a", b""), lambda: patient.delete("a")):
        with pytest.raises(error):
            call()
    assert store.count() == 3
    assert not pauses


def test_create_whose_response_was_lost_returns_false(pauses: list[float]) -> None:
    store = ScriptedStore()
    store.fail("create", lost=True, times=1)
    patient = Patient(store, sleep=pauses.append)
    assert not patient.create("a", b"content")
    assert patient.get("a") == b"content"


@pytest.mark.parametrize(("every", "count"), [(2, 300), (7, 1000), (1500, 5000)])
def test_listing_resumes_where_it_failed(pauses: list[float], every: int, count: int) -> None:
    store = holding(keys := [f"{i:05}" for i in range(count)])
    failed: set[str] = set()

    def broken(found: Iterable[Listed]) -> Iterator[Listed]:
        """At each ``every``-th key, once."""
        for listed in found:
            if int(listed.key) % every == 1 and listed.key not in failed:
                failed.add(listed.key)
                raise UnreachableError("broken", url=store.url)
            yield listed

    store.answer("list", "", broken)
    attempts = 1 + max(1, 1024 // every + 1)
    patient = Patient(store, attempts=attempts, sleep=pauses.append)
    assert [listed.key for listed in patient.list("")] == keys
    assert len(pauses) == len(failed) == len(range(1, count, every))


def test_listing_is_lazy() -> None:
    store, yielded = holding([f"{i:05}" for i in range(5000)]), []

    def noted(found: Iterable[Listed]) -> Iterator[Listed]:
        for listed in found:
            yielded.append(listed.key)
            yield listed

    store.answer("list", "", noted)
    assert next(Patient(store).list("")).key == "00000"
    assert len(yielded) < 50


def test_hung_call_is_abandoned(pauses: list[float]) -> None:
    store = holding(["late"])
    store.hang()
    patient = Patient(store, attempts=3, timeout=0.05, sleep=pauses.append)
    for call in (lambda: patient.get("late", 0, 1), lambda: list(patient.list(""))):
        with pytest.raises(UnreachableError, match=r"no answer within 0\.05 s"):
            call()
    assert len(pauses) == 4
    until(lambda: store.count() >= 6)
    assert store.count() == 6
    store.behave()
    assert patient.get("late") == b"late"


def test_limit_grows_with_the_bytes(tmp_path: Path) -> None:
    limits = []
    patient = Patient(MemoryStore(), timeout=10.0)
    real = threads.Outcome.wait

    def wait(self: threads.Outcome, seconds: float | None = None) -> bool:
        limits.append(seconds)
        return real(self, seconds)

    (tmp_path / "file").write_bytes(bytes(3_000_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads.Outcome, "wait", wait)
        patient.put("a", tmp_path / "file")
        patient.put("a", bytes(2_000_000))
        patient.create("b", bytes(1_000_000))
        patient.get("a", 0, 5_000_000)
        patient.delete("b")
    assert limits == [13.0, 12.0, 11.0, 15.0, 10.0]


def test_no_more_calls_at_once_than_allowed() -> None:
    """Four are let through once all four are in the store; a fifth would be seen beside them."""
    lock, now, most, all_four = threading.Lock(), [0], [0], threading.Barrier(4, timeout=60)

    def meet(request: Request) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        all_four.wait()
        with lock:
            now[0] -= 1

    store = holding(["a"])
    store.before("get", "", meet)
    patient = Patient(store, concurrency=4)
    threads = [threading.Thread(target=patient.get, args=("a",)) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 4
    assert not all_four.broken


def test_call_without_a_limit_stays_in_its_thread() -> None:
    store = holding(["a"])
    store.answer("get", "", lambda _: threading.get_ident())
    assert Patient(store, timeout=None).get("a") == threading.get_ident()
    assert Patient(store).get("a") != threading.get_ident()


def test_threads_are_used_again_and_leave_when_idle() -> None:
    patient = Patient(MemoryStore())
    patient.put("a", b"")
    before = threading.active_count()
    for _ in range(200):
        patient.get("a")
    assert threading.active_count() <= before
    all_at_once = threading.Barrier(30, timeout=60)
    outcomes = [begin(all_at_once.wait, idle=0.01) for _ in range(30)]
    assert all(outcome.wait(60) for outcome in outcomes)
    until(lambda: threading.active_count() <= before)
    assert patient.get("a") == b""


def test_successive_calls_share_a_thread() -> None:
    """A new thread for each call would cost ten times as much."""
    store, used = ScriptedStore(), set[threading.Thread]()
    store.put("a", b"")
    store.before("get", "", lambda request: used.add(threading.current_thread()))
    patient = Patient(store)
    for _ in range(20):
        patient.get("a")
    assert len(used) == 1
    assert threading.current_thread() not in used


def test_errors_of_all_kinds_come_back_from_the_other_thread() -> None:
    class Panic(BaseException):
        """As obstore's, which is no Exception."""

    def panic(request: Request) -> None:
        raise Panic

    store = ScriptedStore()
    store.before("get", "", panic)
    with pytest.raises(Panic):
        Patient(store).get("a")


def test_process_ends_while_a_call_hangs() -> None:
    with answering(lambda connection: None) as url:
        code = """
import sys
from weightcast.errors import UnreachableError
from weightcast.store.object import ObjectStore
from weightcast.store.retry import Patient
store = Patient(ObjectStore("s3://bucket"), attempts=2, timeout=0.3)
for call in (lambda: store.get("a", 0, 10), lambda: store.put("a", b""), lambda: list(store.list(""))):
    try:
        call()
    except UnreachableError as error:
        print(error)
"""
        settings = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "no_proxy": "*"}
        run = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, timeout=100
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("no answer within 0.3 s") == 3


def test_forked_child_has_threads_of_its_own() -> None:
    code = """
import os
from weightcast.store.memory import MemoryStore
from weightcast.store.retry import Patient
store = Patient(MemoryStore(), timeout=20)
store.put("a", b"content")
child = os.fork()
assert store.get("a") == b"content"
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60).returncode == 0
