"""A folder as a bucket, on a local disk or on a file system that several machines share.

An object is written under a temporary name in `.tmp`, synced, and then renamed: by a rename that replaces, or by
`name_exclusively`, which does not. Both are atomic, and the folder is synced afterwards.

A writer that dies leaves its file in `.tmp`. Its age is measured by the file system's own clock, since hosts that share
a folder may disagree about the time by days; a running upload keeps its file young.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from weightcast.store.rename import name_exclusively

_TEMPORARY = ".tmp"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STALE = 24 * 3600.0
"""Seconds after which a temporary file counts as abandoned."""

_CHUNK = 64 << 20

SYNC_EVERY = 1 << 30
"""Bytes after which an upload is synced: a file ages during a sync, and this many take minutes."""

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

    def __init__(self, root: Path | str, *, sync_every: int = SYNC_EVERY):
        self._root = _checked_root(Path(root))
        self._sync_every = sync_every
        self._swept = self._seen = False

    @property
    def url(self) -> str:
        return str(self._root)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        *folders, name = check_key(key).split("/")
        with self._errors(key, reading=True), self._folder(folders) as folder:

            def opener(name: str, flags: int) -> int:
                return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

            with open(name, "rb", opener=opener) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, "not a file")
                left = max(0, status.st_size - start)
                file.seek(min(start, status.st_size))
                return file.read(left if length is None else min(length, left))

    def put(self, key: str, data: Data) -> None:
        self._store(key, data, _Upload.replace)

    def create(self, key: str, data: Data) -> bool:
        return self._store(key, data, _Upload.create)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        top, _, _ = check_prefix(prefix, after).rpartition("/")
        return self._walk(f"{top}/" if top else "", prefix, after)

    def delete(self, key: str) -> None:
        *folders, name = check_key(key).split("/")
        with self._errors(key):
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
        with self._errors(None, reading=True):
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
        with self._errors(None):
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

    def _store(self, key: str, data: Data, enter: Callable[[_Upload, str, int], bool]) -> bool:
        """Write a temporary file and give it its name in its folder by ``enter``, durably."""
        *folders, name = check_key(key).split("/")
        with self._errors(key), self._written(data, key) as upload:
            for _ in range(_TRIES):
                try:
                    with self._folder(folders, make=True) as folder:
                        entered = enter(upload, name, folder)
                        os.fsync(folder)
                        return entered
                except FileNotFoundError:  # a `delete` removed the folder as empty: it is made again
                    if upload.is_gone():
                        raise self._removed(key) from None
        problem, hint = "another process keeps removing the object's folder", "Check what deletes there."
        raise UnreachableError(problem, url=self.url, key=key, hint=hint)

    @contextmanager
    def _written(self, data: Data, key: str) -> Iterator[_Upload]:
        """A synced temporary file, which is removed afterwards."""
        if self._seen and not self._root.is_dir():
            hint = "Mount or restore it."
            raise MissingError("the folder is gone", url=self.url, hint=hint)
        _make_folders(self._root)
        with self._folder([_TEMPORARY], make=True) as folder:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            upload = _Upload(self.url, name, folder, os.open(name, flags, 0o666, dir_fd=folder))
            try:
                self._sweep(upload)
                upload.write(data, self._sync_every)
                os.fsync(upload.fd)
                yield upload
            except OSError as error:
                if error.errno == errno.ESTALE and upload.is_gone():  # as NFS reports it
                    raise self._removed(key) from error
                raise
            finally:
                os.close(upload.fd)
                with suppress(FileNotFoundError):  # renamed
                    os.unlink(name, dir_fd=folder)

    def _sweep(self, upload: _Upload) -> None:
        """Remove files of writers that died long ago, by the age that they had when this ``upload`` began."""
        if self._swept:
            return
        self._swept = True
        now = os.fstat(upload.fd).st_mtime
        for name, status in _uploads(upload.folder).items():
            if now - status.st_mtime > _STALE:
                try:
                    os.unlink(name, dir_fd=upload.folder)
                except OSError as error:
                    if error.errno not in _ABSENT | _FORBIDDEN:
                        raise

    def _removed(self, key: str) -> UnreachableError:
        problem = f"another process removed the upload's temporary file from {_TEMPORARY} while it was written"
        hint = (
            f"Check what cleans up in {self._root / _TEMPORARY}, a `reset` or `gc` of the channel included; try again."
        )
        return UnreachableError(problem, url=self.url, key=key, hint=hint)

    def _walk(self, top: str, prefix: str, after: str) -> Iterator[Listed]:
        """Objects below ``top``, which is empty or ends with `/`."""
        with self._errors(None, reading=True):
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
        """Files and folders in the order of the keys that begin with them: a folder's name ends with `/`.

        Folders nested too deep for a key are left out, so that they cannot exhaust the stack of the walk.
        """
        with self._folder(top.split("/")[:-1]) as folder, os.scandir(folder) as entries:
            return sorted(
                entry.name + "/" * entry.is_dir(follow_symlinks=False)
                for entry in entries
                if is_key(top + entry.name) and not entry.is_symlink()
            )

    def _listed(self, key: str) -> Listed | None:
        with self._errors(key, reading=True):
            try:
                status = os.lstat(self._root / key)
            except FileNotFoundError:
                return None  # deleted since it was listed
        return Listed(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    @contextmanager
    def _errors(self, key: str | None, *, reading: bool = False) -> Iterator[None]:
        """Errors of the system become ours. In ``reading``, what is not there is a `MissingError`."""
        try:
            yield
        except WeightcastError:
            raise
        except OSError as error:
            if not reading or error.errno not in _ABSENT:
                raise _translated(error, self.url, key) from error
            if self._root.is_dir():
                raise MissingError("no such object", url=self.url, key=key) from None
            hint = "Check the path; the publisher creates the folder."
            raise MissingError("the folder does not exist", url=self.url, hint=hint) from None


def _checked_root(root: Path) -> Path:
    try:
        if b"\0" not in os.fsencode(root):
            return root.absolute()
    except UnicodeEncodeError:
        pass  # half of a surrogate pair
    raise UsageError(f"not the path of a folder: {str(root)[:100]!a}", hint="Check the path's characters.")


def _translated(error: OSError, url: str, key: str | None) -> WeightcastError:
    code = error.errno
    if code in _FULL:
        hint = "Free some space there, or use another folder."
        return SpaceError(f"the store's disk is full: {error.strerror}", file=f"{url}/{key}", hint=hint)
    if code in _FORBIDDEN:
        hint = "Check the folder's owner and permissions, and how it is mounted."
        return AccessError(f"the file system refused access: {error.strerror}", url=url, key=key, hint=hint)
    if code in _FLEETING:
        return UnreachableError(f"the file system failed: {error.strerror}", url=url, key=key)
    if code in _TAKEN:
        hint = "In a folder, `a` and `a/b` cannot both be objects."
        return StoreError(f"something else has the object's name: {error.strerror}", url=url, key=key, hint=hint)
    if code in {errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}:
        hint = "Use a folder on a local disk or on NFS, or an object store."
        return UnsupportedError(f"the file system does not support this: {error.strerror}", url=url, key=key, hint=hint)
    return StoreError(f"the file system failed: {error.strerror or error}", url=url, key=key)


@dataclass(frozen=True)
class _Upload:
    """A temporary file of the store at ``url``: its name, the folder it is in, and itself."""

    url: str
    name: str
    folder: int
    fd: int

    def replace(self, name: str, folder: int) -> bool:
        """Give it this name, which may be taken."""
        os.rename(self.name, name, src_dir_fd=self.folder, dst_dir_fd=folder)
        return True

    def create(self, name: str, folder: int) -> bool:
        """Give it this name unless it is taken."""
        try:
            name_exclusively(self.name, self.folder, name, folder, self.url)
        except FileExistsError:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                raise
            # A network file system may repeat a request whose answer was lost: then the name is taken by us.
            return os.path.samestat(os.fstat(self.fd), status)
        return True

    def is_gone(self) -> bool:
        """Whether nothing has the file's temporary name any more."""
        try:
            os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def write(self, data: Data, sync_every: int) -> None:
        """Write all of ``data``. Each write makes the file young, and a sync never has much to write."""
        unsynced = 0
        for nbytes in _written_chunks(self.fd, data, min(_CHUNK, sync_every)):
            unsynced += nbytes
            if unsynced >= sync_every:
                os.fdatasync(self.fd)
                unsynced = 0


