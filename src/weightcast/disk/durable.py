"""Files that appear whole and durable, or not at all; locks; free space."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from weightcast.errors import BusyError, CheckpointError, SpaceError, WeightcastError

Report = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all) as the work proceeds."""


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


Enter = Callable[[str], None]
"""Called with each phase of the work as it begins."""


def untimed(phase: str) -> None:
    """Time nothing."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name whole and durable, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.absolute().parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's own entries durable."""
    sync(folder, os.O_DIRECTORY)


def sync(path: Path, flags: int = os.O_NOFOLLOW) -> None:
    """Make a file's content, or a folder's own entries, durable."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_mark(path: Path) -> None:
    """Create an empty file, durably."""
    with replacing(path):
        pass


def remove(path: Path) -> None:
    """Remove a file, durably, if it exists."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def require_space(folder: Path, nbytes: int) -> None:
    """`SpaceError` unless the disk of ``folder`` has room for ``nbytes`` more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise SpaceError(
            f"{nbytes:,} bytes are needed, {free:,} are free", file=str(folder), hint="Make room and try again."
        )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def space_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk into `SpaceError`; all others pass through.

    For code that also uses the network, or whose caller must tell a failing disk from a damaged object.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, SpaceError) or error.errno not in _FULL:
            raise
        raise SpaceError("the disk is full", file=str(path), hint="Make room and try again.") from error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the local disk into `SpaceError` or `CheckpointError`, with the file and the remedy."""
    try:
        with space_errors(path):
            yield
    except OSError as error:
        if isinstance(error, (WeightcastError, ConnectionError)):
            raise
        problem = f"the system refused an operation: {error.strerror or error}"
        file = error.filename if isinstance(error.filename, str) else str(path)
        hint = "Check the disk, the folder's permissions and its quota, then try again."
        raise CheckpointError(problem, file=file, hint=hint) from error


def own_copy(path: Path, workshop: Path) -> bool:
    """Replace ``path`` by a copy of its own, durably, if it has other hard links; returns whether it had.

    A folder made by `cp -al` shares its files with the original: writing to one would change both.
    """
    if path.lstat().st_nlink == 1:
        return False
    require_space(workshop, path.lstat().st_size)
    copy = workshop / f".{path.name}.copy"
    try:
        shutil.copyfile(path, copy, follow_symlinks=False)
        shutil.copystat(path, copy, follow_symlinks=False)
        sync(copy)
        copy.replace(path)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    sync_folder(path.absolute().parent)
    return True


def discard(path: Path) -> None:
    """Remove a file, or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(
    path: Path, *, shared: bool = False, patience: float | None = None, holder: str = "another process"
) -> Iterator[None]:
    """Hold the lock file ``path``, exclusively or shared. The lock is also released when the process dies.

    `BusyError` if ``holder`` does not release it within ``patience`` seconds; None waits without limit.
    """
    # Readers may be on another machine that mounts the folder read-only.
    flags = os.O_RDONLY if shared and path.exists() else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if not _acquire(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, patience):
            waited = f" and did not finish within {patience:g} s" if patience else ""
            hint = "Wait until it has finished, or use another folder."
            raise BusyError(f"{holder} is using this folder{waited}", file=str(path.parent), hint=hint)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the lock, too
    finally:
        os.close(fd)


def _acquire(fd: int, kind: int, patience: float | None) -> bool:
    """Whether the lock was acquired. `flock` has no time limit, so it is polled."""
    if patience is None:
        fcntl.flock(fd, kind)
        return True
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_RETRY)
        else:
            return True


_LOCK_RETRY = 0.02
"""Seconds between two attempts at a lock."""

_SCRATCH = "weightcast-"


@contextmanager
def scratch(place: Path | None = None) -> Iterator[Path]:
    """A temporary folder in ``place``, or in the system's, that is removed afterwards.

    The folders of dead processes are removed first. Each may be as large as a model: a process that is killed at every
    start would fill the disk.
    """
    for left in Path(place or tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError, CheckpointError):  # folders of other users, and processes that do the same
            if left.lstat().st_uid == os.getuid() and (left / "owner").is_file():
                with locked(left / "owner", patience=0):
                    shutil.rmtree(left)
    # The folder gets the name that others look for only once it is locked: none takes it for a dead process's.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}", dir=place))
    folder = unlocked.with_name(unlocked.name.removeprefix("."))
    with space_errors(folder), locked(unlocked / "owner", patience=0):
        unlocked.rename(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
