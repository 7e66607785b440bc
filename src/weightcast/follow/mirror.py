"""A mirror: a Hugging Face checkpoint folder that follows a channel, and survives a kill at any moment.

One step of training touches nearly every page of the files, so they are not written for every version: a version is
applied by appending its patch to the log, durably. Every few versions the log is *folded* into the files, on a thread
of the mirror's own (`fold`). That thread does all that concerns the folder, so that readers of the files wait for
nothing else. What the mirror itself holds, its log and what it knows of its files, is changed by its caller's thread
alone: the next call takes up what the fold came to. Until then files and log, read together, are right as they are.

A kill leaves all that was written, a loss of power only what was synced; one order of writing and syncing serves both.
`mirror_folder` has the layout of the folder, `mirror_reader` what other processes read of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route
from weightcast.disk.checkpoint import MIRROR, Checkpoint, redo_path
from weightcast.disk.durable import Enter, Report, disk_errors, own_copy, silent, untimed
from weightcast.disk.staged import Overlay, fingerprint_of
from weightcast.errors import BusyError, CheckpointError, UsageError, WeightcastError
from weightcast.follow.fold import Fold, FoldThread, Outcome
from weightcast.follow.history import History
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_install import finish_install, move_in, prepare_install
from weightcast.follow.mirror_state import FilesState, file_times, read_state, write_state
from weightcast.follow.redo_log import RedoLog
from weightcast.follow.replica import Staged, position_of
from weightcast.follow.resident import Resident
from weightcast.follow.staging import stage_route
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers

FOLD_EVERY = 8
"""Versions in the log before they are folded; a reader that holds the lock delays that, and the log grows meanwhile."""

PATIENCE = 30.0
"""Seconds that a change of the files waits for their readers before it raises a `BusyError`."""

_PULL_AGAIN = "Pull again: the channel has what the files should be."


class Mirror:
    """A folder that follows a channel: a `Replica` whose weights are the files with the log laid over them."""

    takes_anchors = True

    def __init__(
        self,
        folder: Path | str,
        channel: str,
        table: TensorTable,
        workers: Workers = ONE,
        report: Report = silent,
        *,
        url: str = "",
        fold_every: int = FOLD_EVERY,
        patience: float = PATIENCE,
    ):
        """Open, create or adopt ``folder``, and complete what an interruption left undone.

        A folder that is neither empty nor a checkpoint of this table is refused, and so is a mirror of a channel
        elsewhere. A mirror of another channel at the same ``url`` is taken over: the channel was started over there.
        """
        self.beside: Path | None = None
        """Where another follower of this host keeps the objects that it has fetched."""
        self._url = url.encode("utf-8", "backslashreplace").decode()  # a path need not be UTF-8, a record must
        self.folder = Path(folder)
        self.channel, self.table = channel, table
        self._workers, self._report = workers, report
        self._fold_every, self._patience = fold_every, patience
        self._place = MirrorFolder(self.folder)
        self.workshop = self._place.inner
        self._log = RedoLog(self._place.log)
        self._history = History(self._place.history, table)
        self._resident = Resident(table, workers)
        self._files: Checkpoint | None = None
        self._folded: FilesState | None = None
        self._background = FoldThread()
        self.version: int | None = None
        self.fingerprint: Fingerprint | None = None
        with disk_errors(self.folder):
            self._open()

    @property
    def weights(self) -> Overlay | None:
        return None if self._files is None else Overlay(self._files, self._log.readers, fresh=True)

    @property
    def base(self) -> Weights | None:
        weights = self.weights
        return None if weights is None else self._resident.over(weights)

    @property
    def folded(self) -> Position | None:
        """The version that the files themselves hold, but for a fold in the background that was not taken up yet."""
        return self._folded.position if self._folded else None

    # -- open ----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._place.make()
        # A checkpoint that another program put here is adopted if it is a version of the channel, never overwritten.
        self.adopted = not self._place.has_version
        with ExitStack() as opening:
            opening.enter_context(self._place.owned())
            # After the lock: a process that is refused must not remove what another has just created.
            opening.callback(self._place.remove_if_unused)
            opening.callback(self._release)
            self._refuse_other_channel()
            self._place.sweep()
            self._history.sweep()
            self._recover()
            self._close = opening.pop_all().close

    def _refuse_other_channel(self) -> None:
        before = read_state(self._place.position)
        if before is None or before.channel == self.channel or not self._url or before.url in ("", self._url):
            return
        hint = f"It follows {before.url}. Name another folder."
        raise UsageError("the folder is a mirror of another channel", file=str(self.folder), hint=hint)

    def _recover(self) -> None:
        """Complete what was interrupted, then determine which version the folder holds."""
        if self._place.install.exists():
            self._install(verified=False)
        self._load(verified=False)

    def _load(self, verified: bool) -> None:
        """Open files and log as they are; ``verified``: no other program can have changed them."""
        self._folded = self._read_state(self._place.position)
        if self._folded is None:
            self._log.clear()
        if not self._open_files():
            return
        if self._folded is None:
            self._set(None, self._digest_files())
            return
        version, fingerprint = self._folded.position.version, Fingerprint(self.table, self._folded.digests)
        self._log.open(version, fingerprint)
        self._set(*(self._log.end or (version, fingerprint)))
        marked = self._place.is_changing
        if marked and self._log:
            with self._place.exclusive(self._patience):
                self._fold(verify_all=not verified)
        elif ((marked and not verified) or not self._are_untouched()) and self.examine() and not self.fold(wait=False):
            return  # the log hides what was changed below it: the files are wrong until they are folded
        if self.version is not None:
            self._place.unmark()

    def _read_state(self, path: Path) -> FilesState | None:
        """The record at ``path``; None if it is not of this channel, or is damaged."""
        state = read_state(path)
        return state if state is not None and state.fingerprint(self.table, self.channel) is not None else None

    def _state_at(self, position: Position, fingerprint: Fingerprint) -> FilesState:
        return FilesState(self.channel, self._url, position, fingerprint.digests, file_times(self._files_now()))

    def _write_state(self, position: Position, fingerprint: Fingerprint) -> None:
        state = self._state_at(position, fingerprint)
        write_state(self._place.position, state)
        self._folded = state

    def _are_untouched(self) -> bool:
        """Whether the files are as we left them, by their sizes and times."""
        return self._folded is not None and self._folded.files == file_times(self._files_now())

    def _open_files(self) -> bool:
        if redo_path(self.folder).exists():
            hint = f"Finish it with `weightcast apply --resume {self.folder}`."
            raise CheckpointError("an apply in place was interrupted here", file=str(self.folder), hint=hint)
        try:
            self._files = Checkpoint(self.folder, aliases=dict(self.table.aliases), interrupted=True)
        except WeightcastError:
            if self.adopted and any(path.name != MIRROR for path in self.folder.iterdir()):
                raise
            return False  # damaged or missing files of our own: an anchor replaces them
        try:
            hint = "It holds another model. Name an empty folder."
            refuse_other_table(self.table, self._files.table, file=str(self.folder), hint=hint)
        except UsageError:
            self._close_files()
            if self.adopted:
                raise
            return False
        return True

    def _files_now(self) -> Checkpoint:
        if self._files is None:
            raise CheckpointError("the mirror holds no weights", file=str(self.folder))
        return self._files

    def _digest_files(self) -> Fingerprint:
        return fingerprint_of(self._files_now(), self._workers, self._report)

    def _set(self, version: int | None, fingerprint: Fingerprint | None) -> None:
        self.version, self.fingerprint = version, fingerprint

    # -- what is held --------------------------------------------------------------------------------------------------

    def stage(self, chain: Chain, route: Route, goal: Manifest, enter: Enter = untimed) -> Staged:
        return stage_route(chain, self, route, goal, self._workers, self._report, enter)

    def locate(self, version: int | None) -> None:
        """Set the version that the weights are; None if they are not a version of this channel."""
        self.take_up_fold(wait=True)
        if version is None and self.adopted:
            self._place.keep_files()
            hint = "They would be lost. Name an empty folder, or one with a version of this channel."
            raise UsageError("the folder holds other weights than any version here", file=str(self.folder), hint=hint)
        self.version = version
        self.adopted = False
        if version is not None and self.fingerprint is not None and not self._log:
            self._write_state(Position(version, self.fingerprint.digest), self.fingerprint)
            self._place.unmark()

    def examine(self) -> bool:
        """Open the files again and read all bits; False if they are not what was remembered."""
        self.take_up_fold(wait=True)
        if self.fingerprint is None:
            self._release()
            self._recover()
            return False
        remembered = self.fingerprint
        self._close_files()
        overlay = self.weights if self._open_files() else None
        if overlay is not None and fingerprint_of(overlay, self._workers, self._report) == remembered:
            if self._folded is not None and not self._log:
                self._write_state(self._folded.position, remembered)
            return True
        # The files must not be loaded until they are repaired, unless they are still what they were before the log.
        self._place.mark()
        self._forget()
        found = self._digest_files() if self._files is not None else None
        if found is not None and self._folded is not None and found.digests == self._folded.digests:
            self._set(self._folded.position.version, found)
            self._write_state(self._folded.position, found)
            self._place.unmark()
        else:
            self._set(None, found)
        return False

    def examine_if_changed(self) -> None:
        """`examine` the files if their sizes or times are not those we left; a fold in the background changes them."""
        self.take_up_fold()
        if self._background.is_folding or self._files is None or self._folded is None:
            return
        if not self._are_untouched() and self.examine():
            self.fold(wait=False)

    def _forget(self) -> None:
        """Drop the log, and hold no version."""
        self._resident.drop()
        self._log.clear()
        self._set(None, None)

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self, staged: Staged) -> None:
        """Hold what was staged, durably when this returns. If it raises, some of the patches may have been applied."""
        self.take_up_fold(wait=staged.anchor is not None)
        if staged.anchor is None and position_of(self) != staged.start:
            raise UsageError("this was staged for another version", file=str(self.folder), hint="Poll again.")
        # Files must not be replaced under a reader; a `BusyError` leaves everything as it was.
        lock = self._place.exclusive(self._patience) if staged.anchor is not None else nullcontext()
        with lock, self._doubting():
            if staged.anchor is not None:
                prepare_install(self._place, staged.anchor, staged.patches, self.channel, self._url)
                self._install(verified=True)
                self._load(verified=True)
                self.adopted = False
            else:
                self._append(staged)
            if self.fingerprint is None or self.fingerprint.digest != staged.fingerprint.digest:
                problem = "what was staged does not lead on from the mirror's version"
                raise CheckpointError(problem, file=str(self.folder), hint=_PULL_AGAIN)
        self._resident.begin()
        if not self._background.is_folding and len(self._log) >= self._fold_every:
            self.begin_fold()

    def _append(self, staged: Staged) -> None:
        for patch in staged.patches:
            assert self.version is not None
            assert self.fingerprint is not None
            layer = self._log.append(patch.path, patch.position.version, self.version, self.fingerprint)
            if layer is None:
                return
            self._set(layer.version, layer.fingerprint)
            self._resident.advance(layer.reader)
        self._log.sync()

    def _install(self, verified: bool) -> None:
        """Move the files of a prepared anchor in; ``verified``: their bits were just checked.

        The mark stays: the log that came with them must be folded first, or the files would show an older version.
        """
        new = self._read_state(self._place.install)
        self._release()
        with self._place.exclusive(self._patience):
            self._place.mark()
            if new is not None:
                move_in(self._place, new)
                if self._open_files() and (verified or self._digest_files().digests == new.digests):
                    self._write_state(new.position, Fingerprint(self.table, new.digests))
                self._release()
            finish_install(self._place)

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """If this ends early, it is not known what the folder holds until it is examined."""
        try:
            with disk_errors(self.folder):
                yield
        except BaseException:
            self._set(None, None)
            self._background.finish()  # whatever it came to; it uses the log
            self._release()
            raise

    def stage_back(self, goal: Position) -> Staged | None:
        """Stage the route back to ``goal`` from the history kept here; None if that does not lead there.

        What is held is not changed. Only the files count: a log must be folded first.
        """
        start, fingerprint = position_of(self), self.fingerprint
        if start is None or fingerprint is None or self._log or self._files is None:
            return None
        staging = self._place.staged
        return self._history.stage(self._files, fingerprint, start, goal, staging, self._workers, self._report)

    # -- fold ----------------------------------------------------------------------------------------------------------

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        """Write the log into the files; False if readers hold them and ``wait`` is not set.

        A fold in the background is waited for, and what came after it is folded. `BusyError` if readers hold the files
        for longer than ``patience`` seconds, or the mirror's own patience.
        """
        self.take_up_fold(wait=True)
        version = self.version
        if not self._log or version is None:
            return True
        with ExitStack() as holding:
            seconds = self._patience if patience is None else patience
            try:
                holding.enter_context(self._place.exclusive(seconds if wait else 0))
            except BusyError:
                if wait:
                    raise
                return False
            with self._doubting():
                if self._are_untouched() or self.examine():
                    self._fold()
        if self.version != version:
            raise self._edited()
        return True

    def _fold(self, verify_all: bool = False) -> None:
        """Write the log into the files. If that does not give the right bits, the mirror holds no version any more."""
        self._unshare_files()
        fold = self._new_fold()
        self._take_up(fold, fold.run(verify_all, self._workers, self._report))

    def _new_fold(self) -> Fold:
        position, fingerprint = position_of(self), self.fingerprint
        assert position is not None
        assert fingerprint is not None
        goal, layers = self._state_at(position, fingerprint), tuple(self._log.layers)
        return Fold(self._place, self.table, self._history, self._folded, goal, layers)

    def begin_fold(self) -> None:
        """Fold the log that there is now in the background, unless a fold is under way, or readers hold the files."""
        self.take_up_fold()
        if self._background.is_folding or not self._log or self.version is None:
            return
        if not self._are_untouched() or any(path.lstat().st_nlink > 1 for path in self._files_now().files):
            self.fold(wait=False)  # the files must be read or copied first, and opened again
            return
        with suppress(BusyError), ExitStack() as holding:
            holding.enter_context(self._place.shut(0))
            self._background.begin(self._new_fold(), holding.pop_all())

    def take_up_fold(self, wait: bool = False) -> None:
        """Take up what a fold in the background has come to, if it has ended; raises what it failed with."""
        ended = self._background.finish() if wait else self._background.take_ended()
        if ended is not None:
            with self._doubting():
                fold, outcome = ended[0], ended[1].result()
                self._take_up(fold, outcome)
                if outcome is Outcome.WRONG_BITS:
                    raise self._edited()

    def _take_up(self, fold: Fold, outcome: Outcome) -> None:
        if outcome is Outcome.FOLDED:
            self._folded = fold.goal
            self._log.drop_first(len(fold.layers))
        elif outcome is Outcome.WRONG_BITS:
            self._forget()

    def _edited(self) -> CheckpointError:
        problem = "the files were changed by another program"
        return CheckpointError(problem, file=str(self.folder), hint=_PULL_AGAIN)

    def _unshare_files(self) -> None:
        """Replace files that another folder shares by copies: they are about to be written."""
        copied = [own_copy(path, self._place.inner) for path in self._files_now().files]
        if any(copied):
            self._close_files()
            if not self._open_files():
                raise CheckpointError("the files cannot be opened again", file=str(self.folder), hint=_PULL_AGAIN)

    # -- close ---------------------------------------------------------------------------------------------------------

    def _close_files(self) -> None:
        self._resident.drop()
        if self._files is not None:
            files, self._files = self._files, None
            files.close()

    def _release(self) -> None:
        self._close_files()
        self._log.close()

    def close(self) -> None:
        """Release the folder. A fold in the background is waited for; what it failed with is raised."""
        try:
            self.take_up_fold(wait=True)
        finally:
            self._background.close()
            self._close()
