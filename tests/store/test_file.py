"""A folder as a store: durable in the right order, whole after a crash, alone on its own ground."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_systems import NO_LINKS, STORE, refuse

from weightcast.errors import AccessError, MissingError, SpaceError, StoreError, UnreachableError, UnsupportedError
from weightcast.store.file import FileStore


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """System calls of a write in their order, and on what."""
    made: list[tuple[str, str]] = []

    def recorded(name: str, what: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            made.append((name, what(*arguments, **options)))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    def of_fd(fd: int) -> str:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return ".tmp/*" if path.parent.name == ".tmp" else path.name

    def of_folder(name: str, *, dir_fd: int) -> str:
        return f"{of_fd(dir_fd)}/{name}"

    def of_target(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> str:
        return f"{of_fd(dst_dir_fd)}/{target}"

    recorded("fsync", of_fd)
    recorded("mkdir", of_folder)
    recorded("rename", of_target)
    recorded("link", of_target)
    return made


def test_put_syncs_the_bytes_before_the_name_and_the_folder_after_it(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    FileStore(tmp_path / "root").put("a/b/c", b"content")
    where = tmp_path.name
    assert calls == [
        ("mkdir", f"{where}/root"), ("fsync", where),
        ("mkdir", "root/.tmp"), ("fsync", "root"),
        ("fsync", ".tmp/*"),
        ("mkdir", "root/a"), ("fsync", "root"),
        ("mkdir", "a/b"), ("fsync", "a"),
        ("rename", "b/c"), ("fsync", "b"),
    ]  # fmt: skip


def test_create_links(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    store = FileStore(tmp_path)
    store.put("a/b", b"")
    calls.clear()
    assert store.create("a/c", b"content")
    assert calls == [("fsync", ".tmp/*"), ("link", "a/c"), ("fsync", "a")]
    assert not names(tmp_path / ".tmp")


def test_delete_is_synced_and_removes_empty_folders(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    store = FileStore(tmp_path)
    store.put("a/b/c", b"")
    store.put("a/d", b"")
    calls.clear()
    store.delete("a/b/c")
    assert calls == [("fsync", "b")]
    assert names(tmp_path) == [".tmp", "a"]
    assert names(tmp_path / "a") == ["d"]
    store.delete("a/d")
    assert names(tmp_path) == [".tmp"]


def test_folder_removed_during_a_put_is_created_again(tmp_path: Path) -> None:
    code = """
import sys
from weightcast.store.file import FileStore
store = FileStore(sys.argv[1])
for i in range(300):
    store.put("a/b/" + sys.argv[2], b"x")
    assert store.get("a/b/" + sys.argv[2]) == b"x"
    store.delete("a/b/" + sys.argv[2])
"""
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "xyz"]
    assert [run.wait() for run in runs] == [0, 0, 0]


@pytest.mark.parametrize("setup", [STORE, NO_LINKS], ids=["links", "no links"])
def test_one_of_two_processes_wins_each_create(tmp_path: Path, setup: str) -> None:
    code = """
for line in sys.stdin:
    print(int(store.create("race/" + line.strip(), sys.argv[2].encode())), flush=True)
"""
    command, pipe = [sys.executable, "-c", setup + code, str(tmp_path)], subprocess.PIPE
    runs = [subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, text=True, bufsize=1) for name in "xy"]
    store = FileStore(tmp_path)
    for race in map(str, range(100)):
        for run in runs:
            run.stdin.write(race + "\n")
        won = [int(run.stdout.readline()) for run in runs]
        assert sum(won) == 1
        assert store.get(f"race/{race}").decode() == runs[won.index(1)].args[-1]
        runs.reverse()  # so that neither always begins
    for run in runs:
        run.communicate()
        assert run.returncode == 0


def test_leftovers_of_a_killed_writer_are_invisible_and_swept_later(tmp_path: Path) -> None:
    code = """
import os, sys
from weightcast.store import file
def die(fd):
    os.kill(os.getpid(), 9)
store = file.FileStore(sys.argv[1])
store.put("whole", b"content")
os.fsync = die
store.put("torn", b"content")
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert run.returncode == -signal.SIGKILL
    (left,) = (tmp_path / ".tmp").iterdir()
    store = FileStore(tmp_path)
    assert [listed.key for listed in store.list("")] == ["whole"]
    with pytest.raises(MissingError):
        store.get("torn")
    store.put("another", b"")
    assert left.exists(), "its writer may be alive"
    os.utime(left, (time.time() - 90_000,) * 2)
    FileStore(tmp_path).put("another", b"")
    assert not left.exists()


