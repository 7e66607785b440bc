"""A mirror: a Hugging Face checkpoint folder that is kept at a channel's versions, and survives a kill at any moment.

    FOLDER/*.safetensors, config.json, …    the checkpoint at the *folded* version, for any tool to load
    FOLDER/.weightcast/position.json        which version that is, with the digest of every tensor
    FOLDER/.weightcast/log/                 staged patches that lead on from there: the redo log
    FOLDER/.weightcast/lock                 held shared by readers of the files, alone by who changes them
    FOLDER/.weightcast/changing             there while the files change: they must not be loaded
    FOLDER/.weightcast/install.json         there while a new anchor's files are moved in
    FOLDER/.weightcast/owner                held by the one process that keeps this mirror

One step of training touches nearly every page of the files, so they are not written for every version: a version is
taken by adding its patch to the log, which is synced. Now and then the log is *folded* into the files. The log holds
absolute bits and is removed only after the files are synced, so an interrupted fold is simply done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightcast.bits import TensorTable, Weights
from weightcast.checkpoint import CHANGING, MIRROR, Checkpoint, redo_path
from weightcast.container import FileSource
from weightcast.detect import refuse_other_table
from weightcast.digest import Fingerprint
from weightcast.errors import CheckpointError, UsageError, WeightcastError
from weightcast.files import Report, locked, remove, silent, sync_folder, write_mark
from weightcast.folded import Folded, read_folded, write_folded
from weightcast.holder import Staged
from weightcast.keys import Position
from weightcast.stage import Overlay, led_by, standing_of
from weightcast.wire import PatchReader
from weightcast.workers import ONE, Workers

POSITION, INSTALL = "position.json", "install.json"

FOLD_EVERY = 8
"""Versions in the log before they are folded; a reader that holds the lock may delay it to four times that."""


@dataclass(frozen=True)
class _Layer:
    position: Position
    path: Path
    source: FileSource
    reader: PatchReader


class Mirror:
    """A folder that follows a channel; a `Holder`, and its weights as of the newest version taken."""

    def __init__(
        self, folder: Path | str, channel: str, table: TensorTable, workers: Workers = ONE, report: Report = silent
    ):
        """Open, make or adopt ``folder``; what an interruption left undone is done first.

        A folder that is neither empty nor a checkpoint of this table is refused.
        """
        self.folder = Path(folder)
        self.channel, self.table = channel, table
        self._workers, self._report = workers, report
        self._inner = self.folder / MIRROR
        self._layers: list[_Layer] = []
        self._files: Checkpoint | None = None
        self._folded: Folded | None = None
        self.version: int | None = None
        self.standing: Fingerprint | None = None
        self._made = _make_folders(self.folder, self._inner)
        # A checkpoint that somebody put here is taken over if it is a version of the channel, and never overwritten.
        self.adopted = not ((self._inner / POSITION).exists() or (self._inner / INSTALL).exists())
        with ExitStack() as opening:
            opening.callback(self._unmake)
            opening.enter_context(locked(self._inner / "owner", wait=False, holder="another follower of this mirror"))
            opening.callback(self._let_go)
            shutil.rmtree(self._inner / "staged")
            (self._inner / "staged").mkdir()
            self._recover()
            self._made = []
            self._close = opening.pop_all().close

    @property
    def workshop(self) -> Path:
        return self._inner

    @property
    def weights(self) -> Weights | None:
        if self._files is None:
            return None
        return Overlay(self._files, [layer.reader for layer in self._layers], fresh=True)

    @property
    def folded(self) -> Position | None:
        """The version that the files themselves hold."""
        return self._folded.position if self._folded else None

    # -- open --------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Finish what was interrupted, then find out where the folder stands."""
        if (self._inner / INSTALL).exists():
            self._install()
        self._folded = self._read_folded()
        if not self._open_files():
            return
        if self._folded is None:
            self._stand(standing_of(self._files_now(), self._workers, self._report), None)
            return
        interrupted = (self._inner / CHANGING).exists()
        fingerprint = Fingerprint(self.table, self._folded.digests)
        self._stand(fingerprint, self._folded.position.version)
        self._open_log()
        if interrupted and self._layers:
            self.fold()
        elif self._folded.files != _signature(self._files_now()):
            self.examine()
        if interrupted:
            remove(self._inner / CHANGING)

    def _read_folded(self, name: str = POSITION) -> Folded | None:
        folded = read_folded(self._inner / name)
        if folded is None or folded.channel != self.channel or len(folded.digests) != len(self.table):
            return None
        right = Fingerprint(self.table, folded.digests).position == folded.position.digest
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
            self._files.close()
            self._files = None
            if self.adopted:
                hint = "It holds another model. Name an empty folder."
                raise UsageError(error.problem, file=str(self.folder), tensor=error.tensor, hint=hint) from None
            return False
        return True

    def _files_now(self) -> Checkpoint:
        if self._files is None:
            raise CheckpointError("the mirror holds no weights", file=str(self.folder))
        return self._files

    def _open_log(self) -> None:
        """Take up the patches that lead on from the files, in order; what does not is of no use any more."""
        for path in sorted((self._inner / "log").iterdir()):
            if self.standing is None or self.version is None or not self._take_up(path):
                path.unlink()

    def _take_up(self, path: Path) -> bool:
        base, _, result = path.name.removesuffix(".safetensors").partition("-")
        if not (base.isdigit() and result.isdigit()) or int(base) != self.version or self.standing is None:
            return False
        source = FileSource(path)
        try:
            reader = PatchReader(source)
            reached = led_by(self.standing, reader)
            good = (reader.header.base, reader.header.result) == (self.standing.position, reached.position)
        except WeightcastError:
            good = False
        if not good:
            source.close()
            return False
        self._layers.append(_Layer(Position(int(result), reached.position), path, source, reader))
        self._stand(reached, int(result))
        return True

    def _stand(self, standing: Fingerprint | None, version: int | None) -> None:
        self.standing, self.version = standing, version

    # -- hold --------------------------------------------------------------------------------------------------------

    def locate(self, version: int | None) -> None:
        """Be told which version the files are; None if they are none of this channel's."""
        if version is None and self.adopted:
            self._made = [self._inner]
            hint = "They would be lost. Name an empty folder, or one with a version of this channel."
            raise UsageError("the folder holds other weights than any version here", file=str(self.folder), hint=hint)
        self.version = version
        self.adopted = False
        if version is not None and self.standing is not None and not self._layers:
            self._write_folded(Position(version, self.standing.position), self.standing)
            remove(self._inner / CHANGING)

    def examine(self) -> bool:
        """Read all bits again; False if they are not what was remembered."""
        weights = self.weights
        if weights is None or self.standing is None:
            return False
        found = standing_of(weights, self._workers, self._report)
        if found == self.standing:
            if self._folded is not None and not self._layers:
                self._write_folded(self._folded.position, found)
            return True
        self._drop_log()
        self._stand(standing_of(self._files_now(), self._workers, self._report), None)
        return False

    def take(self, staged: Staged) -> None:
        """Hold what was staged: durable when this returns, and at the old version or the new one if it does not."""
        if staged.folder is not None and staged.anchor is not None:
            self._prepare_install(staged, staged.folder, staged.anchor)
            self._install()
            self._folded = self._read_folded()
            if not self._open_files() or self._folded is None:
                raise CheckpointError("the files that were just moved in are gone", file=str(self.folder))
            self._stand(Fingerprint(self.table, self._folded.digests), self._folded.position.version)
        log = self._inner / "log"
        for patch in staged.patches:
            place = log / f"{self.version:012d}-{patch.position.version:012d}.safetensors"
            patch.path.replace(place)
            if not self._take_up(place):
                raise CheckpointError("a staged patch does not lead on from where the mirror stands", file=str(place))
        sync_folder(log)
        if len(self._layers) >= FOLD_EVERY:
            self.fold(wait=len(self._layers) >= 4 * FOLD_EVERY)

    # -- fold --------------------------------------------------------------------------------------------------------

    def fold(self, wait: bool = True) -> bool:
        """Write the log into the files; False if readers hold them and ``wait`` is not wanted."""
        if not self._layers or self.standing is None:
            return True
        with ExitStack() as holding:
            try:
                holding.enter_context(locked(self._inner / "lock", wait=wait))
            except CheckpointError:
                return False
            self._fold(self._layers[-1].position, self.standing)
        return True

    def _fold(self, position: Position, standing: Fingerprint) -> None:
        write_mark(self._inner / CHANGING)
        touched = {row.spec.name for layer in self._layers for row in layer.reader.rows}
        done, total = 0, sum(self.table[name].nbytes for name in touched)
        with Checkpoint(self.folder, writable=True, interrupted=True) as files:
            overlay = Overlay(files, [layer.reader for layer in self._layers], fresh=True)
            for spec in self.table:
                if spec.name in touched:
                    files.write(spec.name, overlay.read(spec.name))
                    done += spec.nbytes
                    self._report("fold", done, total)
            files.sync()
        self._write_folded(position, standing)
        self._drop_log()
        remove(self._inner / CHANGING)

    def _write_folded(self, position: Position, standing: Fingerprint) -> None:
        folded = Folded(self.channel, position, standing.digests, _signature(self._files_now()))
        write_folded(self._inner / POSITION, folded)
        self._folded = folded

    def _drop_log(self) -> None:
        for layer in self._layers:
            layer.source.close()
            layer.path.unlink(missing_ok=True)
        self._layers = []
        sync_folder(self._inner / "log")

    # -- install a new anchor ------------------------------------------------------------------------------------------

    def _prepare_install(self, staged: Staged, folder: Path, position: Position) -> None:
        """Once this is done the new files will be moved in, however often we are interrupted."""
        anchor = self._inner / "anchor"
        if anchor.exists():
            shutil.rmtree(anchor)
        folder.rename(anchor)
        sync_folder(self._inner)
        files = {path.name: (path.stat().st_size, 0) for path in anchor.iterdir()}
        assert staged.anchor_digests is not None
        write_folded(self._inner / INSTALL, Folded(self.channel, position, staged.anchor_digests, files))

    def _install(self) -> None:
        """Move the new files in; what has been moved before an interruption is in place already."""
        new, before = self._read_folded(INSTALL), self._read_folded()
        self._let_go()
        anchor = self._inner / "anchor"
        with locked(self._inner / "lock"):
            write_mark(self._inner / CHANGING)
            for patch in sorted((self._inner / "log").iterdir()):
                patch.unlink()
            if new is not None:
                for name in sorted(new.files):
                    if (anchor / name).exists():
                        (anchor / name).replace(self.folder / name)
                for name in (before.files if before else {}).keys() - new.files.keys():
                    (self.folder / name).unlink(missing_ok=True)
                sync_folder(self.folder)
                if self._open_files():
                    self._write_folded(new.position, Fingerprint(self.table, new.digests))
                    self._let_go()
            remove(self._inner / INSTALL)
            if anchor.exists():
                shutil.rmtree(anchor)
            remove(self._inner / CHANGING)

    def _let_go(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None
        for layer in self._layers:
            layer.source.close()
        self._layers = []

    def _unmake(self) -> None:
        """Leave a folder that was refused as it was."""
        for path in reversed(self._made):
            shutil.rmtree(path)

    def close(self) -> None:
        self._close()


@contextmanager
def reading(folder: Path | str) -> Iterator[Checkpoint]:
    """The files of a mirror, at rest: nothing is folded into them meanwhile."""
    folder = Path(folder)
    if not (folder / MIRROR).is_dir():
        raise CheckpointError("this is no mirror", file=str(folder), hint="`weightcast pull URL FOLDER` makes one.")
    with locked(folder / MIRROR / "lock", shared=True), Checkpoint(folder) as files:
        yield files


def _make_folders(folder: Path, inner: Path) -> list[Path]:
    """What had to be made, outermost first; `UsageError` where a mirror cannot be."""
    made = []
    if not folder.exists() and not folder.is_symlink():
        if not folder.absolute().parent.is_dir():
            raise UsageError("the folder above it does not exist", file=str(folder), hint="Make it first.")
        folder.mkdir()
        sync_folder(folder.absolute().parent)
        made.append(folder)
    _refuse_strange_folder(folder)
    if not inner.exists():
        inner.mkdir()
        made.append(inner)
    for part in ("log", "staged", "incoming"):
        (inner / part).mkdir(exist_ok=True)
    sync_folder(inner)
    sync_folder(folder)
    return made


def _refuse_strange_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError("a mirror needs a folder", file=str(folder), hint="Name one, or one that can be made.")
    names = {path.name for path in folder.iterdir()}
    if names and MIRROR not in names and not any(name.endswith(".safetensors") for name in names):
        hint = "Name an empty folder, one with a checkpoint, or one that can be made."
        raise UsageError("the folder is neither empty nor a checkpoint", file=str(folder), hint=hint)


def _signature(files: Checkpoint) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files.files}
