"""The folder of a mirror: its layout, its one owner, the lock between readers and writer, and where it is by default.

FOLDER/*.safetensors, config.json, …    the checkpoint at the *folded* version, for any tool to load
FOLDER/.weightcast/position.json        which version that is, with the digest of every tensor
FOLDER/.weightcast/log/                 staged patches that lead on from there: the redo log
FOLDER/.weightcast/history/             patches that lead back over the last versions folded; a cache
FOLDER/.weightcast/lock                 held shared by readers of the files, exclusively while they change
FOLDER/.weightcast/changing             there while the files change, or are wrong: they must not be loaded
FOLDER/.weightcast/install.json         there while a new anchor's files (anchor/) and log (ahead/) are moved in
FOLDER/.weightcast/staged, incoming     the next update while it is prepared; downloads can be resumed
FOLDER/.weightcast/owner                held by the one process that keeps this mirror
FOLDER/.weightcast/ran.json             the newest version for which the command of `pull --exec` succeeded, or that an
                                        engine which reloads the folder has loaded
FOLDER/.weightcast/loading              there while such an engine loads the files, or may still do so
FOLDER/.weightcast/instance             the last process that reported to the bucket from here
FOLDER/.weightcast/trust.json           the key that is trusted here, and what was seen of its channel
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from weightcast.channel.keys import is_channel_id
from weightcast.disk.checkpoint import CHANGING, MIRROR
from weightcast.disk.durable import discard, locked, remove, sync_folder, write_mark
from weightcast.errors import BusyError, UsageError

_CHECK = 5.0
"""Seconds to wait for processes that only check whether a mirror has an owner: they are done in a moment."""


class MirrorFolder:
    """Paths and locks of one mirror."""

    def __init__(self, path: Path):
        self.path = path
        self.inner = path / MIRROR
        self.position = self.inner / "position.json"
        self.log = self.inner / "log"
        self.history = self.inner / "history"
        self._lock = self.inner / "lock"
        self.changing = self.inner / CHANGING
        self.install = self.inner / "install.json"
        self.new_files = self.inner / "anchor"
        self.new_log = self.inner / "ahead"
        self.staged = self.inner / "staged"
        self.incoming = self.inner / "incoming"
        self._owner = self.inner / "owner"
        self.ran = self.inner / "ran.json"
        self.loading = self.inner / "loading"
        self.instance = self.inner / "instance"
        self.trust = self.inner / "trust.json"
        self._made: list[Path] = []
        self._exclusive_in: int | None = None
        """The thread that holds the readers' lock exclusively."""

    # -- make and remove -----------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Create what is missing; `UsageError` where a mirror cannot be."""
        self._made = []
        if not self.path.exists() and not self.path.is_symlink():
            if not self.path.absolute().parent.is_dir():
                raise UsageError("the folder above it does not exist", file=str(self.path), hint="Create it first.")
            self.path.mkdir()
            sync_folder(self.path.absolute().parent)
            self._made.append(self.path)
        _refuse_strange_folder(self.path)
        if not self.inner.exists():
            self.inner.mkdir()
            self._made.append(self.inner)
        for part in (self.log, self.staged, self.incoming):
            part.mkdir(exist_ok=True)
        sync_folder(self.inner)
        sync_folder(self.path)

    @property
    def has_version(self) -> bool:
        """Whether the mirror holds a version, or is about to."""
        return self.position.exists() or self.install.exists()

    def sweep(self) -> None:
        """Delete what a killed process left and no later one uses."""
        keep = {self.position, self.log, self.history, self._lock, self.changing, self.install}
        keep |= {self.staged, self.incoming, self._owner, self.ran, self.loading, self.instance, self.trust}
        if self.install.exists():
            keep |= {self.new_files, self.new_log}
        for path in {*self.inner.iterdir(), *self.staged.iterdir()} - keep:
            discard(path)

    def keep_files(self) -> None:
        """Leave the folder's files alone when a mirror without a version is removed: another program made them."""
        self._made = [self.inner]

    def remove_if_unused(self) -> None:
        """Remove what `make` created unless the mirror got a version, or a download that can be resumed."""
        if not self.has_version and not any(self.incoming.glob("*")):
            for path in reversed(self._made):
                discard(path)

    # -- locks ---------------------------------------------------------------------------------------------------------

    @property
    def is_owned(self) -> bool:
        """Whether a process keeps this mirror. One that starts at this moment waits for the check."""
        try:
            with locked(self._owner, shared=True, patience=0) if self._owner.exists() else nullcontext():
                return False
        except BusyError:
            return True

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Be the one process that keeps this mirror; `BusyError` if another one does."""
        self._part_from_original()
        patience = 0.0 if self.is_owned else _CHECK
        with locked(self._owner, patience=patience, holder="another follower of this mirror"):
            if self._owner.read_bytes() != self._identity():
                self._owner.write_bytes(self._identity())
            yield

    def _identity(self) -> bytes:
        """Written to the lock file, so that a copy of the folder by hard links is noticed."""
        status = self.inner.stat()
        return f"{status.st_dev}:{status.st_ino}".encode()

    def _part_from_original(self) -> None:
        """In a copy by hard links (`cp -al`), remove the lock files that are the original's."""
        if not self._owner.exists() or self._owner.lstat().st_nlink == 1:
            return
        if self._owner.read_bytes() in (b"", self._identity()):
            return  # this is the original
        self._owner.unlink()
        # Readers of either folder may hold the shared lock, and must keep it.
        with suppress(BusyError, FileNotFoundError), locked(self._lock, patience=0):
            self._lock.unlink()

    @contextmanager
    def exclusive(self, patience: float) -> Iterator[None]:
        """Hold the readers' lock exclusively; code inside may ask for it again, other threads wait as readers do.

        `BusyError` if readers keep it for longer than ``patience`` seconds.
        """
        if self._exclusive_in == threading.get_ident():
            yield
            return
        with self.shut(patience):
            self._exclusive_in = threading.get_ident()
            try:
                yield
            finally:
                self._exclusive_in = None

    def shut(self, patience: float) -> AbstractContextManager[None]:
        """As `exclusive`, for a lock that another thread releases: nobody has it again meanwhile."""
        return locked(self._lock, patience=patience, holder="a reader of the mirror's files")

    def shared(self) -> AbstractContextManager[None]:
        """Hold the readers' lock: the files do not change meanwhile."""
        return locked(self._lock, shared=True)

    # -- the mark ------------------------------------------------------------------------------------------------------

    @property
    def is_changing(self) -> bool:
        """Whether the files are being written, or were when a process was killed, or are wrong: do not load them."""
        return self.changing.exists()

    def mark(self) -> None:
        write_mark(self.changing)

    def unmark(self) -> None:
        if self.is_changing:
            remove(self.changing)


def _refuse_strange_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError("a mirror needs a folder", file=str(folder), hint="Name a folder, or one that can be created.")
    names = {path.name for path in folder.iterdir()}
    if names and MIRROR not in names and not any(name.endswith(".safetensors") for name in names):
        hint = "Name an empty folder, one with a checkpoint, or one that can be created."
        raise UsageError("the folder is neither empty nor a checkpoint", file=str(folder), hint=hint)


def cache_folder() -> Path:
    """Where this user's mirrors are by default; it is created."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "weightcast"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def default_mirror(channel: str) -> Path:
    """The mirror of the channel with this id in the user's cache."""
    if not is_channel_id(channel):  # it becomes a path: nothing may lead out of the cache
        raise UsageError(f"{channel[:100]!r} is not the id of a channel", hint="An id is 32 hexadecimal digits.")
    return cache_folder() / channel
