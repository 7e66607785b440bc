"""A training history: a folder of checkpoints, one per step, as the `Trainer` of transformers saves them.

`checkpoint-10/`, `checkpoint-20/`: each a Hugging Face checkpoint folder. Files that belong to the training (optimizer,
scheduler, random states, `trainer_state.json`) are no weights, and are not taken.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import discard, disk_errors, require_space, sync, sync_folder
from weightcast.disk.staged import fingerprint_of
from weightcast.errors import CheckpointError, ResultError, UsageError, about
from weightcast.follow.mirror import Mirror
from weightcast.follow.replica import position_of
from weightcast.format.diff import refuse_other_table
from weightcast.interop.step import Aliases, Step, refuse_link, whole_files

_NAME = re.compile(r"checkpoint-([0-9]{1,12})")


def steps_in(folder: Path) -> dict[int, Path]:
    """The checkpoint folders by their step, rising; `UsageError` for two of one step."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            refuse_link(path)
            if int(match[1]) in found:
                hint = "Move one of them away."
                raise UsageError(f"{found[int(match[1])].name} is of the same step", file=str(path), hint=hint)
            found[int(match[1])] = path
    return dict(sorted(found.items()))


class HistorySource:
    """A folder of checkpoint folders."""

    def __init__(self, folder: Path):
        self._folders = steps_in(folder)
        self.numbers = tuple(self._folders)
        first = None
        for path in self._folders.values():
            with about(file=str(path)), Checkpoint(path) as checkpoint:
                first = first or checkpoint.table
                hint = "All checkpoints of a history are of one model. Move others away."
                refuse_other_table(first, checkpoint.table, file=str(path), hint=hint)

    def play(self, room: Path, aliases: Aliases) -> Iterator[Step]:
        for number, path in self._folders.items():
            with Checkpoint(path, aliases=aliases) as checkpoint:
                yield Step(number, path.name, checkpoint, partial(whole_files, checkpoint))


class HistorySink:
    """Writes checkpoint folders: the files of the mirror, weights and small files alike."""

    def __init__(self, folder: Path):
        self._folder = folder

    def write(self, number: int, version: Mirror) -> str:
        out = self._folder / f"checkpoint-{number}"
        partial_ = self._folder / f".checkpoint-{number}.partial"
        position = position_of(version)
        assert position is not None
        if out.exists():
            raise CheckpointError("it exists already", file=str(out), hint="Name another folder.")
        with disk_errors(self._folder), Checkpoint(version.folder) as files:
            require_space(self._folder, files.table.nbytes)
            discard(partial_)
            partial_.mkdir()
            for name, path in whole_files(files).items():
                shutil.copyfile(path, partial_ / name)
                sync(partial_ / name)
        with Checkpoint(partial_, aliases=dict(version.table.aliases)) as written:
            found = fingerprint_of(written).digest
        if found != position.digest:
            raise ResultError("the files were changed by another program", expected=position.digest, found=found)
        with disk_errors(self._folder):
            sync_folder(partial_)
            partial_.rename(out)
            sync_folder(self._folder)
        return out.name
