"""Where each stream is in the file of a patch (SPEC 5.1)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.format.codec import plain
from weightcast.format.patch import ModelSize
from weightcast.format.safetensors import Entry, header_bytes
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row, pack_rows

FORMAT = 1
METADATA_KEY = "weightcast"
DIGESTS, BLOCKS, TABLE = "weightcast.digests", "weightcast.blocks", "weightcast.table"
WIDTHS = 8, 4, 2, 1
"""Streams of wide elements come first, so that every stream is aligned."""


@dataclass(frozen=True)
class PatchHeader:
    """What a patch states about itself."""

    codec: str
    base: str | None
    result: str
    model: ModelSize


@dataclass(frozen=True)
class Stream:
    """A stream to be written: its entry in the file, bytes of an element, and bytes in all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The bytes before the streams, and the place of each stream after them."""

    head: bytes
    entries: Mapping[str, Entry]

    @property
    def nbytes(self) -> int:
        return len(self.head) + max((entry.end for entry in self.entries.values()), default=0)


def lay_out(header: PatchHeader, table_bytes: int, streams: Iterable[Stream]) -> Layout:
    """Give each stream its place, wide elements first; ``table_bytes`` is the table's size before compression."""
    entries, at = [], 0
    for stream in sorted(streams, key=lambda stream: WIDTHS.index(stream.width)):
        entries.append(Entry(stream.name, stream.dtype, stream.shape, at, at + stream.nbytes))
        at += stream.nbytes
    model = header.model
    meta = {
        "base": header.base,
        "codec": header.codec,
        "format": FORMAT,
        "model": [model.tensors, model.elements, model.nbytes],
        "result": header.result,
        "table": table_bytes,
    }
    text = json.dumps(meta, separators=(",", ":"), sort_keys=True)
    return Layout(header_bytes(entries, {METADATA_KEY: text}), {entry.name: entry for entry in entries})


Common = dict[str, npt.NDArray[np.uint8] | npt.NDArray[np.uint64]]
"""The streams that belong to no tensor, by name."""


def common_streams(rows: Sequence[Row]) -> tuple[Common, int]:
    """The streams that belong to no tensor: digests and table; and the table's size before compression."""
    table, table_bytes = pack_rows(rows)
    by_name = {row.spec.name: row.digest for row in rows}
    digests = np.array(list(by_name.values()), "<u8")
    return {DIGESTS: digests, TABLE: np.frombuffer(table, np.uint8)}, table_bytes


def common_stream(name: str, data: npt.NDArray[np.uint8] | npt.NDArray[np.uint64]) -> Stream:
    return Stream(name, f"U{8 * data.itemsize}", data.shape, data.itemsize, data.nbytes)


def plain_streams(row: Row) -> Iterator[tuple[str, Stream]]:
    """The streams that a `plain` patch has of a tensor if its writer has the old one, by the names SPEC gives them."""
    spec = row.spec
    if plain.is_dense(spec, row.changed):
        yield "values", plain_stream(spec, "values", spec.elements, listed=False)
    else:
        for name in ("indices", "values"):
            yield name, plain_stream(spec, name, row.changed, listed=True)


def plain_stream(spec: TensorSpec, name: str, size: int, *, listed: bool) -> Stream:
    """A stream of so many elements; values are ``listed`` with their indices, or they are the whole tensor."""
    if name == "indices":
        index = plain.index_of(spec).itemsize
        return Stream(f"{spec.name}.{name}", f"I{8 * index}", (size,), index, size * index)
    dtype, shape = (element_dtype(spec), (size,)) if listed else (spec.dtype, spec.shape)
    word = spec.kind.word.itemsize
    return Stream(f"{spec.name}.{name}", dtype, shape, word, size * word)


def element_dtype(spec: TensorSpec) -> str:
    """Packed values cannot be listed one by one, so their bytes are."""
    return spec.dtype if spec.kind.per_value >= 8 else "U8"
