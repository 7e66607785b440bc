"""Downloads: in parallel ranges, appended in order, so that a partial file is always a prefix of the whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weightcast.disk.durable import Report, require_space, silent, space_errors, sync_folder
from weightcast.errors import CheckpointError, FormatError, SpaceError
from weightcast.store.base import Data, Store
from weightcast.store.threads import Outcome, begin

MIB = 1 << 20

_DAMAGED = "The object is damaged, or is not the one that was published: publish it again."


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def summary(data: Data) -> tuple[str, int]:
    """SHA-256 and size."""
    if isinstance(data, Path):
        return sha256_of(data), data.stat().st_size
    return hashlib.sha256(data).hexdigest(), len(data)


def summed(files: Mapping[str, Path]) -> dict[str, tuple[str, int]]:
    """SHA-256 and size of all files, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(files, pool.map(summary, files.values()), strict=True))


def mark_of(files: Mapping[str, Path]) -> str:
    """A SHA-256 over a checkpoint's files, without the bits of their tensors.

    Together with the digest of the weights it identifies the files, without reading gigabytes first.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            opening = 8 + int.from_bytes(file.read(8), "little") if name.endswith(".safetensors") else size
            file.seek(0)
            content = hashlib.sha256(file.read(min(opening, size))).hexdigest()
        digest.update(f"{json.dumps(name)} {size} {content}\n".encode())
    return digest.hexdigest()


def fetch(
    store: Store,
    key: str,
    size: int,
    sha256: str,
    path: Path,
    *,
    parts: int = 8,
    part_size: int = 16 * MIB,
    durable: bool = True,
    report: Report = silent,
) -> None:
    """Download an object of known ``size`` and SHA-256 to ``path``, which appears whole or not at all.

    The bytes are collected in a file beside it; after a kill or an error of the store the next call continues there.
    At most ``parts`` × ``part_size`` bytes are held in memory. `FormatError`: the object is not the one described.
    """
    gathered = path.with_name(f"{path.name}.partial")
    fd = _open_alone(gathered)
    try:
        _complete(fd, path, _Download(store, key, size, parts, part_size, report), sha256)
        if durable:
            with space_errors(path):
                os.fsync(fd)
        gathered.replace(path)
    except (FormatError, SpaceError):
        gathered.unlink()
        raise
    finally:
        os.close(fd)
    if durable:
        sync_folder(path.absolute().parent)


def _open_alone(gathered: Path) -> int:
    """The partial file, open and locked."""
    while True:
        fd = os.open(gathered, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            hint = "Wait until it is done and try again."
            raise CheckpointError("another process is downloading this file", file=str(gathered), hint=hint) from None
        if _is(fd, gathered):
            return fd
        os.close(fd)  # another process has finished the download


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _complete(fd: int, path: Path, download: _Download, sha256: str) -> None:
    """Complete the partial file; from the start, if what it holds is not the beginning of this object."""
    found = os.fstat(fd).st_size
    digest = ""
    for start in (found, 0) if 0 < found <= download.size else (0,):
        os.ftruncate(fd, start)
        require_space(path.absolute().parent, download.size - start)
        with space_errors(path):
            digest = download.append(fd, start)
        if digest == sha256:
            return
    problem = f"the object's SHA-256 is {digest} and should be {sha256}"
    raise FormatError(problem, file=download.name, hint=_DAMAGED)


@dataclass(frozen=True)
class _Download:
    """An object of known size, to be read range by range."""

    store: Store
    key: str
    size: int
    parts: int
    part_size: int
    report: Report

    @property
    def name(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.key}"

    def append(self, fd: int, start: int) -> str:
        """Append the bytes from ``start`` on to a file that holds the earlier ones; returns the SHA-256 of all."""
        with open(fd, "rb", buffering=0, closefd=False) as file:
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")
        done = start
        for data in self._in_order(start):
            digest.update(data)
            _write(fd, data)
            done += len(data)
            self.report("download", done, self.size)
        return digest.hexdigest()

    def _in_order(self, start: int) -> Iterator[bytes]:
        """The object's parts from ``start`` on; while one is processed, the next are downloaded."""
        begun: deque[tuple[int, Outcome[bytes]]] = deque()
        for at in range(start, max(self.size, start + 1), self.part_size):
            begun.append((at, begin(partial(self._part, at))))
            if len(begun) == self.parts:
                yield self._checked(*begun.popleft())
        while begun:
            yield self._checked(*begun.popleft())

    def _part(self, at: int) -> bytes:
        """A part's bytes. One byte more is requested of the last part: it shows whether the object is too long."""
        left = self.size - at
        return self.store.get(self.key, at, self.part_size if left > self.part_size else left + 1)

    def _checked(self, at: int, outcome: Outcome[bytes]) -> bytes:
        outcome.wait()
        data = outcome.result()
        expected = min(self.part_size, self.size - at)
        if len(data) != expected:
            found = f"{'at least' if len(data) > expected else 'only' if data else 'at most'} {at + len(data)}"
            problem = f"the object has {found} bytes and should have {self.size}"
            raise FormatError(problem, file=self.name, hint=_DAMAGED)
        return data


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
