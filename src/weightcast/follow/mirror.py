"""A mirror: a Hugging Face checkpoint folder that is kept at a channel's versions, and survives a kill at any moment.

    FOLDER/*.safetensors, config.json, …    the checkpoint at the *folded* version, for any tool to load
    FOLDER/.weightcast/position.json        which version that is, with the digest of every tensor
    FOLDER/.weightcast/log/                 staged patches that lead on from there: the redo log
    FOLDER/.weightcast/history/             patches that lead back over the last versions folded; a cache
    FOLDER/.weightcast/lock                 held shared by readers of the files, alone by who changes them
    FOLDER/.weightcast/changing             there while the files change, or are wrong: they must not be loaded
    FOLDER/.weightcast/install.json         there while a new anchor's files (anchor/) and log (ahead/) are moved in
    FOLDER/.weightcast/owner                held by the one process that keeps this mirror
    FOLDER/.weightcast/ran.json             the newest version for which the command of `pull --exec` succeeded
    FOLDER/.weightcast/instance             the last process that reported to the bucket from here

One step of training touches nearly every page of the files, so they are not written for every version: a version is
taken by adding its patch to the log, which is synced. Now and then the log is *folded* into the files. The log holds
absolute bits and is removed only after the files are synced, so an interrupted fold is simply done again.

A kill leaves all that was written, a loss of power what was synced; the one order of writing and syncing serves both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from weightcast.channel.keys import Position, is_channel_id
from weightcast.disk.checkpoint import CHANGING, INDEX, MIRROR, Checkpoint, redo_path
from weightcast.disk.durable import (
    Report,
    discard,
    disk_errors,
    locked,
    own_copy,
    remove,
    silent,
    sync_folder,
    write_mark,
)
from weightcast.disk.staged import Overlay, fingerprint_of, stage
from weightcast.errors import BusyError, CheckpointError, FormatError, MismatchError, UsageError, WeightcastError
from weightcast.follow.history import History, Undo
from weightcast.follow.holder import Staged, StagedPatch, position_of
from weightcast.follow.redo import (
    FileTimes,
    Folded,
    RedoLog,
    log_name,
    make_folders,
    read_folded,
    read_log_name,
    write_folded,
)
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint, tensor_digest
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers

POSITION, INSTALL = "position.json", "install.json"
RAN, INSTANCE = "ran.json", "instance"
_OWN = {POSITION, INSTALL, CHANGING, RAN, INSTANCE, "history", "log", "staged", "incoming", "lock", "owner"}

_EDITED = "Pull again: it is put right from the channel."

FOLD_EVERY = 8
"""Versions in the log before they are folded; a reader that holds the lock delays it, and the log grows meanwhile."""

PATIENCE = 30.0
"""Seconds that whoever must change the files waits for readers, before it gives up with a `BusyError`."""

_READERS = "whoever reads the mirror's files"


class Mirror:
    """A folder that follows a channel; a `Holder`, and its weights as of the newest version taken."""

    def __init__(
        self,
        folder: Path | str,
        channel: str,
        table: TensorTable,
        workers: Workers = ONE,
        report: Report = silent,
        *,
        url: str = "",
    ):
        """Open, make or adopt ``folder``; what an interruption left undone is done first.

        A folder that is neither empty nor a checkpoint of this table is refused, and so is a mirror of another channel
        elsewhere. One of another channel at the same ``url`` goes on: there it was started over.
        """
        self._url = url.encode("utf-8", "backslashreplace").decode()  # a path need not be UTF-8, a record must
        self.folder = Path(folder)
        self.channel, self.table = channel, table
        self._workers, self._report = workers, report
        self._inner = self.folder / MIRROR
        self._log = RedoLog(self._inner / "log")
        self._history = History(self._inner / "history", table)
        self._files: Checkpoint | None = None
        self._folded: Folded | None = None
        self.version: int | None = None
        self.fingerprint: Fingerprint | None = None
        self._is_alone = False
        with disk_errors(self.folder):
            self._open()

    def _open(self) -> None:
        self._made = make_folders(self.folder, self._inner)
        # A checkpoint that somebody put here is taken over if it is a version of the channel, and never overwritten.
        self.adopted = not ((self._inner / POSITION).exists() or (self._inner / INSTALL).exists())
        self._part_from_original()
        with ExitStack() as opening:
            opening.enter_context(locked(self._inner / "owner", patience=0, holder="another follower of this mirror"))
            self._sign_owner()
            # Behind the lock: whoever is refused must not take away what another has just made.
            opening.callback(self._unmake)
            opening.callback(self._let_go)
            self._refuse_other_channel()
            self._sweep()
            self._recover()
            self._close = opening.pop_all().close

    def _identity(self) -> bytes:
        status = self._inner.stat()
        return f"{status.st_dev}:{status.st_ino}".encode()

    def _sign_owner(self) -> None:
        """Say in the lock file whose it is: a copy of the folder by hard links shares it."""
        owner = self._inner / "owner"
        if owner.read_bytes() != self._identity():
            owner.write_bytes(self._identity())

    def _part_from_original(self) -> None:
        """In a copy by hard links (`cp -al`), remove the lock files that are the original's."""
        owner, lock = self._inner / "owner", self._inner / "lock"
        if not owner.exists() or owner.lstat().st_nlink == 1:
            return
        if owner.read_bytes() in (b"", self._identity()):
            return  # ours: it is another folder that has the copy
        owner.unlink()
        # Whoever reads either folder's files now holds the shared lock, and must keep it.
        with suppress(BusyError, FileNotFoundError), locked(lock, patience=0):
            lock.unlink()

    @property
    def workshop(self) -> Path:
        return self._inner

    @property
    def weights(self) -> Weights | None:
        if self._files is None:
            return None
        return Overlay(self._files, self._log.readers, fresh=True)

    @property
    def log(self) -> list[Path]:
        """The staged patches that lead from what the files hold to what the mirror holds."""
        return self._log.paths

    @property
    def folded(self) -> Position | None:
        """The version that the files themselves hold."""
        return self._folded.position if self._folded else None

    # -- open --------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Remove what a kill left behind that is of no use to anyone."""
        keep = _OWN | ({"anchor", "ahead"} if (self._inner / INSTALL).exists() else set())
        for path in self._inner.iterdir():
            if path.name not in keep:
                discard(path)
        for path in (self._inner / "staged").iterdir():
            discard(path)
        self._history.sweep()

    def _recover(self) -> None:
        """Finish what was interrupted, then find out where the folder stands."""
        if (self._inner / INSTALL).exists():
            self._install(proven=False)
        self._settle(proven=False)

    def _settle(self, proven: bool) -> None:
        """Take up files and log as they are; ``proven`` says that nobody else can have touched them."""
        self._folded = self._read_folded()
        if self._folded is None:
            self._log.clear()
        if not self._open_files():
            return
        if self._folded is None:
            self._stand(None, self._digest_files())
            return
        version, fingerprint = self._folded.position.version, Fingerprint(self.table, self._folded.digests)
        self._log.open(version, fingerprint)
        self._stand(*(self._log.end or (version, fingerprint)))
        marked = (self._inner / CHANGING).exists()
        if marked and self._log:
            with self._alone(PATIENCE):
                self._fold(prove_all=not proven)
        elif ((marked and not proven) or not self._are_untouched()) and self.examine() and not self.fold(wait=False):
            return  # the log hides what was changed below it: the files are wrong until they are folded
        if self.version is not None:
            self._unmark()

    def _are_untouched(self) -> bool:
        """Whether the files are as we left them, by their sizes and times."""
        return self._folded is not None and self._folded.files == _signature(self._files_now())

    def _unmark(self) -> None:
        if (self._inner / CHANGING).exists():
            remove(self._inner / CHANGING)

    def _refuse_other_channel(self) -> None:
        before = read_folded(self._inner / POSITION)
        if before is None or before.channel == self.channel or not self._url or before.url in ("", self._url):
            return
        hint = f"It follows {before.url}. Name another folder."
        raise UsageError("the folder is a mirror of another channel", file=str(self.folder), hint=hint)

    def _read_folded(self, name: str = POSITION) -> Folded | None:
        folded = read_folded(self._inner / name)
        if folded is None or folded.channel != self.channel or len(folded.digests) != len(self.table):
            return None
        right = Fingerprint(self.table, folded.digests).digest == folded.position.digest
        return folded if right else None

    def _open_files(self) -> bool:
        if redo_path(self.folder).exists():
            hint = f"Finish it with `weightcast apply --resume {self.folder}`."
            raise CheckpointError("an apply in place was interrupted here", file=str(self.folder), hint=hint)
        try:
            self._files = Checkpoint(self.folder, aliases=dict(self.table.aliases), interrupted=True)
        except WeightcastError:
            if self.adopted and any(path.name != MIRROR for path in self.folder.iterdir()):
                raise
            return False  # damaged or missing files of our own: whoever keeps us begins at an anchor
        try:
            refuse_other_table(self.table, self._files.table)
        except UsageError as error:
            self._close_files()
            if self.adopted:
                hint = "It holds another model. Name an empty folder."
                raise UsageError(error.problem, file=str(self.folder), tensor=error.tensor, hint=hint) from None
            return False
        return True

    def _files_now(self) -> Checkpoint:
        if self._files is None:
            raise CheckpointError("the mirror holds no weights", file=str(self.folder))
        return self._files

    def _stand(self, version: int | None, fingerprint: Fingerprint | None) -> None:
        self.version, self.fingerprint = version, fingerprint

    # -- hold --------------------------------------------------------------------------------------------------------

    def locate(self, version: int | None) -> None:
        """Be told which version the files are; None if they are none of this channel's."""
        if version is None and self.adopted:
            self._made = [self._inner]
            hint = "They would be lost. Name an empty folder, or one with a version of this channel."
            raise UsageError("the folder holds other weights than any version here", file=str(self.folder), hint=hint)
        self.version = version
        self.adopted = False
        if version is not None and self.fingerprint is not None and not self._log:
            self._write_folded(Position(version, self.fingerprint.digest), self.fingerprint)
            self._unmark()

    def examine(self) -> bool:
        """Open the files anew and read all bits again; False if they are not what was remembered."""
        if self.fingerprint is None:
            self._let_go()
            self._recover()
            return False
        remembered = self.fingerprint
        self._close_files()
        overlay = self.weights if self._open_files() else None
        if overlay is not None and fingerprint_of(overlay, self._workers, self._report) == remembered:
            if self._folded is not None and not self._log:
                self._write_folded(self._folded.position, remembered)
            return True
        # Until they are put right nobody may load the files, unless they are what they were before the log.
        write_mark(self._inner / CHANGING)
        self._forget()
        found = self._digest_files() if self._files is not None else None
        if found is not None and self._folded is not None and found.digests == self._folded.digests:
            self._stand(self._folded.position.version, found)
            self._write_folded(self._folded.position, found)
            self._unmark()
        else:
            self._stand(None, found)
        return False

    def glance(self) -> None:
        """`examine` files whose sizes or times are not those we left."""
        if self._files is not None and self._folded is not None and not self._are_untouched() and self.examine():
            self.fold(wait=False)

    def _digest_files(self) -> Fingerprint:
        return fingerprint_of(self._files_now(), self._workers, self._report)

    def take(self, staged: Staged) -> None:
        """Hold what was staged: durable when this returns, and at the old version or the new one if it does not.

        A patch of several may have been taken if it does not; its version is a committed one, too.
        """
        if staged.folder is None and position_of(self) != staged.start:
            raise UsageError("this was staged for another version", file=str(self.folder), hint="Poll again.")
        # Who reads the files now must not have them exchanged; a `BusyError` leaves everything as it was.
        alone = self._alone(PATIENCE) if staged.folder is not None else nullcontext()
        with alone, self._doubting():
            if staged.folder is not None and staged.anchor is not None:
                self._prepare_install(staged, staged.folder, staged.anchor)
                self._install(proven=True)
                self._settle(proven=True)
                self.adopted = False
            else:
                self._append(staged)
            if self.fingerprint is None or self.fingerprint.digest != staged.fingerprint.digest:
                problem = "what was staged does not lead on from where the mirror stands"
                raise CheckpointError(problem, file=str(self.folder), hint=_EDITED)
        if len(self._log) >= FOLD_EVERY:
            self.fold(wait=False)

    def _append(self, staged: Staged) -> None:
        for patch in staged.patches:
            assert self.version is not None
            assert self.fingerprint is not None
            if not self._log.append(patch.path, patch.position.version, self.version, self.fingerprint):
                return
            self._stand(*(self._log.end or (self.version, self.fingerprint)))
        self._log.sync()

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """If this ends early, we do not know what the folder holds before it is looked at again."""
        try:
            with disk_errors(self.folder):
                yield
        except BaseException:
            self._let_go()
            self._stand(None, None)
            raise

    # -- fold --------------------------------------------------------------------------------------------------------

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        """Write the log into the files; False if readers hold them and ``wait`` is not wanted.

        `BusyError` if readers hold them longer than ``patience`` seconds; `PATIENCE` if that is None.
        """
        if not self._log or self.fingerprint is None:
            return True
        version = self.version
        with ExitStack() as holding:
            try:
                holding.enter_context(self._alone((PATIENCE if patience is None else patience) if wait else 0))
            except BusyError:
                if wait:
                    raise
                return False
            with self._doubting():
                if self._are_untouched() or self.examine():
                    self._fold()
        if self.version != version:
            raise CheckpointError("the files were changed by somebody else", file=str(self.folder), hint=_EDITED)
        return True

    @contextmanager
    def _alone(self, patience: float) -> Iterator[None]:
        """Hold the readers' lock alone; what runs inside may ask for it again."""
        if self._is_alone:
            yield
            return
        with locked(self._inner / "lock", patience=patience, holder=_READERS):
            self._is_alone = True
            try:
                yield
            finally:
                self._is_alone = False

    def _own_files(self) -> None:
        """Make sure that no other folder shares the files that are about to be written."""
        copied = [own_copy(path, self._inner) for path in self._files_now().files]
        if any(copied):
            self._close_files()
            if not self._open_files():
                raise CheckpointError("the files cannot be opened again", file=str(self.folder), hint=_EDITED)

    def _fold(self, prove_all: bool = False) -> None:
        """Write the log into the files. If that does not give the bits it should, they are no version any more.

        Each tensor that the log touches is proven; with ``prove_all`` those that it does not touch, too.
        """
        version, fingerprint = self.version, self.fingerprint
        assert version is not None
        assert fingerprint is not None
        self._own_files()
        again = (self._inner / CHANGING).exists()  # then the files may hold new bits already: nothing to go back to
        write_mark(self._inner / CHANGING)
        touched = {row.spec.name for reader in self._log.readers for row in reader.rows}
        done, total = 0, sum(self.table[name].nbytes for name in touched)
        with (
            Checkpoint(self.folder, aliases=dict(self.table.aliases), writable=True, interrupted=True) as files,
            self._recording(again) as undo,
        ):
            overlay = Overlay(files, self._log.readers, fresh=True)
            for spec in self.table:
                if spec.name not in touched and not prove_all:
                    continue
                bits = undo.apply(spec.name, files.read(spec.name)) if undo else overlay.read(spec.name)
                if tensor_digest(bits, self._workers) != fingerprint[spec.name]:
                    self._forget()
                    return
                if spec.name in touched:
                    files.write(spec.name, bits)
                    done += spec.nbytes
                    self._report("fold", done, total)
            files.sync()
            if undo:
                undo.finish()
        self._write_folded(Position(version, fingerprint.digest), fingerprint)
        self._log.clear()
        self._unmark()
        self._history.trim()

    @contextmanager
    def _recording(self, again: bool) -> Iterator[Undo | None]:
        """Record what a fold overwrites; None where it cannot be known any more."""
        if again or self._folded is None:
            yield None
            return
        base = self._folded.position.version, Fingerprint(self.table, self._folded.digests)
        with self._history.record(base, self._log.layers) as undo:
            yield undo

    def way_back(self, goal: Position) -> Staged | None:
        """Stage the way back to ``goal`` from what was kept here; None if it does not lead there.

        What is held is not touched. Only what is folded counts: a log must be folded first.
        """
        start, fingerprint = position_of(self), self.fingerprint
        if start is None or fingerprint is None or self._log or self._files is None:
            return None
        way = self._history.way(start, goal)
        if way is None:
            return None
        staging = self._inner / "staged"
        for left in staging.iterdir():
            discard(left)
        patches: list[StagedPatch] = []
        with ExitStack() as opened:
            layers: list[PatchReader] = []
            for number, path in enumerate(way):
                out = staging / f"back-{number}.safetensors"
                try:
                    reader = PatchReader(opened.enter_context(FileSource(path)))
                    under = Overlay(self._files, layers, fresh=True)
                    fingerprint = stage(reader, under, fingerprint, out, self._workers, self._report)
                except (FormatError, MismatchError, UsageError, CheckpointError):
                    discard(path)  # damaged: the bucket has what it led to
                    return None
                layers.append(PatchReader(opened.enter_context(FileSource(out))))
                step = read_log_name(path.name)
                assert step is not None
                patches.append(StagedPatch(Position(step[1], fingerprint.digest), out))
        return Staged(start, goal, fingerprint, None, None, None, tuple(patches), 0)

    def _write_folded(self, position: Position, fingerprint: Fingerprint) -> None:
        folded = Folded(self.channel, self._url, position, fingerprint.digests, _signature(self._files_now()))
        write_folded(self._inner / POSITION, folded)
        self._folded = folded

    def _forget(self) -> None:
        """We hold no version, and the log leads nowhere."""
        self._log.clear()
        self._stand(None, None)

    # -- install a new anchor ------------------------------------------------------------------------------------------

    def _prepare_install(self, staged: Staged, folder: Path, position: Position) -> None:
        """Once this is done the new files will be moved in, however often we are interrupted."""
        anchor, ahead = self._inner / "anchor", self._inner / "ahead"
        for left in (anchor, ahead):
            discard(left)
        ahead.mkdir()
        version = position.version
        for number, patch in enumerate(staged.patches):
            patch.path.replace(ahead / log_name(number, version, patch.position.version))
            version = patch.position.version
        folder.rename(anchor)
        for changed in (ahead, anchor, self._inner):
            sync_folder(changed)
        files = {path.name: (path.stat().st_size, 0) for path in anchor.iterdir()}
        assert staged.anchor_digests is not None
        write_folded(self._inner / INSTALL, Folded(self.channel, self._url, position, staged.anchor_digests, files))

    def _install(self, proven: bool) -> None:
        """Move the new files in; what has been moved before an interruption is in place already.

        The mark stays: the log that came with them is to be folded first, lest the files go back to an older version.
        """
        new = self._read_folded(INSTALL)
        self._let_go()
        with self._alone(PATIENCE):
            write_mark(self._inner / CHANGING)
            if new is not None:
                self._move_in(new)
                if self._open_files() and (proven or self._digest_files().digests == new.digests):
                    self._write_folded(new.position, Fingerprint(self.table, new.digests))
                self._let_go()
            remove(self._inner / INSTALL)
            self._history.clear()
            discard(self._inner / "anchor")
            discard(self._inner / "ahead")

    def _move_in(self, new: Folded) -> None:
        before, anchor, ahead = read_folded(self._inner / POSITION), self._inner / "anchor", self._inner / "ahead"
        for name in sorted(new.files):
            if (anchor / name).exists():
                (anchor / name).replace(self.folder / name)
        for name in {INDEX, *(before.files if before else ())} - new.files.keys():
            (self.folder / name).unlink(missing_ok=True)
        sync_folder(self.folder)
        if ahead.exists():
            shutil.rmtree(self._inner / "log")
            ahead.rename(self._inner / "log")
            sync_folder(self._inner)

    def _close_files(self) -> None:
        if self._files is not None:
            files, self._files = self._files, None
            files.close()

    def _let_go(self) -> None:
        self._close_files()
        self._log.close()

    def _unmake(self) -> None:
        """Leave a folder that was refused, or got nothing, as it was; a download that can go on is worth keeping."""
        begun = any((self._inner / name).exists() for name in (POSITION, INSTALL))
        if not begun and not any((self._inner / "incoming").glob("*")):
            for path in reversed(self._made):
                discard(path)

    def close(self) -> None:
        self._close()


def default_mirror(channel: str) -> Path:
    """Where this user keeps a channel's weights if nobody says otherwise, by its id; the folder above it is made."""
    if not is_channel_id(channel):  # it becomes a path: nothing may lead out of the cache
        raise UsageError(f"{channel[:100]!r} is not the id of a channel", hint="An id is 32 hexadecimal digits.")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "weightcast"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / channel


@contextmanager
def reading(folder: Path | str) -> Iterator[Checkpoint]:
    """The files of a mirror, at rest: nothing is folded into them meanwhile."""
    folder = Path(folder)
    if not (folder / MIRROR).is_dir():
        raise CheckpointError("this is no mirror", file=str(folder), hint="`weightcast pull URL FOLDER` makes one.")
    with locked(folder / MIRROR / "lock", shared=True), Checkpoint(folder) as files:
        yield files


def _signature(files: Checkpoint) -> FileTimes:
    found = {}
    for path in files.files:
        with suppress(FileNotFoundError):
            status = path.stat()
            found[path.name] = status.st_size, status.st_mtime_ns
    return found
