"""Give a file a name that is not taken, atomically.

A hard link does that on nearly every file system. Where there are none (FAT, exFAT, some FUSE and SMB mounts), Linux
has a rename that refuses to replace. Nothing else is safe: a lock file either blocks the name forever if its owner
dies, or others break the lock, and then an owner that was only slow replaces what they created.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

from weightcast.errors import UnsupportedError

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_EXCLUSIVE_RENAME = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_RENAME_NOREPLACE = 1


def name_exclusively(source: str, source_folder: int, target: str, target_folder: int, url: str) -> None:
    """Give ``source`` the name ``target``; it may keep its old name too. `FileExistsError` if the name is taken.

    Folders are file descriptors. `UnsupportedError`: the file system at ``url`` has no operation that does this.
    """
    try:
        os.link(source, target, src_dir_fd=source_folder, dst_dir_fd=target_folder)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refused = error
    try:
        rename_exclusively(source, source_folder, target, target_folder)
    except OSError as error:
        if error.errno not in _NO_EXCLUSIVE_RENAME:
            raise  # EPERM from `link` may be about permissions: then this error says so
        problem = f"the file system has neither hard links ({refused.strerror}) nor a rename that does not replace"
        hint = "Use a folder on a local disk, on NFS or another file system with hard links, or an object store."
        raise UnsupportedError(f"{problem}, so it cannot keep writers apart", url=url, hint=hint) from error


def rename_exclusively(source: str, source_folder: int, target: str, target_folder: int) -> None:
    """Rename a file unless the new name is taken: `FileExistsError`. ENOSYS where the system knows no such call."""
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(source_folder, os.fsencode(source), target_folder, os.fsencode(target), _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _renameat2() -> Any:
    """The C library's `renameat2`; None if it is missing."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return function
