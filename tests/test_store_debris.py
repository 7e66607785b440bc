"""Unfinished uploads in a folder: listed, removed, told from running ones, whatever the hosts' clocks say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightcast.errors import MissingError, UsageError
from weightcast.store.base import Store, debris, discard_debris
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.store.patient import Patient

KILLED_WHILE_WRITING = """
import os, sys
from pathlib import Path
from weightcast.store import file
real = os.copy_file_range
def copy(source, target, count):
    if os.fstat(target).st_size:
        os.kill(os.getpid(), 9)
    return real(source, target, 1 << 20)
os.copy_file_range = copy
file.FileStore(sys.argv[1]).put("a/b", Path(sys.argv[2]))
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A folder in which a process was killed in the middle of an upload of 3 MB, behind its first MiB."""
    (tmp_path / "source").write_bytes(bytes(3_000_000))
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, tmp_path / "store", tmp_path / "source"]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    return tmp_path / "store"


@pytest.mark.parametrize("patient", [False, True])
def test_killed_upload_is_listed_with_size_and_age_and_can_be_removed(killed: Path, patient: bool) -> None:
    store: Store = Patient(FileStore(killed)) if patient else FileStore(killed)
    (left,) = (killed / ".tmp").iterdir()
    os.utime(left, (1e9, 1e9))
    (found,) = debris(store)
    assert (found.key, found.size, found.modified) == (f".tmp/{left.name}", 1 << 20, 1e9)
    assert list(store.list("")) == []
    discard_debris(store, [found.key])
    assert not left.exists()
    assert debris(store) == []
    discard_debris(store, [found.key])


def test_finished_uploads_leave_no_debris(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    with pytest.raises(MissingError, match="the folder does not exist"):
        debris(store)
    store.put("a", b"content")
    assert store.create("b", b"content")
    assert not store.create("b", b"content")
    assert debris(store) == []


@pytest.mark.parametrize("store", [MemoryStore(), Patient(MemoryStore())])
def test_store_that_keeps_no_unfinished_uploads_lists_none(store: Store) -> None:
    assert debris(store) == []
    discard_debris(store, [".tmp/1-0123456789abcdef"])


@pytest.mark.parametrize("key", ["a", "a/b", ".tmp", ".tmp/", ".tmp/..", ".tmp/../a", ".tmp/a/b", "/.tmp/a", ".tmp/\0"])
def test_only_keys_of_unfinished_uploads_are_discarded(tmp_path: Path, key: str) -> None:
    store = FileStore(tmp_path)
    for name in ("a", "b/c"):
        store.put(name, b"content")
    with pytest.raises(UsageError, match="not the key of an unfinished upload"):
        discard_debris(store, [key])
    assert [listed.key for listed in store.list("")] == ["a", "b/c"]


def test_strangers_things_among_the_temporary_files_are_not_listed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", b"content")
    (tmp_path / ".tmp" / "folder").mkdir()
    (tmp_path / ".tmp" / "link").symlink_to(tmp_path / "a")
    (tmp_path / ".tmp" / ".nfs0001").write_bytes(b"")
    (tmp_path / os.fsdecode(b".tmp/\xff")).write_bytes(b"")
    assert debris(store) == []