def _uploads(folder: int) -> dict[str, os.stat_result]:
    """Uploads in `.tmp`, running and abandoned ones; hidden names are the file system's own."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # finished since it was listed
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
    with suppress(FileExistsError):  # another process was faster
        os.mkdir(name, dir_fd=parent)
    os.fsync(parent)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _make_folders(folder: Path) -> None:
    """Make a folder and its parents, durably."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    parent = os.open(folder.parent, _FOLDER)
    try:
        os.close(_open_folder(folder.name, parent, make=True))
    finally:
        os.close(parent)


def _written_chunks(fd: int, data: Data, size: int) -> Iterator[int]:
    """Write chunk by chunk; yields how many bytes each had."""
    if isinstance(data, Path):
        with open_data(data) as source:
            yield from _copied_chunks(source.fileno(), fd, size)
        return
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        nbytes = os.write(fd, view[done : done + size])
        done += nbytes
        yield nbytes


def _copied_chunks(source: int, target: int, size: int) -> Iterator[int]:
    """Copy within the kernel: sharing blocks where the file system can, through the page cache where it cannot."""
    try:
        while nbytes := os.copy_file_range(source, target, size):
            yield nbytes
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EPERM}:
            raise
    # Also for files that claim to be empty, as in /proc.
    while nbytes := os.sendfile(target, source, None, size):
        yield nbytes
