"""Where verbs write: `diff -o` and `apply -o` keep what is there, unless --force is given; temporary copies."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from weightcast.cli.console import writing_to
from weightcast.disk.checkpoint import MIRROR, Checkpoint
from weightcast.disk.companions import is_companion
from weightcast.disk.durable import scratch
from weightcast.errors import CheckpointError, FormatError, UsageError
from weightcast.format.patch_layout import METADATA_KEY
from weightcast.format.safetensors import FileSource, open_container

T = TypeVar("T")


def check_folder(out: Path) -> None:
    """`UsageError` if the folder of ``out`` is not there: found before the work, of which nothing could be written."""
    if not out.parent.is_dir():
        raise UsageError("there is no such folder", file=str(out.parent), hint="Create it first, or name another.")


def check_output(out: Path, force: bool, inputs: Iterable[Path]) -> None:
    """`UsageError` if ``out`` is or holds one of the inputs, or exists and may not be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    inputs = list(inputs)
    if any(path.resolve().is_relative_to(out.resolve()) or _is_same(out, path) for path in inputs):
        raise UsageError("the output would replace what it is made from", file=str(out), hint="Name another.")
    if not force:
        what = "folder" if out.is_dir() else "file"
        raise UsageError(f"the {what} exists already", file=str(out), hint="Name another, or replace it with --force.")
    if out.is_file() and not out.is_symlink():
        return
    weights = [] if out.is_symlink() or (out / MIRROR).exists() else _weights_of(out)
    if not weights:
        hint = "--force replaces files and checkpoint folders, nothing else."
        raise UsageError("this is not a file or a checkpoint folder", file=str(out), hint=hint)
    _refuse_others(out, weights, inputs)


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _weights_of(folder: Path) -> list[Path]:
    """The files of the checkpoint in ``folder``; none if there is no checkpoint. A patch is not weights."""
    try:
        with Checkpoint(folder) as checkpoint:
            files = checkpoint.files
    except (CheckpointError, FormatError, UsageError):
        return []
    return [path for path in files if not _is_patch(path)]


def _is_patch(path: Path) -> bool:
    with FileSource(path) as source:
        return METADATA_KEY in open_container(source).metadata


def _refuse_others(out: Path, weights: list[Path], inputs: list[Path]) -> None:
    """`UsageError` if the folder holds files that are neither weights or companions nor written again.

    An apply copies all files of the target, so its earlier output may hold any that the target has.
    """
    for path in sorted(out.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(out)
        companion = path.parent == out and is_companion(path.name)
        if not companion and path not in weights and not any((given / name).is_file() for given in inputs):
            hint = "--force replaces files and checkpoint folders, nothing else. Name another, or move the file."
            raise UsageError("the folder holds more than a checkpoint", file=str(path), hint=hint)


def replaced(out: Path, write: Callable[[Path], T]) -> T:
    """Call ``write`` for a new name beside ``out``, and move what it wrote to ``out``; on an error ``out`` stays."""
    if not out.exists():
        return write(out)
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    made = write(new)
    if out.is_file() and new.is_file():
        new.replace(out)
        return made
    try:
        out.rename(old)
        new.rename(out)
    except BaseException:
        if not out.exists() and old.exists():
            old.rename(out)
        _delete(new)
        raise
    _delete(old)
    return made


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def scratch_folder(place: Path | None) -> Iterator[Path]:
    """A temporary folder in ``place``, or the system's; `UsageError` if there can be none."""
    if place is not None and not place.is_dir():
        raise UsageError("there is no such folder", file=str(place), hint="Create it first.")
    with ExitStack() as opened:
        with writing_to(place or Path(tempfile.gettempdir())):
            made = opened.enter_context(scratch(place))
        yield made
