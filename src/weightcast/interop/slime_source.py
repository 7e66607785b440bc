"""Reading slime's folders (`slime_format` has the layout)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.disk.checkpoint import INDEX, Checkpoint
from weightcast.errors import CheckpointError, FormatError, UsageError, VersionError, about
from weightcast.format.diff import refuse_other_table
from weightcast.format.json import parse_json
from weightcast.format.safetensors import MAX_HEADER, Container, Entry, FileSource, open_container
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.interop.replayed import Replayed
from weightcast.interop.slime_format import library, new_hash, patched, steps_in
from weightcast.interop.step import Aliases, Step, small_files, whole_files

_MISSING = "Bring the missing folder, or move away all deltas up to the next whole checkpoint."


class SlimeSource:
    """A folder of slime's versions; ``base`` is the checkpoint that its engines started with, version 0."""

    def __init__(self, folder: Path, base: Path | None):
        self._folders = steps_in(folder)
        deltas = {number: _delta_metadata(path) for number, path in self._folders.items()}
        self._base = base
        self._deltas = {number for number, metadata in deltas.items() if metadata is not None}
        self._refuse_start(folder)
        self.numbers = (*((0,) if base is not None else ()), *self._folders)
        self._check(deltas)

    def _refuse_start(self, folder: Path) -> None:
        """An error unless the folder begins with a whole checkpoint, or with version 1 and a base was given."""
        first, path = next(iter(self._folders.items()))
        if first not in self._deltas:
            if self._base is not None:
                hint = "Leave --base out."
                raise UsageError("the folder begins with a whole checkpoint", file=str(folder), hint=hint)
        elif first != 1:
            raise FormatError(f"a delta without its base: no version {first - 1}", file=str(path), hint=_MISSING)
        elif self._base is None:
            hint = "Name the checkpoint that the engines started with: --base CHECKPOINT."
            raise FormatError("a delta without its base: no whole checkpoint before it", file=str(path), hint=hint)

    def _check(self, deltas: dict[int, dict[str, Any] | None]) -> None:
        """Check all that can be known without reading weights, before the first step is taken."""
        table: TensorTable | None = None
        if self._base is not None:
            with Checkpoint(self._base) as checkpoint:
                table = checkpoint.table
        before = 0
        for number, path in self._folders.items():
            metadata = deltas[number]
            if metadata is None:
                with Checkpoint(path) as checkpoint:
                    table = table or checkpoint.table
                    refuse_other_table(table, checkpoint.table, file=str(path), hint="All versions are of one model.")
            else:
                assert table is not None
                if before != number - 1:
                    problem = f"a delta without its base: no version {number - 1}"
                    raise FormatError(problem, file=str(path), hint=_MISSING)
                with _Delta(path, number, metadata, table):
                    pass
            before = number

    def play(self, room: Path, aliases: Aliases) -> Iterator[Step]:
        small: dict[str, Path] = {}
        state: Replayed | None = None
        if self._base is not None:
            small = small_files(self._base)
            with Checkpoint(self._base, aliases=aliases) as checkpoint:
                yield Step(0, self._base.name, checkpoint, partial(whole_files, checkpoint))
                state = Replayed(room, checkpoint, aliases)
                checkpoint.refuse_changed()
        for number, path in self._folders.items():
            if number not in self._deltas:
                with Checkpoint(path, aliases=aliases) as checkpoint:
                    small = small_files(path)
                    yield Step(number, path.name, checkpoint, partial(whole_files, checkpoint))
                    if number + 1 not in self._deltas:
                        continue
                    if state is None:
                        state = Replayed(room, checkpoint, aliases)
                    else:
                        state.replace(checkpoint)
                    checkpoint.refuse_changed()
                continue
            assert state is not None
            with _Delta(path, number, _delta_metadata(path), state.table) as delta:
                for spec in delta.specs:
                    with about(file=str(path), tensor=spec.name):
                        state.write(spec.name, delta.read(spec, state.read(spec.name)))
            yield Step(number, path.name, state, state.files(small))


