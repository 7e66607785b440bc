"""safetensors files and Hugging Face checkpoint folders as weights on disk, read a tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.errors import CheckpointError, FormatError, InterruptedApplyError, UsageError, about
from weightcast.format.closing import Closing
from weightcast.format.json import parse_json
from weightcast.format.safetensors import MAX_HEADER, Container, Entry, FileSource, header_bytes, open_container
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Bits, Weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
REDO_SUFFIX = "weightcast-redo"
MIRROR, CHANGING = ".weightcast", "changing"
"""The folder that a mirror keeps in a checkpoint folder, and the mark in it while the checkpoint's files change."""


def redo_path(target: Path) -> Path:
    """The redo file of an apply in place; it exists while the apply runs."""
    return target / f".{REDO_SUFFIX}" if target.is_dir() else target.with_name(f".{target.name}.{REDO_SUFFIX}")


FileIdentity = tuple[int, int, int, int, int]
"""Device, inode, size and both times of a file: writing to it or replacing it changes one of them."""


def identity_of(status: os.stat_result) -> FileIdentity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _identity_now(path: Path) -> FileIdentity | None:
    """None if the file is gone. The file is opened, since a network file system asks its server only then."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return identity_of(os.fstat(fd))
    finally:
        os.close(fd)


class Checkpoint(Closing):
    """An open checkpoint: a safetensors file, or a folder of them with or without an index.

    Each read of a tensor returns new memory. Close the checkpoint, or use it in a `with` block.

    >>> from weightcast.disk.checkpoint import save
    >>> save(wc.Arrays({"w": np.arange(3, dtype=np.float32)}), Path("."))
    >>> with wc.Checkpoint("model.safetensors") as checkpoint:
    ...     checkpoint.read("w").view(np.float32)
    array([0., 1., 2.], dtype=float32)
    """

    def __init__(
        self,
        path: Path | str,
        *,
        aliases: Mapping[str, str] | None = None,
        writable: bool = False,
        interrupted: bool = False,
    ):
        """Open the files and check all headers; ``interrupted`` permits a checkpoint that an apply left half changed.

        Files do not record the other names of tied tensors: pass them as ``aliases``.
        """
        self.path = path = Path(path)
        with ExitStack() as opening:
            self._containers: list[Container[FileSource]] = []
            self._home: dict[str, Container[FileSource]] = {}
            self._watched: dict[Path, FileIdentity] = {}
            if (path / INDEX).exists():
                self.watch(path / INDEX)
            for file, expected in _files_of(path).items():
                source = FileSource(file, writable=writable)
                opening.callback(source.close)
                self._watched[file] = identity_of(os.fstat(source.fd))
                self._containers.append(open_container(source))
                self._claim(self._containers[-1], expected)
            others = set(self.files) if path.is_dir() else {path.parent}
            _refuse_interrupted(others if interrupted else {path, *others})
            specs = (
                TensorSpec(name, entry.dtype, entry.shape)
                for container in self._containers
                for name, entry in container.entries.items()
            )
            self.table = TensorTable.of(specs, aliases)
            self._close = opening.pop_all().close

    def _claim(self, container: Container[FileSource], expected: set[str] | None) -> None:
        file, names = container.source.name, container.entries.keys()
        if expected is not None and names != expected:
            raise CheckpointError(
                "the index and the file disagree about a tensor",
                file=file,
                tensor=min(names ^ expected),
                hint="Copy or download the checkpoint again.",
            )
        for name in names:
            if name in self._home:
                other = self._home[name].source.name
                raise CheckpointError(f"a tensor is in {other} too", file=file, tensor=name)
            self._home[name] = container

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors."""
        return [Path(container.source.name) for container in self._containers]

    def watch(self, path: Path) -> None:
        """Let `refuse_changed` check another file that belongs to the checkpoint."""
        self._watched[path] = identity_of(path.stat())

    def refuse_changed(self) -> None:
        """`CheckpointError` if a file was written to or replaced since it was opened.

        Two writes within one tick of the file system's clock look like one; saving a checkpoint takes longer.
        """
        for path, seen in self._watched.items():
            if _identity_now(path) != seen:
                hint = "Try again once no program writes to it, or save each checkpoint into a folder of its own."
                raise CheckpointError("the file was changed while it was being read", file=str(path), hint=hint)

    def read(self, name: str) -> Bits:
        """A tensor's bits, in memory of their own."""
        container = self._home[name]
        return container.read(container.entries[name]).view(self.table[name].kind.word)

    def read_span(self, name: str, first: int, out: Bits) -> None:
        """Fill ``out`` with a tensor's bits from element ``first`` on."""
        container = self._home[name]
        at = container.data_start + container.entries[name].begin + first * out.itemsize
        container.source.read_into(out.view(np.uint8).data, at)

    def write(self, name: str, bits: Bits) -> None:
        """Replace a tensor's bits; durable after `sync`."""
        container = self._home[name]
        entry, source = container.entries[name], container.source
        size = entry.end - entry.begin
        if bits.nbytes != size:
            raise UsageError(f"expected {size} bytes, got {bits.nbytes}", file=source.name, tensor=name)
        source.write_from(bits.view(np.uint8).data, container.data_start + entry.begin)

    def sync(self) -> None:
        for container in self._containers:
            container.source.sync()

    def close(self) -> None:
        self._close()


