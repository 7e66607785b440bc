"""Folding: the layers of a mirror's redo log are written into its files, while later versions are applied after them.

A fold covers the layers that the log has when it begins. Nobody who reads files and log through an `Overlay` waits for
it: the layers hold absolute bits, and of every other element a fold writes the bits that are there. So whatever part of
it is done, the files with all layers laid over them are the same version.

What is made durable, in this order, serves a kill and a loss of power at any moment:

1. the mark `changing`: the files are not loaded;
2. the files, and the patches that lead back;
3. position.json: the files hold the version of the last layer;
4. the layers are deleted, the oldest first;
5. the mark is removed.

Before the third the log still leads on from the version in position.json, and all of it is folded again. From then on
layers of the fold that are left are no part of the log: they do not lead on from the new version. If the log went back
and forth, some of them may; then all that follow are there, too, because the oldest go first, and lead to that version.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto

from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import Report, silent
from weightcast.disk.staged import Overlay
from weightcast.follow.history import History, Undo
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_state import FilesState, file_times, write_state
from weightcast.follow.redo_log import Layer, delete_layers
from weightcast.format.digest import Fingerprint, tensor_digest
from weightcast.format.spec import TensorTable
from weightcast.format.workers import ONE, Workers


class Outcome(Enum):
    """What a fold came to."""

    FOLDED = auto()
    WRONG_BITS = auto()
    """The files were changed by another program. They stay marked."""


@dataclass
class Fold:
    """One fold. It uses nothing that the mirror changes, so it can run on another thread."""

    place: MirrorFolder
    table: TensorTable
    history: History
    start: FilesState | None
    """What the files hold before."""
    goal: FilesState
    """What they hold afterwards; its times of files are set by `run`."""
    layers: tuple[Layer, ...]
    """The beginning of the log. They must stay open until the fold has ended."""

    def run(self, verify_all: bool = False, workers: Workers = ONE, report: Report = silent) -> Outcome:
        """Fold, with the readers' lock held. Each tensor that the layers touch is verified; with ``verify_all`` all."""
        again = self.place.is_changing  # then the files may hold new bits already, and the old ones are lost
        self.place.mark()
        undo = self.history.record(self.start, self.layers) if self.start and not again else None
        with (
            undo or nullcontext(),
            Checkpoint(self.place.path, aliases=dict(self.table.aliases), writable=True, interrupted=True) as files,
        ):
            if not self._write(files, undo, verify_all, workers, report):
                return Outcome.WRONG_BITS
            files.sync()
            if undo:
                undo.finish()
        self.goal = replace(self.goal, files=file_times(files))
        write_state(self.place.position, self.goal)
        delete_layers(self.layers)
        self.place.unmark()
        self.history.trim()
        return Outcome.FOLDED

    def _write(self, files: Checkpoint, undo: Undo | None, verify_all: bool, workers: Workers, report: Report) -> bool:
        """Write the layers into the files, tensor by tensor; False at the first that does not get the right bits."""
        fingerprint = Fingerprint(self.table, self.goal.digests)
        overlay = Overlay(files, [layer.reader for layer in self.layers], fresh=True)
        touched = {name for layer in self.layers for name in layer.rows}
        done, total = 0, sum(self.table[name].nbytes for name in touched)
        for spec in self.table:
            if spec.name not in touched and not verify_all:
                continue
            bits = undo.apply(spec.name, files.read(spec.name)) if undo else overlay.read(spec.name)
            if tensor_digest(bits, workers) != fingerprint[spec.name]:
                return False
            if spec.name in touched:
                files.write(spec.name, bits)
                done += spec.nbytes
                report("fold", done, total)
        return True


class FoldThread:
    """The thread on which a mirror folds beside its updates, one fold at a time. Its owner takes up each outcome.

    A process that ends without `close` ends after the fold.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightcast-fold")  # it starts with the first fold
        self._begun: tuple[Fold, Future[Outcome]] | None = None

    @property
    def is_folding(self) -> bool:
        """Whether a fold was begun and its outcome was not taken yet."""
        return self._begun is not None

    def begin(self, fold: Fold, lock: AbstractContextManager[object]) -> None:
        """Run a fold on the thread alone, since staging needs the others, and release the readers' ``lock``."""

        def work() -> Outcome:
            with lock:
                return fold.run()

        self._begun = fold, self._thread.submit(work)

    def take_ended(self) -> tuple[Fold, Future[Outcome]] | None:
        """The fold with what it came to, once, if it has ended."""
        if self._begun is None or not self._begun[1].done():
            return None
        ended, self._begun = self._begun, None
        return ended

    def finish(self) -> tuple[Fold, Future[Outcome]] | None:
        """Wait until the fold has ended, and take it; None if there is none."""
        if self._begun is not None:
            wait([self._begun[1]])
        return self.take_ended()

    def close(self) -> None:
        self._thread.shutdown()
