"""Take patch objects apart and join them again with a lie inside."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from weightcast.errors import (
    WeightcastError,
)

CODECS = ("plain", "gap", "banded")
BLOCK_CODECS = ("gap", "banded")
ITEM = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8, "U64": 8}
DIGESTS, TABLE, BLOCKS = "weightcast.digests", "weightcast.table", "weightcast.blocks"

E = TypeVar("E", bound=WeightcastError)
Header = dict[str, Any]


def sealed(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header, which may be text that no honest writer makes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def opened(file: bytes) -> tuple[Header, bytes]:
    """Header and data of a safetensors file."""
    start = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:start]), file[start:]


class Stream(NamedTuple):
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Parts:
    """A patch object as its metadata and its entries, free to be changed."""

    meta: dict[str, Any]
    entries: dict[str, Stream]

    @classmethod
    def of(cls, patch: bytes) -> Parts:
        header, data = opened(patch)
        meta = json.loads(header.pop("__metadata__")["weightcast"])
        entries = {n: Stream(e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}
        return cls(meta, entries)

    def joined(self) -> bytes:
        header: Header = {"__metadata__": {"weightcast": json.dumps(self.meta)}}
        data = b""
        for name, entry in self.entries.items():
            offsets = [len(data), len(data) + len(entry.data)]
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
            data += entry.data
        return sealed(header, data)


def with_meta(patch: bytes, **fields: Any) -> bytes:
    parts = Parts.of(patch)
    parts.meta |= fields
    return parts.joined()


def with_stream(patch: bytes, name: str, data: bytes, dtype: str = "", shape: list[int] | None = None) -> bytes:
    """Another entry of that name, and everything behind it in its right place."""
    parts = Parts.of(patch)
    dtype = dtype or parts.entries[name].dtype
    parts.entries[name] = Stream(dtype, [len(data) // ITEM[dtype]] if shape is None else shape, data)
    return parts.joined()


def without(patch: bytes, name: str) -> bytes:
    parts = Parts.of(patch)
    del parts.entries[name]
    return parts.joined()


def with_field(patch: bytes, entry: str, field: str, value: Any) -> bytes:
    """Another value in the header of one entry, and everything else as it was."""
    header, data = opened(patch)
    header[entry][field] = value
    return sealed(header, data)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@dataclass
class Table:
    """The columns of SPEC 5.2, free to be changed."""

    names: list[tuple[int, bytes]]
    dtypes: list[int]
    ranks: list[int]
    sizes: list[int]
    boxes: list[int]
    offsets: list[int]
    box_sizes: list[int]
    changed: list[int]
    counts: list[int]
    skips: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, patch: bytes) -> Table:
        parts = Parts.of(patch)
        raw, at = zlib.decompress(parts.entries[TABLE].data), 0

        def number() -> int:
            nonlocal at
            begin = at
            while raw[at] > 127:
                at += 1
            at += 1
            return sum((byte & 127) << 7 * i for i, byte in enumerate(raw[begin:at]))

        def column(count: int) -> list[int]:
            return [number() for _ in range(count)]

        rows = parts.entries[DIGESTS].shape[0]
        names = []
        for _ in range(rows):
            shared, length = number(), number()
            names.append((shared, raw[at : at + length]))
            at += length
        dtypes, ranks = column(rows), column(rows)
        sizes, boxes = column(sum(ranks)), column(rows)
        along = sum(rank * count for rank, count in zip(ranks, boxes, strict=True))
        offsets, box_sizes = column(along), column(along)
        parts = sum(max(count, 1) for count in boxes)
        changed, counts = column(parts), column(parts)
        skips, lengths = column(sum(counts)), column(sum(counts))
        return cls(names, dtypes, ranks, sizes, boxes, offsets, box_sizes, changed, counts, skips, lengths)

    def raw(self) -> bytes:
        names = b"".join(varint(shared) + varint(len(rest)) + rest for shared, rest in self.names)
        columns = [value for name, value in vars(self).items() if name != "names"]
        return names + b"".join(varint(value) for column in columns for value in column)


def with_table(patch: bytes, table: Table | bytes, stated: int | None = None) -> bytes:
    raw = table if isinstance(table, bytes) else table.raw()
    return with_meta(with_stream(patch, TABLE, zlib.compress(raw)), table=len(raw) if stated is None else stated)


def with_column(patch: bytes, column: str, row: int, value: Any) -> bytes:
    """Another number (or name) in one cell of the table."""
    table = Table.of(patch)
    getattr(table, column)[row] = value
    return with_table(patch, table)


def bitstring(*fields: tuple[int, int]) -> bytes:
    """(value, width) pairs as the bytes of a block (SPEC 6.2)."""
    whole = at = 0
    for value, width in fields:
        whole |= value << at
        at += width
    return whole.to_bytes((at + 7) // 8, "little")


def rice(value: int, k: int, plain: int = 19) -> tuple[tuple[int, int], ...]:
    """The fields of a Rice code (SPEC 6.3)."""
    ones = value >> k
    if ones >= 24:
        return ((1 << 24) - 1, 24), (value, plain)
    return ((1 << ones) - 1, ones + 1), (value & ((1 << k) - 1), k)


def with_block(patch: bytes, i: int, block: bytes) -> bytes:
    """Another block ``i``, counted through all tensors, and all that speaks of its size."""
    table, parts = Table.of(patch), Parts.of(patch)
    begin = sum(table.lengths[:i])
    data = parts.entries[BLOCKS].data
    data = data[:begin] + block + data[begin + table.lengths[i] :]
    return with_stream(with_column(patch, "lengths", i, len(block)), BLOCKS, data)