def save(weights: Weights, folder: Path, name: str = SINGLE) -> None:
    """Write ``weights`` into ``folder`` as a checkpoint of one file, called ``name``."""
    entries, at = [], 0
    for spec in sorted(weights.table, key=lambda spec: -spec.kind.width):
        entries.append(Entry(spec.name, spec.dtype, spec.shape, at, at + spec.nbytes))
        at += spec.nbytes
    with (folder / name).open("xb") as file:
        file.write(header_bytes(entries, {"format": "pt"}))
        for entry in entries:
            file.write(weights.read(entry.name).data)


def _refuse_interrupted(targets: set[Path]) -> None:
    """A folder and a file in it name the same weights: either may have been given to `apply`."""
    for target in sorted(targets):
        if redo_path(target).exists():
            raise InterruptedApplyError(
                "an apply in place was interrupted here: the weights are half changed",
                file=str(target),
                hint=f"Finish it with `weightcast apply --resume {target}`.",
            )
        if (target / MIRROR / CHANGING).exists():
            raise InterruptedApplyError(
                "a mirror was interrupted while it wrote here: the weights are half changed",
                file=str(target),
                hint=f"Finish it with `weightcast pull URL {target}`.",
            )


def _files_of(path: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, each with the tensors that the index puts there, if there is an index."""
    if not path.is_dir():
        if not path.exists() and not path.is_symlink():
            raise CheckpointError("there is no such file or folder", file=str(path), hint="Check the path.")
        return {path: None}
    if (path / INDEX).exists():
        return {path / file: names for file, names in _read_index(path / INDEX).items()}
    if (path / SINGLE).exists():
        return {path / SINGLE: None}
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            "the folder has no safetensors files",
            file=str(path),
            hint=f"A checkpoint folder has {SINGLE}, or shards with {INDEX}.",
        )
    return dict.fromkeys(found)


def _read_index(path: Path) -> dict[str, set[str]]:
    with FileSource(path) as source:
        if source.size > MAX_HEADER:
            raise FormatError(f"an index of {source.size} bytes is over the limit", file=str(path))
        raw = np.empty(source.size, np.uint8)
        source.read_into(raw.data, 0)
    with about(file=str(path)):
        index: Any = parse_json(raw.tobytes(), "index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError("the index has no weight_map", file=str(path))
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in (".", "..") or "\0" in file:
            raise CheckpointError(
                f"the index points outside its folder, to {file!r}",
                file=str(path),
                tensor=name,
                hint="Do not use this checkpoint unless you know where it comes from.",
            )
        files.setdefault(file, set()).add(name)
    return files
