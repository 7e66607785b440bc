"""Patches between checkpoints on disk: make one, apply one, survive a kill in the middle.

`gap` and `banded` cannot be decoded once a target is half overwritten. So the decoded patch is first written beside the
target as a `plain` patch, the redo file, and synced. Then the target is overwritten. Whoever finds a redo file replays
it, as often as needed: it holds absolute bits, and applying it twice changes nothing.
"""

from __future__ import annotations

import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weightcast.disk.checkpoint import Checkpoint, redo_path
from weightcast.disk.durable import Report, disk_errors, own_copy, remove, replacing, silent, sync, sync_folder
from weightcast.disk.staged import decode_verified, fingerprint_of, overlay_tensor, stage
from weightcast.errors import CheckpointError, ResultError, UsageError, about
from weightcast.format.closing import Closing
from weightcast.format.diff import diff_tensors, refuse_other_table
from weightcast.format.digest import Fingerprint, tensor_digest
from weightcast.format.joined import joined
from weightcast.format.patch import ModelSize, refuse_other_tensor, start_of_patch
from weightcast.format.patchfile import PatchReader, PatchWriter
from weightcast.format.safetensors import FileSource
from weightcast.format.spec import elements_of
from weightcast.format.tensors import Weights, read_all
from weightcast.format.workers import ONE, Workers


@dataclass(frozen=True)
class Written:
    """A patch file that was made."""

    base: str
    result: str
    model: ModelSize
    changed: int
    nbytes: int


def write_patch(
    old: Weights, new: Weights, out: Path | str, codec: str = "banded", workers: Workers = ONE, report: Report = silent
) -> Written:
    """Write the patch from ``old`` to ``new`` to ``out``, holding a few tensors at a time.

    `CheckpointError`, and no ``out``, if a file of either changes during the work.
    """
    out = Path(out)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError("cannot write a patch there", file=str(out), hint="Name a file in a folder that exists.")
    refuse_other_table(old.table, new.table)
    model = ModelSize.of(old.table)
    bases, results, changed, done = [], [], 0, 0
    with PatchWriter(codec, out.absolute().parent) as writer:
        for specs in workers.batches(old.table, elements_of):
            names = [spec.name for spec in specs]
            olds, news = read_all(old, names, workers), read_all(new, names, workers)
            digests = [tensor_digest(before, workers) for before in olds]
            patches = diff_tensors(specs, olds, news, digests, workers)
            bases += digests
            results += [patch.digest for patch in patches]
            jobs = [(patch, before) for patch, before in zip(patches, olds, strict=True) if patch.changed]
            for coded in writer.codec.encode(jobs, workers):
                changed += coded.row.changed
                writer.add(coded)
            done += sum(spec.nbytes for spec in specs)
            report("diff", done, model.nbytes)
        base_position, result_position = (Fingerprint(old.table, tuple(d)).digest for d in (bases, results))
        with replacing(out) as file:
            nbytes = writer.finish(file, base_position, result_position, model)
            for weights in (old, new):
                if isinstance(weights, Checkpoint):
                    weights.refuse_changed()
    return Written(base_position, result_position, model, changed, nbytes)


@dataclass(frozen=True)
class Applied:
    """The digest of a target after an apply, and whether it had to change for that."""

    digest: str
    changed: bool


def apply_in_place(patch: Path | str, target: Path | str, workers: Workers = ONE, report: Report = silent) -> Applied:
    """Bring ``target`` to the patch's result.

    An interrupted apply is completed first. A target that is at the result already is left as it is.
    """
    target = Path(target)
    with FileSource(Path(patch)) as source, _Target(target) as opened, about(file=str(target)):
        reader = joined([PatchReader(source)])
        _resume(target, opened, workers, report)
        fingerprint = fingerprint_of(opened.weights, workers, report)
        if fingerprint.digest == reader.header.result:
            return Applied(fingerprint.digest, changed=False)
        redo = redo_path(target)
        stage(reader, opened.weights, fingerprint, redo, workers, report)
        _overwrite(redo, opened, report)
        remove(redo)
    return Applied(reader.header.result, changed=True)