def test_strangers_temporary_files_and_links_are_invisible(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "root")
    store.put("a/b", b"content")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / ".b.Xy12z").write_bytes(b"of rsync")
    (root / ".nfs0001").write_bytes(b"of NFS")
    (root / "link").symlink_to(outside)
    (root / "a" / "secret").symlink_to(outside / "secret")
    os.mkfifo(root / "pipe")
    assert [listed.key for listed in store.list("")] == ["a/b"]
    assert list(store.list("link/")) == []
    for key in ("link/secret", "a/secret", "pipe", "link"):
        with pytest.raises(MissingError):
            store.get(key)
    for key in ("link/new", "link/secret"):
        with pytest.raises(StoreError, match="has the object's name"):
            store.put(key, b"")
        store.delete(key)
    store.put("a/secret", b"ours")
    assert (outside / "secret").read_bytes() == b"secret"
    assert names(outside) == ["secret"]


def test_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    FileStore(tmp_path / "link").put("a", b"content")
    assert FileStore(tmp_path / "real").get("a") == b"content"


def test_listing_walks_only_where_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    for folder in ("deltas/1", "deltas/2", "manifests", "pins"):
        for i in range(3):
            store.put(f"{folder}/{i}", b"")
    walked: list[str] = []
    real, looked = os.scandir, os.lstat

    def scandir(fd: int) -> Any:
        walked.append(os.path.relpath(Path(f"/proc/self/fd/{fd}").readlink(), tmp_path))
        return real(fd)

    def lstat(path: Path) -> os.stat_result:
        walked.append(os.path.relpath(path, tmp_path))
        return looked(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "lstat", lstat)
    assert [listed.key for listed in store.list("manifests/", "manifests/1")] == ["manifests/2"]
    assert walked == ["manifests", "manifests/2"]
    walked.clear()
    assert [listed.key for listed in store.list("d", "deltas/2/1")] == ["deltas/2/2"]
    assert walked == [".", "deltas", "deltas/2", "deltas/2/2"]
    walked.clear()
    next(store.list("deltas/1/"))
    assert walked == ["deltas/1", "deltas/1/0"]


def test_missing_folder_is_reported_at_the_first_call(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "none")
    for ask in (lambda: store.get("a"), lambda: list(store.list("")), lambda: list(store.list("a/"))):
        with pytest.raises(MissingError, match="the folder does not exist") as caught:
            ask()
        assert caught.value.key is None
    store.delete("a")
    assert not (tmp_path / "none").exists()
    store.put("a", b"")
    assert store.get("a") == b""


def test_objects_and_folders_do_not_share_names(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", b"")
    store.put("b/c", b"")
    for write in (store.put, store.create):
        for key in ("a/b", "b"):
            with pytest.raises(StoreError, match="has the object's name") as caught:
                write(key, b"")
            assert caught.value.key == key
    assert [listed.key for listed in store.list("")] == ["a", "b/c"]
    assert not names(tmp_path / ".tmp")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, SpaceError),
        (errno.EDQUOT, SpaceError),
        (errno.EACCES, AccessError),
        (errno.EROFS, AccessError),
        (errno.ESTALE, UnreachableError),
        (errno.ENOTSUP, UnsupportedError),
        (errno.EMFILE, StoreError),
    ],
)
def test_system_refusal_has_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    store = FileStore(tmp_path)
    store.put("a", b"old")
    monkeypatch.setattr(os, "write", refuse(code))
    for write in (store.put, store.create):
        with pytest.raises(kind, match=os.strerror(code)) as caught:
            write("a", b"new")
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert store.get("a") == b"old"
    assert not names(tmp_path / ".tmp")


def test_full_disk_is_a_space_error(tmp_path: Path) -> None:
    """The kernel refuses: a limit on the size of files, as a child process has it."""
    code = """
import resource, signal, sys
from pathlib import Path
from weightcast.errors import SpaceError
from weightcast.store.file import FileStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Path(sys.argv[1])
(root / "source").write_bytes(bytes(2 << 20))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for data in (bytes(2 << 20), root / "source"):
    try:
        FileStore(root / "store").put("a", data)
    except SpaceError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.count("Free some space there") == 2
    assert not names(tmp_path / "store" / ".tmp")


def test_lost_response_of_a_network_file_system_is_not_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    assert FileStore(tmp_path).create("a", b"content")


def test_files_are_copied_without_copy_file_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    content = os.urandom(3_000_000)
    (tmp_path / "source").write_bytes(content)
    store = FileStore(tmp_path / "store")
    store.put("a", tmp_path / "source")
    assert store.get("a") == content
    monkeypatch.undo()
    store.put("b", Path("/proc/version"))
    assert store.get("b") == Path("/proc/version").read_bytes()


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        FileStore(tmp_path).put("a/b", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o644
