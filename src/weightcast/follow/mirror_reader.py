"""Reading a mirror that another process may own: its files and its log, under the readers' lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.staged import Overlay
from weightcast.errors import CheckpointError
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_state import read_state
from weightcast.follow.redo_log import RedoLog, read_log_name
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Weights


@dataclass(frozen=True)
class Held:
    """What a folder holds: its files, with the log of a mirror laid over them."""

    files: Checkpoint
    weights: Weights
    """The files with the log laid over them."""
    files_at: Position | None = None
    """The version of the files alone, which any other tool gets; None if the folder does not say."""
    log_at: Position | None = None
    """The version that the log leads to; None without a log."""
    fingerprint: Fingerprint | None = None
    """Of ``weights``, as the mirror remembers it; None if the folder is not a mirror of the channel."""

    @property
    def position(self) -> Position | None:
        """The version of ``weights``, as the mirror remembers it."""
        return self.log_at or self.files_at


@contextmanager
def reading(folder: Path | str) -> Iterator[Checkpoint]:
    """The files of a mirror, which do not change meanwhile. They may lag the newest version."""
    place = MirrorFolder(Path(folder))
    if not place.inner.is_dir():
        hint = "`weightcast pull URL FOLDER` makes one."
        raise CheckpointError("the folder is not a mirror", file=str(folder), hint=hint)
    with place.shared(), Checkpoint(folder) as files:
        yield files


@contextmanager
def reading_held(folder: Path, table: TensorTable, channel: str | None = None) -> Iterator[Held]:
    """The weights of a checkpoint folder, or of a mirror with its log; they do not change meanwhile.

    `UsageError` if the folder holds a model of another table, `FormatError` if a patch of the log is damaged. With
    ``channel``, the id of one, a mirror of another channel is read as a checkpoint folder.
    """
    place = MirrorFolder(folder)
    lock = place.shared() if place.inner.is_dir() else nullcontext()
    with (
        lock,
        Checkpoint(folder, aliases=dict(table.aliases)) as files,
        closing(RedoLog(place.log)) as log,
    ):
        hint = "The folder holds another model than the channel."
        refuse_other_table(table, files.table, file=str(folder), hint=hint)
        state = read_state(place.position)
        fingerprint = state.fingerprint(table, channel) if state else None
        if state is None or fingerprint is None:
            yield Held(files, files)
            return
        version = state.position.version
        log.open(version, fingerprint, discard_rest=False)
        _refuse_damaged(log)
        log_at = log.layers[-1].position if log else None
        _, reached = log.end or (version, fingerprint)
        yield Held(files, Overlay(files, log.readers, fresh=True), state.position, log_at, reached)


def _refuse_damaged(log: RedoLog) -> None:
    """`FormatError` for a patch that cannot be read; one that can, but does not lead on, is a leftover."""
    for path in sorted(set(log.folder.glob("*.safetensors")) - {layer.path for layer in log.layers}):
        with FileSource(path) as source:
            PatchReader(source)


@dataclass(frozen=True)
class MirrorStatus:
    """What a mirror's records say; neither the channel nor the weights are read."""

    url: str
    files_at: Position
    log_at: int | None
    """The version that the log leads to; None without a log."""
    is_changing: bool
    """Whether the files are being written, or were when a process was killed: then they must not be loaded."""


def mirror_status(folder: Path) -> MirrorStatus | None:
    """None if ``folder`` is not a mirror, or has no version yet."""
    place = MirrorFolder(folder)
    state = read_state(place.position)
    if state is None:
        return None
    at = state.position.version
    for path in sorted(place.log.glob("*.safetensors")):
        step = read_log_name(path.name)
        if step is not None and step[0] == at:
            at = step[1]
    log_at = at if at != state.position.version else None
    return MirrorStatus(state.url, state.position, log_at, place.is_changing)
