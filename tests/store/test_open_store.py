"""What every store promises, on those that need no server; how they are opened; what a probe finds out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_store import Request, ScriptedStore

from weightcast.errors import MissingError, UnreachableError, UsageError
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.contract import StoreContract
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.store.probe import PROBES, clock, honours_create
from weightcast.store.retry import Patient


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestPatientMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return Patient(MemoryStore())


class TestFile(StoreContract):
    overlapping = False

    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        return FileStore(tmp_path_factory.mktemp("store"))


class TestPatientFile(StoreContract):
    overlapping = False

    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        return Patient(FileStore(tmp_path_factory.mktemp("store")))


def overwriting() -> ScriptedStore:
    """A server that ignores the condition, as some do."""
    store = ScriptedStore()
    store.overwrite()
    return store


def lying() -> ScriptedStore:
    """One that gives the right answer and overwrites all the same."""
    store = ScriptedStore()

    def create(request: Request, proceed: Callable[[], bool]) -> bool:
        there = bool(store.keys(request.key))
        store.put(request.key, request.data)
        return not there

    store.on("create", "", create)
    return store


class TestOverwriting(StoreContract):
    honours_create = False

    @pytest.fixture
    def store(self) -> Store:
        return overwriting()


@pytest.mark.parametrize(("store", "expected"), [(MemoryStore(), True), (overwriting(), False), (lying(), False)])
def test_probe_detects_overwriting_and_leaves_nothing(store: Store, expected: bool) -> None:
    assert honours_create(store) is expected
    assert list(store.list("")) == []


def test_probe_recognises_a_retried_create() -> None:
    """The first attempt succeeded but its answer was lost, and the second met the first one's object."""
    store = ScriptedStore()
    store.fail("create", lost=True, times=1)
    assert honours_create(Patient(store, sleep=lambda seconds: None))


def test_clock_is_the_stores_own() -> None:
    store = ScriptedStore(now=12345.0)
    assert clock(store) == 12345.0
    assert list(store.list(PROBES)) == []


def test_clock_of_a_store_that_does_not_list_what_it_holds() -> None:
    store = ScriptedStore()
    store.answer("list", "", lambda found: [])
    with pytest.raises(UnreachableError, match="not listed"):
        clock(store)


def test_name_in_memory_means_the_same_store_to_all() -> None:
    seen = []
    open_store("memory://shared").put("a", b"content")
    thread = threading.Thread(target=lambda: seen.append(open_store("memory://shared").get("a")))
    thread.start()
    thread.join()
    assert seen == [b"content"]
    with pytest.raises(MissingError):
        open_store("memory://other").get("a")


def test_paths_and_file_urls_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    odd = tmp_path / "a b#c?d"
    for url, where in [
        (tmp_path / "x", tmp_path / "x"),
        (str(tmp_path / "x"), tmp_path / "x"),
        ("x", tmp_path / "x"),
        ("./x", tmp_path / "x"),
        ("run:12/x", tmp_path / "run:12/x"),
        ("~/x", tmp_path / "home/x"),
        (f"file://{tmp_path}/x", tmp_path / "x"),
        (f"FILE://localhost{tmp_path}/x", tmp_path / "x"),
        (f"file://{tmp_path}/a%20b%23c%3Fd", odd),
        (str(odd), odd),
    ]:
        assert open_store(url).url == str(where)


@pytest.mark.parametrize(
    ("url", "guess"),
    [
        ("", None),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3:bucket", "s3://bucket"),
        ("s4://bucket", "s3://bucket"),
        ("s3n://bucket", "s3"),
        ("htps://host/x", "https://host/x"),
        ("http:/host", "http://host"),
        ("flie:///x", "file:///x"),
        ("azure://x", "az://x"),
        ("ftp://host", None),
        ("://x", None),
        ("s3://", None),
        ("S3://", None),
        ("s3:///x", None),
        ("s3://a bucket", None),
        ("s3://bucket/../x", None),
        ("s3://bucket//x", None),
        ("gs://", None),
        ("az://", None),
        ("memory://", None),
        ("memory://a/b", None),
        ("file://", None),
        ("file://x/y", None),
        ("file://host/x", None),
        ("http://", None),
        ("https://user:secret@host/x", None),
        ("https://host/x?token=secret", None),
        ("https://host/x#y", None),
        ("a\0b", None),
    ],
)
def test_malformed_address_is_refused_with_a_hint(url: str, guess: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.hint
    if guess:
        assert f"Did you mean {guess}" in caught.value.hint
    assert "secret" not in str(caught.value)


def test_missing_obstore_is_an_error_with_a_remedy() -> None:
    code = "import sys; sys.modules['obstore'] = None; import weightcast.store as s; s.open_store('s3://bucket')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'weightcast[stores]'" in run.stderr
    assert "UsageError" in run.stderr
