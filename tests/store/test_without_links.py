"""A folder on a file system without hard links: `create` still has one winner, or says why it cannot."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from file_systems import NO_LINKS, refuse

from weightcast.errors import AccessError, StoreError, UnsupportedError
from weightcast.store import rename
from weightcast.store.base import Store, debris
from weightcast.store.contract import StoreContract
from weightcast.store.file import FileStore
from weightcast.store.probe import honours_create

REFUSALS = [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV]


@pytest.fixture(params=REFUSALS, ids=errno.errorcode.get)
def no_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(request.param))


class TestCreate:
    """The contract's tests of `create`."""

    honours_create = True
    place, keys = StoreContract.place, StoreContract.keys
    test_round_trip = StoreContract.test_round_trip
    test_create_does_not_replace = StoreContract.test_create_does_not_replace
    test_create_has_one_winner = StoreContract.test_create_has_one_winner
    test_odd_keys_are_kept_as_they_are = StoreContract.test_odd_keys_are_kept_as_they_are

    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
        return FileStore(tmp_path_factory.mktemp("store"))


@pytest.mark.usefixtures("no_links")
def test_create_replaces_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert honours_create(store)
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert store.get("a/b") == b"first"
    with pytest.raises(StoreError, match="has the object's name"):
        store.create("a", b"")
    assert debris(store) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_creator_killed_at_the_rename_leaves_the_object_whole_or_the_key_free(tmp_path: Path, moment: str) -> None:
    code = f"""
import ctypes
from types import SimpleNamespace
real = ctypes.CDLL(None).renameat2
def call(*arguments):
    if {moment == "after"}:
        assert real(*arguments) == 0
    os.kill(os.getpid(), 9)
ctypes.CDLL = lambda *arguments, **options: SimpleNamespace(renameat2=call)
store.create("a/b", b"killed")
"""
    assert subprocess.run([sys.executable, "-c", NO_LINKS + code, tmp_path]).returncode == -signal.SIGKILL
    store = FileStore(tmp_path)
    assert store.create("a/b", b"next") == (moment == "before")
    assert store.get("a/b") == (b"next" if moment == "before" else b"killed")


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_error_names_what_the_file_system_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(rename, "rename_exclusively", refuse(code))
    store = FileStore(tmp_path)
    with pytest.raises(UnsupportedError, match=r"neither hard links .* nor a rename that does not replace") as caught:
        store.create("a", b"")
    assert "object store" in str(caught.value.hint)
    assert list(store.list("")) == debris(store) == []


def test_system_without_the_call_is_unsupported(tmp_path: Path) -> None:
    code = """
import ctypes
ctypes.CDLL = lambda *arguments, **options: object()
store.create("a", b"")
"""
    run = subprocess.run([sys.executable, "-c", NO_LINKS + code, tmp_path], capture_output=True, text=True)
    assert "UnsupportedError: the file system has neither hard links" in run.stderr


def test_missing_permission_is_not_reported_as_missing_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(rename, "rename_exclusively", refuse(errno.EPERM))
    with pytest.raises(AccessError, match="the file system refused access"):
        FileStore(tmp_path).create("a", b"")


def test_lost_response_of_a_rename_is_not_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rename.rename_exclusively

    def call(*arguments: object) -> None:
        real(*arguments)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(rename, "rename_exclusively", call)
    store = FileStore(tmp_path)
    assert store.create("a", b"content")
    assert store.get("a") == b"content"
