"""A checkpoint from the boxes that ranks of a sharded training wrote, each into a file of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weightcast.disk.checkpoint import SINGLE
from weightcast.disk.durable import replacing, require_space
from weightcast.errors import FormatError
from weightcast.format.boxes import Place, natural_strides
from weightcast.format.joined import JoinedPatch
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import Entry, ReopenedSource, header_bytes
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits


def assemble(files: Sequence[Path], table: TensorTable, folder: Path) -> Path:
    """Write ``files`` into ``folder`` as a checkpoint of one file, durable, and delete them.

    They are patches without a base, whose boxes cover the table; `FormatError` if they do not. Their bits are not
    verified here. One box is in memory at a time.
    """
    if any(path.name == SINGLE for path in files):
        raise FormatError("a file of boxes has the name of the checkpoint that is made of it", file=SINGLE)
    readers = [PatchReader(ReopenedSource(path)) for path in files]
    _refuse_incomplete(readers, table)
    entries, at = {}, 0
    for spec in sorted(table, key=lambda spec: -spec.kind.width):
        entries[spec.name] = Entry(spec.name, spec.dtype, spec.shape, at, at + spec.nbytes)
        at += spec.nbytes
    head = header_bytes(entries.values(), {"format": "pt"})
    require_space(folder, len(head) + at)
    with replacing(folder / SINGLE) as file:
        file.write(head)
        file.flush()
        os.truncate(file.fileno(), len(head) + at)
        for reader in readers:
            for row in reader.rows:
                bits: Bits = reader.coded(row).streams["values"]
                first = len(head) + entries[row.spec.name].begin
                for begin, run in _runs(row.place, bits):
                    _write_at(file.fileno(), run, first + begin * bits.itemsize)
    for path in files:
        path.unlink()
    return folder / SINGLE


def _refuse_incomplete(readers: Sequence[PatchReader], table: TensorTable) -> None:
    """`FormatError` unless the boxes are those of the table's tensors, and as many elements as these have."""
    if JoinedPatch(readers).header.base is not None:
        raise FormatError("an anchor holds a patch that needs a base")
    found: Counter[str] = Counter()
    for row in (row for reader in readers for row in reader.rows):
        if row.spec.name not in table or table[row.spec.name] != row.spec:
            raise FormatError("an anchor holds a tensor that the channel does not have", tensor=row.spec.name)
        found[row.spec.name] += row.place.part.elements
    for spec in table:
        if found[spec.name] != spec.elements:
            raise FormatError(f"boxes hold {found[spec.name]} of {spec.elements} elements", tensor=spec.name)


def _runs(place: Place, bits: Bits) -> Iterator[tuple[int, Bits]]:
    """The runs of a box that are in one piece in the tensor, with the flat index of the first element of each."""
    if place.first is not None:
        yield place.first, bits
        return
    shape, strides = place.box.shape, natural_strides(place.spec.shape)
    inner = next(axis for axis in reversed(range(len(shape))) if shape[axis] != place.spec.shape[axis])
    length = int(np.prod(shape[inner:], dtype=np.int64))
    for i in range(bits.size // length):
        at, rest = place.box.offset[inner] * strides[inner], i
        for axis in reversed(range(inner)):
            rest, along = divmod(rest, shape[axis])
            at += (along + place.box.offset[axis]) * strides[axis]
        yield at, bits[i * length : (i + 1) * length]


def _write_at(fd: int, run: Bits, at: int) -> None:
    left = memoryview(np.ascontiguousarray(run).view(np.uint8).data)
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written
