"""Downloads: whole or not at all, resumed after anything, and never of other bytes than described."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_store import Request, ScriptedStore

from weightcast.errors import CheckpointError, FormatError, MissingError, SpaceError, UnreachableError
from weightcast.store.base import Store
from weightcast.store.download import fetch, mark_of, sha256_of
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.store.retry import Patient

PART = 1000
CONTENT = os.urandom(10 * PART + 123)


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def holding(content: bytes) -> ScriptedStore:
    """A store with one object."""
    store = ScriptedStore()
    store.put("key", content)
    return store


def ranges_of(store: ScriptedStore) -> list[tuple[int, int]]:
    """The ranges that are asked for from now on."""
    asked: list[tuple[int, int]] = []
    store.before("get", "", lambda request: asked.append((request.start, request.length or 0)))
    return asked


def download(store: Store, path: Path, content: bytes = CONTENT, **options: Any) -> None:
    fetch(store, "key", len(content), digest_of(content), path, **{"parts": 4, "part_size": PART} | options)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 7 * PART, 9 * PART + 5])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_round_trip(tmp_path: Path, size: int, parts: int) -> None:
    content = os.urandom(size)
    store = holding(content)
    asked = ranges_of(store)
    told: list[tuple[str, int, int]] = []
    download(store, tmp_path / "out", content, parts=parts, report=lambda *what: told.append(what))
    assert (tmp_path / "out").read_bytes() == content
    assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208
    assert told[-1] == ("download", size, size)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert sum(length for _, length in asked) == size + 1, "each byte once, and one to see that it ends there"


def test_file_in_its_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    download(holding(CONTENT), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    assert sha256_of(tmp_path / "a") == digest_of(CONTENT)


@pytest.mark.parametrize("there", [1, PART, 3 * PART + 1, len(CONTENT)])
def test_partial_download_is_not_fetched_again(tmp_path: Path, there: int) -> None:
    (tmp_path / "out.partial").write_bytes(CONTENT[:there])
    store = holding(CONTENT)
    asked = ranges_of(store)
    download(store, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENT
    assert min(start for start, _ in asked) == there


@pytest.mark.parametrize("there", [b"x" * 10, b"x" * len(CONTENT), b"x" * 2 * len(CONTENT), CONTENT + b"x"])
def test_partial_download_of_another_object_is_dropped(tmp_path: Path, there: bytes) -> None:
    (tmp_path / "out.partial").write_bytes(there)
    download(holding(CONTENT), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_killed_download_resumes(tmp_path: Path) -> None:
    content = os.urandom(20_000_000)
    FileStore(tmp_path / "store").put("key", content)
    code = """
import sys, time
from pathlib import Path
from weightcast.store.file import FileStore
from weightcast.store.download import fetch
class Slow(FileStore):
    def get(self, *arguments):
        time.sleep(0.05)
        return super().get(*arguments)
fetch(Slow(sys.argv[1]), "key", 20_000_000, sys.argv[2], Path(sys.argv[3]), parts=2, part_size=100_000)
"""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-c", code, str(tmp_path / "store"), digest_of(content), str(out)]
    at = 0
    for _ in range(2):
        run = subprocess.Popen(command)
        while not partial.exists() or partial.stat().st_size <= at + 1_000_000:
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        assert not out.exists()
        at = partial.stat().st_size
        assert content.startswith(partial.read_bytes())
    store = holding(content)
    asked = ranges_of(store)
    download(store, out, content, part_size=1_000_000)
    assert out.read_bytes() == content
    assert min(start for start, _ in asked) == at


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:], "SHA-256"),
        (lambda content: content[:-1], "only 10122 bytes and should have 10123"),
        (lambda content: content[: 4 * PART], "(only|at most) 4000 bytes"),
        (lambda content: content[: 4 * PART + 7], "only 4007 bytes"),
        (lambda content: b"", "at most (0|1500) bytes"),
        (lambda content: content + b"x", "at least 10124 bytes"),
        (lambda content: content * 2, "at least 10124 bytes"),
    ],
)
@pytest.mark.parametrize("begun", [0, 1500])
def test_object_other_than_described_is_refused(tmp_path: Path, change: Any, says: str, begun: int) -> None:
    (tmp_path / "out").write_bytes(b"old")
    (tmp_path / "out.partial").write_bytes(CONTENT[:begun])
    with pytest.raises(FormatError, match=says) as caught:
        download(holding(change(CONTENT)), tmp_path / "out")
    assert caught.value.file == "memory://scripted/key"
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


def test_failing_store_leaves_a_valid_partial_download(tmp_path: Path) -> None:
    store = holding(CONTENT)
    store.fail("get", skip=3, every=4)
    tries = 0
    while not (tmp_path / "out").exists():
        tries += 1
        assert tries < 20
        try:
            download(store, tmp_path / "out", parts=2)
        except UnreachableError:
            assert CONTENT.startswith((tmp_path / "out.partial").read_bytes())
    assert tries > 2
    assert (tmp_path / "out").read_bytes() == CONTENT
    flaky = holding(CONTENT)
    flaky.fail("get", skip=2, every=3)
    download(Patient(flaky, sleep=lambda seconds: None), tmp_path / "out")


def test_missing_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        download(MemoryStore(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_disk_without_room_is_noticed_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=len(CONTENT) - 1))
    store = holding(CONTENT)
    asked = ranges_of(store)
    with pytest.raises(SpaceError, match=f"{len(CONTENT):,} bytes are needed"):
        download(store, tmp_path / "out")
    assert asked == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.partial").write_bytes(CONTENT[:1])
    download(store, tmp_path / "out")


def test_disk_that_fills_up_during_a_download_is_noticed(tmp_path: Path) -> None:
    """The kernel refuses: a limit on the size of files, as a child process has it."""
    code = """
