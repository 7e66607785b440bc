"""What a layout is to the rest: a folder whose steps can be read one after the other, and a way to write one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weightcast.disk.checkpoint import INDEX, Checkpoint
from weightcast.disk.companions import is_weights
from weightcast.errors import CheckpointError
from weightcast.follow.mirror import Mirror
from weightcast.format.tensors import Weights
from weightcast.publish.open import files_of, left_out

Aliases = Mapping[str, str]
"""Other names of tied tensors, which files do not record."""


@dataclass(frozen=True)
class Step:
    """A step of a folder: its whole weights, which may be read until the next step is asked for."""

    number: int
    name: str
    """Of its file or folder, within the folder that is read."""
    weights: Weights
    files: Callable[[], dict[str, Path]]
    """What an anchor of these weights holds, by name."""


class Source(Protocol):
    """A folder in one layout, whose names, headers and order were checked when it was opened."""

    @property
    def numbers(self) -> Sequence[int]:
        """Of all its steps, rising."""
        ...

    def play(self, room: Path, aliases: Aliases) -> Iterator[Step]:
        """All steps in order. ``room`` is an empty folder, in which one copy of the weights may be kept."""
        ...


class Sink(Protocol):
    """Writes steps in one layout into a folder, in rising order of their numbers."""

    def write(self, number: int, version: Mirror) -> str:
        """Write what a mirror holds, whose files are folded, as a step; the name of its file or folder."""
        ...


def refuse_link(path: Path) -> None:
    """`CheckpointError` for a link: in a folder from outside it would bring files from anywhere into the bucket."""
    if path.is_symlink():
        hint = "Links are not followed: copy or move the folder itself there."
        raise CheckpointError("expected a folder, found a symbolic link", file=str(path), hint=hint)


_OF_TRAINING = {"trainer_state.json"}
"""Written by trainers for one step: beside another step's weights it would be false."""


def small_files(folder: Path) -> dict[str, Path]:
    """Configuration, tokenizer and licence files of a checkpoint folder, as an anchor takes them."""
    with Checkpoint(folder) as checkpoint:
        files = files_of(checkpoint)
    left = _OF_TRAINING | {INDEX}
    return {name: path for name, path in files.items() if not is_weights(name) and name not in left}


def whole_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """What an anchor of a checkpoint's step holds: weights, and the small files that every step has."""
    return {name: path for name, path in files_of(checkpoint).items() if name not in _OF_TRAINING}


def not_taken(folder: Path) -> list[str]:
    """The files of a checkpoint folder that are in no version."""
    there = {path.name for path in folder.iterdir()}
    return sorted({*left_out(folder), *(_OF_TRAINING & there)})