def _delta_metadata(path: Path) -> dict[str, Any] | None:
    """The metadata of a delta's index; None for a whole checkpoint."""
    index = path / INDEX
    if not index.exists():
        return None
    with FileSource(index) as source, about(file=str(index)):
        if source.size > MAX_HEADER:
            raise FormatError(f"an index of {source.size} bytes is over the limit")
        raw = np.empty(source.size, np.uint8)
        source.read_into(raw.data, 0)
        value = parse_json(raw.tobytes(), "index")
    metadata = value.get("metadata") if isinstance(value, dict) else None
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        return None
    return {**metadata, "weight_map": value.get("weight_map")}


class _Delta:
    """An open version; its index, names and checksums are checked."""

    def __init__(self, path: Path, number: int, metadata: dict[str, Any] | None, table: TensorTable):
        with about(file=str(path)):
            if metadata is None:
                raise FormatError("the version was replaced while it was read")
            _refuse_other_version(metadata, number)
            self._encoding = _known(metadata, "delta_encoding", ("xor", "overwrite"))
            self._checksum = _known(metadata, "checksum_format", ("xxh3-128", "blake3", "adler32"))
            _known(metadata, "compression_format", ("zstd",))
            new_hash(self._checksum)
            library()
        self._sources: list[FileSource] = []
        self._home: dict[str, tuple[Container[FileSource], Entry]] = {}
        try:
            for file, names in sorted(_files_of(path, metadata["weight_map"]).items()):
                self._sources.append(FileSource(path / file))
                self._claim(open_container(self._sources[-1]), names, table)
        except BaseException:
            self.close()
            raise
        self.specs = [table[name] for name in sorted(self._home)]

    def _claim(self, container: Container[FileSource], names: set[str], table: TensorTable) -> None:
        with about(file=container.source.name):
            for name in sorted(names ^ container.entries.keys()):
                raise FormatError("the index and the file disagree about a tensor", tensor=name)
            for name, entry in container.entries.items():
                if name not in table:
                    raise FormatError("the checkpoint has no such tensor", tensor=name)
                if entry.dtype != "U8" or len(entry.shape) != 1:
                    raise FormatError(f"a delta of {entry.dtype}, expected U8", tensor=name)
                if name not in container.metadata:
                    raise FormatError("a delta without a checksum", tensor=name)
                self._home[name] = container, entry

    def __enter__(self) -> _Delta:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def read(self, spec: TensorSpec, old: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A tensor's bits after the version, verified by their checksum; ``old`` are those before."""
        container, entry = self._home[spec.name]
        new = patched(old.view(np.uint8), container.read(entry), self._encoding)
        hashed = new_hash(self._checksum)
        hashed.update(new.data)
        if hashed.hexdigest() != container.metadata[spec.name]:
            hint = "A version is damaged, or builds on another checkpoint than was given."
            raise FormatError("the bits do not have the checksum that the delta states", hint=hint)
        return new.view(spec.kind.word)


def _refuse_other_version(metadata: dict[str, Any], number: int) -> None:
    for key, expected in (("version", number), ("base_version", number - 1)):
        stated = metadata.get(key)
        if not isinstance(stated, str) or not re.fullmatch("[0-9]{1,12}", stated) or int(stated) != expected:
            raise FormatError(f"{key} is {str(stated)[:20]!r} in the index, expected {expected:06d}")


def _known(metadata: dict[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = metadata.get(key)
    if value not in choices:
        raise VersionError(f"{key} is {str(value)[:40]!r}", hint=f"weightcast reads {', '.join(choices)}.")
    return str(value)


def _files_of(path: Path, weight_map: Any) -> dict[str, set[str]]:
    if not isinstance(weight_map, dict):
        raise FormatError("the index has no weight_map", file=str(path))
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in (".", "..") or "\0" in file:
            raise CheckpointError("the index points outside its folder", file=str(path), tensor=name)
        files.setdefault(file, set()).add(name)
    return files
