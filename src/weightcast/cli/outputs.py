"""Where `diff -o` and `apply -o` write: what is there already stays, unless --force is given."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from weightcast.disk.checkpoint import MIRROR
from weightcast.errors import UsageError

T = TypeVar("T")

Force = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]


def check_output(out: Path, force: bool, inputs: Iterable[Path]) -> None:
    """`UsageError` if ``out`` is one of the inputs, or exists and may not be replaced."""
    if out.exists() and any(path.exists() and out.samefile(path) for path in inputs):
        raise UsageError("the output would replace what it is made from", file=str(out), hint="Name another.")
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        what = "folder" if out.is_dir() else "file"
        raise UsageError(f"the {what} exists already", file=str(out), hint="Name another, or replace it with --force.")
    if out.is_symlink() or not (out.is_file() or _is_checkpoint(out)):
        hint = "--force replaces files and checkpoint folders, nothing else."
        raise UsageError("this is not a file or a checkpoint folder", file=str(out), hint=hint)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds weights and is not a mirror."""
    return not (folder / MIRROR).exists() and any(folder.glob("*.safetensors"))


def replaced(out: Path, write: Callable[[Path], T]) -> T:
    """Call ``write`` for a new name beside ``out``, and move what it wrote to ``out``; on an error ``out`` stays."""
    if not out.exists():
        return write(out)
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    made = write(new)
    if out.is_file() and new.is_file():
        new.replace(out)
        return made
    out.rename(old)
    new.rename(out)
    shutil.rmtree(old) if old.is_dir() else old.unlink()
    return made