class _Target(Closing):
    """A checkpoint that is written in place, locked against other writers."""

    def __init__(self, path: Path):
        self._path = path
        self.weights = self._opened()

    def _opened(self) -> Checkpoint:
        return Checkpoint(self._path, writable=True, interrupted=True)

    def own(self) -> None:
        """Copy files that have other hard links. The redo file must exist: the locks are released for a moment."""
        with disk_errors(self._path):
            copied = [own_copy(path, path.absolute().parent) for path in self.weights.files]
            if any(copied):
                self.weights.close()
                self.weights = self._opened()

    def close(self) -> None:
        self.weights.close()


def resume(target: Path | str, workers: Workers = ONE, report: Report = silent) -> Applied | None:
    """Complete an interrupted apply; None if there is none."""
    target = Path(target)
    with _Target(target) as opened:
        position = _resume(target, opened, workers, report)
    return Applied(position, changed=True) if position else None


def _resume(target: Path, opened: _Target, workers: Workers, report: Report) -> str | None:
    """Under the lock that ``opened`` holds: replay the redo file, if there is one, and verify the result."""
    redo = redo_path(target)
    for abandoned in redo.parent.glob(f"{redo.name}.*.partial"):
        abandoned.unlink()
    if not redo.exists():
        return None
    with FileSource(redo) as source:
        expected = PatchReader(source).header.result
    _overwrite(redo, opened, report)
    found = fingerprint_of(opened.weights, workers, report).digest
    if found != expected:
        raise ResultError(
            "replaying the interrupted apply does not lead to its result: something else changed the target",
            expected=expected,
            found=found,
            hint=f"Restore the target from a good copy and delete {redo}.",
        )
    remove(redo)
    return expected


def apply_to_copy(
    patch: Path | str, target: Path | str, out: Path | str, workers: Workers = ONE, report: Report = silent
) -> Applied:
    """Write ``target`` with the patch applied to ``out``; ``target`` stays as it is."""
    target, out = Path(target), Path(out)
    refuse_output(out)
    if target.resolve() in out.resolve().parents:
        raise UsageError("the output would be inside the target", file=str(out), hint="Name a place outside it.")
    parent = out.absolute().parent
    with (
        FileSource(Path(patch)) as source,
        Checkpoint(target) as weights,
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=parent) as workshop,
        about(file=str(target)),
    ):
        reader = joined([PatchReader(source)])
        fingerprint = fingerprint_of(weights, workers, report)
        start = None
        if fingerprint.digest != reader.header.result:
            start = start_of_patch(fingerprint, reader.header.base, {row.spec.name for row in reader.rows})
        copied = _copy(target, Path(workshop) / out.name)
        if start is not None:
            with Checkpoint(copied, writable=True) as copy:
                for tensor in decode_verified(reader, weights, start, workers, report):
                    bits = weights.read(tensor.spec.name)
                    tensor.scatter(bits)
                    copy.write(tensor.spec.name, bits)
        for path in (copied, *copied.rglob("*")):
            if not path.is_symlink():
                sync(path)
        weights.refuse_changed()
        copied.rename(out)
        sync_folder(parent)
    return Applied(reader.header.result, changed=start is not None)


def refuse_output(out: Path) -> None:
    """`UsageError` if ``out`` exists or cannot be created, before any work is done for it."""
    if out.exists() or out.is_symlink():
        raise UsageError("the output exists already", file=str(out), hint="Name another place, or remove it.")
    if not out.absolute().parent.is_dir():
        raise UsageError("the output's folder does not exist", file=str(out), hint="Create it first.")


def _copy(target: Path, out: Path) -> Path:
    """A copy with write permission, even if the original is read-only."""
    try:
        if target.is_dir():
            shutil.copytree(target, out, symlinks=True, copy_function=shutil.copy)
        else:
            shutil.copy(target, out)
        for path in (out, *out.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (stat.S_IRWXU if path.is_dir() else stat.S_IWUSR))
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"cannot copy the target: {error}", file=str(target)) from error
    return out


def _overwrite(redo: Path, opened: _Target, report: Report) -> None:
    opened.own()
    weights = opened.weights
    with FileSource(redo) as source:
        reader = PatchReader(source)
        for row in reader.rows:
            refuse_other_tensor(weights.table, row.spec)
        done, total = 0, sum(row.spec.nbytes for row in reader.rows)
        for row in reader.rows:
            bits = overlay_tensor(reader, row, weights.read(row.spec.name))
            weights.write(row.spec.name, bits)
            done += row.spec.nbytes
            report("apply", done, total)
    weights.sync()
