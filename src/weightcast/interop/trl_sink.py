"""Writing the layout of TRL's drafts (`trl_source` has it), as the last draft does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from weightcast.disk.durable import disk_errors, replacing
from weightcast.errors import UsageError
from weightcast.follow.mirror import Mirror
from weightcast.format.diff import diff_tensors
from weightcast.format.safetensors import Entry, header_bytes
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits
from weightcast.interop.replayed import Replayed
from weightcast.interop.trl_source import ANCHORS, DELTAS, EMPTY, GAPS

_MOST = int(np.iinfo(np.int32).max)


class TrlSink:
    """Writes an anchor, then deltas, as the last draft does: `NAME.idx` as gaps, `NAME.val`."""

    def __init__(self, folder: Path, room: Path):
        self._folder, self._room = folder, room
        self._before: Replayed | None = None
        self._last = -1

    def write(self, number: int, version: Mirror) -> str:
        weights = version.weights
        assert weights is not None
        if self._before is None:
            refuse_unfit(version.table)
        elif number != self._last + 1:
            hint = "Export them in another layout, or one step alone with --step."
            raise UsageError(f"TRL's steps are consecutive, and step {number} follows {self._last}", hint=hint)
        kind = ANCHORS if self._before is None else DELTAS
        path = self._folder / kind / f"step_{number:06d}.safetensors"
        with disk_errors(self._folder):
            path.parent.mkdir(exist_ok=True)
            if self._before is None:
                self._before = Replayed(self._room, weights)
                self._write_anchor(path, number, self._before)
            else:
                self._write_delta(path, number, self._before, weights.read)
        self._last = number
        return f"{kind}/{path.name}"

    def _write_anchor(self, path: Path, number: int, weights: Replayed) -> None:
        entries, at = [], 0
        for spec in weights.table:
            entries.append(Entry(spec.name, spec.dtype, spec.shape, at, at + spec.nbytes))
            at += spec.nbytes
        changed = weights.table.elements
        with replacing(path) as file:
            file.write(header_bytes(entries, _described(number, False, weights.table, len(entries), changed)))
            for entry in entries:
                file.write(weights.read(entry.name).data)

    def _write_delta(self, path: Path, number: int, before: Replayed, read: Callable[[str], Bits]) -> None:
        with ExitStack() as spools:
            wide, narrow = (spools.enter_context(_Spool(self._room)) for _ in range(2))
            tensors = changed = 0
            for spec in before.table:
                new = read(spec.name)
                (patch,) = diff_tensors([spec], [before.read(spec.name)], [new], [0])
                if not patch.changed:
                    continue
                gaps = np.diff(patch.indices, prepend=-1) - 1
                fits = int(gaps.max()) < 1 << 16
                kind = "U16" if fits else "U32"
                (narrow if fits else wide).add(f"{spec.name}.idx", kind, gaps.astype(GAPS[kind]))
                narrow.add(f"{spec.name}.val", spec.dtype, patch.new)
                before.overwrite(spec.name, patch.indices, patch.new)
                tensors, changed = tensors + 1, changed + patch.changed
            if not tensors:
                narrow.add(EMPTY, "I32", np.zeros(1, "<i4"))
            # Four-byte elements come first, so that all are aligned: not every reader copies.
            entries = [*wide.entries(0), *narrow.entries(wide.size)]
            with replacing(path) as file:
                file.write(header_bytes(entries, _described(number, True, before.table, tensors, changed)))
                for spool in (wide, narrow):
                    spool.copy_to(file)


def refuse_unfit(table: TensorTable) -> None:
    """`UsageError` for a table with a tensor that this layout cannot hold exactly."""
    for spec in table:
        if spec.dtype != "BF16":
            hint = "TRL's drafts round every tensor to bf16. Export as a history instead, or publish in BF16."
            raise UsageError(f"the layout has bf16 alone, and the tensor is {spec.dtype}", tensor=spec.name, hint=hint)
        if spec.elements > _MOST:
            raise UsageError("the layout's indices have 32 bits, too few for the tensor", tensor=spec.name)


def _described(number: int, sparse: bool, table: TensorTable, tensors: int, changed: int) -> dict[str, str]:
    """The metadata of the last draft."""
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": str(sparse),
        "model_version": str(number),
        "num_changed_params": str(tensors),
        "total_changed_elements": str(changed),
        "total_elements": str(table.elements),
        "sparsity": str(1.0 - changed / max(table.elements, 1)),
        "encoding": "gap_delta",
    }


class _Spool:
    """Arrays on their way into a file whose header must say first how large they are."""

    def __init__(self, room: Path):
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=room)  # noqa: SIM115 - closed by `__exit__`
        self._entries: list[Entry] = []
        self.size = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, dtype: str, data: np.ndarray[Any, Any]) -> None:
        self._file.write(np.ascontiguousarray(data).data)
        self._entries.append(Entry(name, dtype, (data.size,), self.size, self.size + data.nbytes))
        self.size += data.nbytes

    def entries(self, start: int) -> Iterator[Entry]:
        for entry in self._entries:
            yield replace(entry, begin=start + entry.begin, end=start + entry.end)

    def copy_to(self, file: IO[bytes]) -> None:
        self._file.seek(0)
        shutil.copyfileobj(self._file, file)
