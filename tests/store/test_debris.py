"""Unfinished uploads in a folder: listed, removed, told from running ones, whatever the hosts' clocks say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcast.errors import MissingError, UnreachableError, UsageError
from weightcast.store.base import Store, debris, discard_debris
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.store.retry import Patient

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


# -- running uploads ---------------------------------------------------------------------------------------------------

DAY = 24 * 3600


@pytest.fixture
def during_upload(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Make every upload from a file call a function with its temporary file's path, behind the first of two chunks."""
    real, seen = os.copy_file_range, set[str]()

    def arrange(call: Callable[[Path], None]) -> None:
        def copy(source: int, target: int, count: int) -> int:
            path = Path(str(Path(f"/proc/self/fd/{target}").readlink()).removesuffix(" (deleted)"))
            if os.fstat(target).st_size and str(path) not in seen:
                seen.add(str(path))
                call(path)
            return real(source, target, min(count, 1 << 20))

        monkeypatch.setattr(os, "copy_file_range", copy)

    return arrange


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(2 << 20))
    return path


@pytest.mark.parametrize("days", [2, -2, 400])
def test_host_with_another_date_leaves_running_uploads_alone(
    tmp_path: Path, source: Path, days: int, during_upload: Callable[[Callable[[Path], None]], None]
) -> None:
    code = """
import sys, time
real = time.time
time.time = lambda: real() + float(sys.argv[2])
time.time_ns = lambda: int(time.time() * 1e9)
from weightcast.store.file import FileStore
FileStore(sys.argv[1]).put("other", b"content")
"""
    command = [sys.executable, "-c", code, tmp_path / "store", str(days * DAY)]
    during_upload(lambda path: subprocess.run(command, check=True))
    store = FileStore(tmp_path / "store")
    store.put("a", source)
    assert store.get("a") == source.read_bytes()
    assert store.get("other") == b"content"


@pytest.mark.parametrize(("age", "kept"), [(0.9 * DAY, True), (1.1 * DAY, False)])
def test_age_of_debris_is_measured_by_the_file_systems_clock(tmp_path: Path, age: float, kept: bool) -> None:
    """Only the times of files count, even if this host's clock is years late."""
    store = FileStore(tmp_path)
    store.put("a", b"")
    left = tmp_path / ".tmp" / "1-0123456789abcdef"
    left.write_bytes(b"left")
    now = left.stat().st_mtime
    os.utime(left, (now - age, now - age))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: 0.0)
        FileStore(tmp_path).put("a", b"")
    assert left.exists() == kept


def test_upload_of_days_is_not_swept(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    during_upload: Callable[[Callable[[Path], None]], None],
) -> None:
    """Two days pass before the second chunk; when it is written, the file is young again."""
    aged: list[Path] = []

    def age(path: Path) -> None:
        os.utime(path, (path.stat().st_mtime - 2 * DAY,) * 2)
        aged.append(path)

    def sweep_then_sync(fd: int) -> None:
        if len(aged) == 1 and os.fstat(fd).st_size == 2 << 20:
            aged.append(tmp_path)
            FileStore(tmp_path / "store").put("other", b"")

    during_upload(age)
    monkeypatch.setattr(os, "fdatasync", sweep_then_sync)
    store = FileStore(tmp_path / "store", sync_every=1 << 20)
    store.put("a", source)
    assert len(aged) == 2, "another store swept while the upload ran"
    assert store.get("a") == source.read_bytes()


@pytest.mark.parametrize("kind", ["bytes", "path"])
def test_large_uploads_are_synced_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One sync of everything at the end could take longer than what is taken for abandoned."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    content = os.urandom(350_000)
    (tmp_path / "source").write_bytes(content)
    store = FileStore(tmp_path / "store", sync_every=100_000)
    store.put("a", content if kind == "bytes" else tmp_path / "source")
    assert store.get("a") == content
    assert synced == [100_000, 200_000, 300_000]


@pytest.mark.parametrize("write", ["put", "create"])
def test_error_names_the_removal_of_a_running_upload(
    tmp_path: Path, source: Path, write: str, during_upload: Callable[[Callable[[Path], None]], None]
) -> None:
    during_upload(Path.unlink)
    store = FileStore(tmp_path / "store")
    with pytest.raises(
        UnreachableError, match=r"another process removed the upload's temporary file from \.tmp"
    ) as caught:
        getattr(store, write)("a/b", source)
    assert str(tmp_path / "store" / ".tmp") in str(caught.value.hint)
    assert list(store.list("")) == []


def test_removed_upload_is_tried_again(
    tmp_path: Path, source: Path, during_upload: Callable[[Callable[[Path], None]], None]
) -> None:
    removed: list[Path] = []

    def remove_first(path: Path) -> None:
        if not removed:
            removed.append(path)
            path.unlink()

    during_upload(remove_first)
    store = Patient(FileStore(tmp_path / "store"), sleep=lambda seconds: None)
    assert store.create("a", source)
    assert removed
    assert store.get("a") == source.read_bytes()
