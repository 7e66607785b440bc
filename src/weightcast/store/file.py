"""A folder as a bucket, on a local disk or on a file system that several machines share.

An object is written under another name in `.tmp`, synced, and then gets its own name: by `rename`, which replaces, or
by `link`, which does not. Both happen at once or not at all, and the folder is synced behind them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weightcast.errors import (
    AccessError,
    MissingError,
    SpaceError,
    StoreError,
    UnreachableError,
    UnsupportedError,
    UsageError,
    WeightcastError,
)
from weightcast.store.base import Data, Listed, check_key, check_prefix, check_range, is_key, open_data

_TEMPORARY = ".tmp"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STALE = 24 * 3600.0
_CHUNK = 64 << 20
_TRIES = 100

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FLEETING = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EIO, errno.EHOSTDOWN}
_TAKEN = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP, errno.EEXIST}


class FileStore:
    """Objects are files below ``root``. Symbolic links below it are not followed.

    The first write makes the root, unless it has been there before: one that is gone was unmounted or moved.
    """

    def __init__(self, root: Path | str):
        self._root = Path(root).absolute()
        self._swept = self._seen = False

    @property
    def url(self) -> str:
        return str(self._root)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        *folders, name = check_key(key).split("/")
        with self._reading(key), self._folder(folders) as folder:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, "not a file")
                behind = max(0, status.st_size - start)
                return _read(fd, start, behind if length is None else min(length, behind))
            finally:
                os.close(fd)

    def put(self, key: str, data: Data) -> None:
        *folders, name = check_key(key).split("/")
        with self._writing(key), self._written(data) as (temporary, where, _):
            self._enter(folders, lambda folder: os.rename(temporary, name, src_dir_fd=where, dst_dir_fd=folder))

    def create(self, key: str, data: Data) -> bool:
        *folders, name = check_key(key).split("/")
        with self._writing(key), self._written(data) as (temporary, where, fd):
            try:
                self._enter(folders, lambda folder: os.link(temporary, name, src_dir_fd=where, dst_dir_fd=folder))
            except FileExistsError:
                if (self._root / key).is_dir():
                    raise
                # A network file system may repeat a request whose answer was lost: then the name is taken by us.
                return os.fstat(fd).st_nlink > 1
            return True

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        top, _, _ = check_prefix(prefix).rpartition("/")
        return self._walk(f"{top}/" if top else "", prefix, after)

    def delete(self, key: str) -> None:
        *folders, name = check_key(key).split("/")
        with self._writing(key):
            try:
                with self._folder(folders) as folder:
                    os.unlink(name, dir_fd=folder)
                    os.fsync(folder)
                while folders:
                    *folders, name = folders
                    with self._folder(folders) as folder:
                        os.rmdir(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in _ABSENT | {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}:
                    raise

    def debris(self) -> Iterator[Listed]:
        """The files of `.tmp`: one for each upload that runs or was interrupted. Its key is its path."""
        with self._reading(None):
            try:
                with self._folder([_TEMPORARY]) as folder:
                    found = _uploads(folder)
            except FileNotFoundError:
                if not self._root.is_dir():
                    raise
                return
        for name, status in found.items():
            yield Listed(f"{_TEMPORARY}/{name}", status.st_size, status.st_mtime)

    def discard_debris(self, keys: Collection[str]) -> None:
        names = [_debris_name(key) for key in keys]
        with self._writing(None):
            try:
                with self._folder([_TEMPORARY]) as folder:
                    for name in names:
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=folder)
                    os.fsync(folder)
            except FileNotFoundError:
                return  # no folder: no debris

    @contextmanager
    def _folder(self, names: Sequence[str], make: bool = False) -> Iterator[int]:
        """A folder below the root, opened name by name, so that no link leads out."""
        fd = os.open(self._root, _FOLDER)
        self._seen = True
        try:
            for name in names:
                inner = _open_folder(name, fd, make)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _enter(self, folders: Sequence[str], enter: Callable[[int], None]) -> None:
        """Give a file its name in a folder, durably. The folder is made again if a `delete` took it for deserted."""
        for tried in range(_TRIES):
            try:
                with self._folder(folders, make=True) as folder:
                    enter(folder)
                    os.fsync(folder)
                    return
            except FileNotFoundError:
                if tried == _TRIES - 1:
                    raise

    @contextmanager
    def _written(self, data: Data) -> Iterator[tuple[str, int, int]]:
        """A synced temporary file: its name, the folder it is in, and itself. It is gone afterwards."""
        if self._seen and not self._root.is_dir():
            hint = "Mount it again, or put it back."
            raise MissingError("the folder is gone", url=self.url, hint=hint)
        _make_folders(self._root)
        with self._folder([_TEMPORARY], make=True) as folder:
            self._sweep(folder)
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o666, dir_fd=folder)
            try:
                _write(fd, data)
                os.fsync(fd)
                yield name, folder, fd
            finally:
                os.close(fd)
                with suppress(FileNotFoundError):  # renamed
                    os.unlink(name, dir_fd=folder)

    def _sweep(self, folder: int) -> None:
        """Remove what writers that died long ago left behind."""
        if self._swept:
            return
        self._swept = True
        for name in os.listdir(folder):
            try:
                if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE:
                    os.unlink(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in _ABSENT | _FORBIDDEN:
                    raise

    def _walk(self, top: str, prefix: str, after: str) -> Iterator[Listed]:
        """Objects below ``top``, which is empty or ends with `/`."""
        with self._reading(None):
            try:
                names = self._names(top)
            except (FileNotFoundError, NotADirectoryError):
                if top and self._root.is_dir():
                    return
                raise
        for name in names:
            key = top + name
            if name.endswith("/"):
                # Below a folder, all keys sort as it does unless `after` lies in it.
                if (key.startswith(prefix) or prefix.startswith(key)) and (key > after or after.startswith(key)):
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after:
                listed = self._listed(key)
                if listed:
                    yield listed

    def _names(self, top: str) -> Sequence[str]:
        """Files and folders in the order of the keys that begin with them: a folder's name ends with `/`."""
        with self._folder(top.split("/")[:-1]) as folder, os.scandir(folder) as entries:
            return sorted(
                entry.name + "/" * entry.is_dir(follow_symlinks=False)
                for entry in entries
                if is_key(entry.name) and not entry.is_symlink()
            )

    def _listed(self, key: str) -> Listed | None:
        with self._reading(key):
            try:
                status = os.lstat(self._root / key)
            except FileNotFoundError:
                return None  # deleted meanwhile
        return Listed(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    @contextmanager
    def _reading(self, key: str | None) -> Iterator[None]:
        try:
            yield
        except WeightcastError:
            raise
        except OSError as error:
            if error.errno not in _ABSENT:
                raise _translated(error, self.url, key) from error
            if self._root.is_dir():
                raise MissingError("no such object", url=self.url, key=key) from None
            hint = "Check the path; whoever publishes makes the folder."
            raise MissingError("the folder does not exist", url=self.url, hint=hint) from None

    @contextmanager
    def _writing(self, key: str | None) -> Iterator[None]:
        try:
            yield
        except WeightcastError:
            raise
        except OSError as error:
            raise _translated(error, self.url, key) from error


def _translated(error: OSError, url: str, key: str | None) -> WeightcastError:
    code = error.errno
    if code in _FULL:
        hint = "Make room there, or name another place."
        return SpaceError(f"the store's disk is full: {error.strerror}", file=f"{url}/{key}", hint=hint)
    if code in _FORBIDDEN:
        hint = "Check who owns the folder, and how it is mounted."
        return AccessError(f"the file system refuses it: {error.strerror}", url=url, key=key, hint=hint)
    if code in _FLEETING:
        return UnreachableError(f"the file system fails: {error.strerror}", url=url, key=key)
    if code in _TAKEN:
        hint = "In a folder, `a` and `a/b` cannot both be objects."
        return StoreError(f"something else is in the object's place: {error.strerror}", url=url, key=key, hint=hint)
    if code in {errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}:
        hint = "Take a file system with hard links, or an object store."
        return UnsupportedError(f"the file system cannot do it: {error.strerror}", url=url, key=key, hint=hint)
    return StoreError(f"the file system fails: {error.strerror or error}", url=url, key=key)


def _uploads(folder: int) -> dict[str, os.stat_result]:
    """Uploads in `.tmp`, running and abandoned ones; hidden names are the file system's own."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # finished meanwhile
                if is_key(entry.name) and entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def _debris_name(key: str) -> str:
    """The name in `.tmp` of an unfinished upload."""
    folder, _, name = key.rpartition("/")
    if folder != _TEMPORARY or not is_key(name):
        raise UsageError(f"not the key of an unfinished upload: {key[:100]!r}", hint="Take the keys from `debris`.")
    return name


def _open_folder(name: str, parent: int, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # somebody else was faster
        os.mkdir(name, dir_fd=parent)
    os.fsync(parent)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _make_folders(folder: Path) -> None:
    """Make a folder and those it lies in, durably."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    parent = os.open(folder.parent, _FOLDER)
    try:
        os.close(_open_folder(folder.name, parent, make=True))
    finally:
        os.close(parent)


def _read(fd: int, start: int, length: int) -> bytes:
    first = os.pread(fd, length, start)
    if len(first) == length:
        return first
    parts = [first]
    while parts[-1]:
        done = sum(map(len, parts))
        parts.append(os.pread(fd, length - done, start + done))
    return b"".join(parts)


def _write(fd: int, data: Data) -> None:
    if isinstance(data, Path):
        with open_data(data) as source:
            _copy(source.fileno(), fd)
        return
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + _CHUNK])


def _copy(source: int, target: int) -> None:
    """Copy within the kernel: sharing blocks where the file system can, through the page cache where it cannot."""
    try:
        while os.copy_file_range(source, target, _CHUNK):
            pass
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EPERM}:
            raise
    while os.sendfile(target, source, None, _CHUNK):  # also what is left of a file that says it is empty, as in /proc
        pass