import hashlib, resource, signal, sys
from pathlib import Path
from weightcast.errors import SpaceError
from weightcast.store.memory import MemoryStore
from weightcast.store.download import fetch
store = MemoryStore()
store.put("key", bytes(100_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    fetch(store, "key", 100_000, hashlib.sha256(bytes(100_000)).hexdigest(), Path(sys.argv[1]), part_size=7000)
except SpaceError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "disk is full" in run.stdout
    assert "Make room" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded(tmp_path: Path) -> None:
    """No part is asked for before there is room for it among those on their way."""
    ahead: list[int] = []

    def watch(request: Request) -> None:
        ahead.append(request.start - (tmp_path / "out.partial").stat().st_size)
        time.sleep(0.002)

    store = holding(CONTENT)
    store.before("get", "", watch)
    download(store, tmp_path / "out", parts=3, part_size=100)
    assert max(ahead) <= 3 * 100


def test_parts_are_loaded_at_the_same_time(tmp_path: Path) -> None:
    meeting = threading.Barrier(4, timeout=20)
    content = os.urandom(4 * PART)
    store = holding(content)
    store.before("get", "", lambda _: meeting.wait())
    download(store, tmp_path / "out", content, parts=4)


def test_bytes_are_synced_before_the_name_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        order.append("sync " + Path(f"/proc/self/fd/{fd}").readlink().name)
        real_sync(fd)

    def replace(source: Path, target: Path) -> None:
        order.append(f"rename {Path(source).name} {Path(target).name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    download(holding(CONTENT), tmp_path / "out")
    assert order == ["sync out.partial", "rename out.partial out", f"sync {tmp_path.name}"]
    order.clear()
    download(holding(CONTENT), tmp_path / "out", durable=False)
    assert order == ["rename out.partial out"]


def test_two_downloads_of_one_file_do_not_mix(tmp_path: Path) -> None:
    store = holding(CONTENT)
    held = store.hang("get")
    first = threading.Thread(target=download, args=(store, tmp_path / "out"))
    first.start()
    assert held.reached.wait(20)
    with pytest.raises(CheckpointError, match="another process is downloading"):
        download(holding(CONTENT), tmp_path / "out")
    held.end()
    first.join()
    assert (tmp_path / "out").read_bytes() == CONTENT
    download(holding(CONTENT), tmp_path / "out")


def test_mark_covers_everything_but_the_bits_of_tensors(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    weights = len(header).to_bytes(8, "little") + header + b"12"
    files = {"model.safetensors": weights, "config.json": b"{}"}

    def mark(files: dict[str, bytes]) -> str:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        return mark_of({name: tmp_path / name for name in files})

    first = mark(files)
    assert mark(files | {"model.safetensors": weights[:-2] + b"34"}) == first
    assert mark(files | {"model.safetensors": weights.replace(b"U8", b"I8")}) != first
    assert mark(files | {"model.safetensors": weights + b"3"}) != first
    assert mark(files | {"config.json": b"[]"}) != first
    assert mark({"model.safetensors": weights, "settings.json": b"{}"}) != first
    assert mark(files) == first
