"""Patch objects whose parts can be replaced one at a time, and blocks written by hand."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from checkpoints import layout

from weightcast.format.spec import DTYPES


@dataclass(frozen=True)
class Row:
    name: bytes
    code: int
    shape: tuple[int, ...]
    changed: int
    blocks: tuple[tuple[int, int], ...]  # blocks left out before it, bytes
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # offset and size; rows of one name are its boxes


@dataclass(frozen=True)
class Object:
    """A patch object whose parts can be replaced one at a time."""

    meta: dict[str, Any]
    entries: dict[str, tuple[str, tuple[int, ...], bytes]]

    @classmethod
    def parse(cls, data: bytes) -> Object:
        length = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        meta = json.loads(header.pop("__metadata__")["weightcast"])
        entries = {
            name: (fields["dtype"], tuple(fields["shape"]), body[slice(*fields["data_offsets"])])
            for name, fields in header.items()
        }
        item = cls(meta, entries)
        assert item.bytes() == data
        return item

    def text(self) -> str:
        return json.dumps(self.meta, separators=(",", ":"), sort_keys=True)

    def bytes(self, metadata: dict[str, Any] | None = None) -> bytes:
        return layout(self.entries, {"weightcast": self.text()} if metadata is None else metadata)

    def header(self) -> tuple[dict[str, Any], bytes]:
        data = self.bytes()
        length = int.from_bytes(data[:8], "little")
        return json.loads(data[8 : 8 + length]), data[8 + length :]

    def stating(self, **fields: Any) -> Object:
        return replace(self, meta={**self.meta, **fields})

    def entry(self, name: str, entry: tuple[str, tuple[int, ...], bytes]) -> Object:
        return replace(self, entries={**self.entries, name: entry})

    def without(self, name: str) -> Object:
        return replace(self, entries={key: entry for key, entry in self.entries.items() if key != name})

    def listing(self, name: str, dtype: str, raw: bytes) -> Object:
        return self.entry(name, (dtype, (len(raw) * 8 // DTYPES[dtype].width,), raw))

    def table(self) -> bytes:
        return zlib.decompress(self.entries["weightcast.table"][2])

    def with_table(self, table: bytes) -> Object:
        return self.listing("weightcast.table", "U8", zlib.compress(table, 9)).stating(table=len(table))

    def rows(self) -> list[Row]:
        table, at = self.table(), 0

        def number() -> int:
            nonlocal at
            value = shift = 0
            while True:
                at, byte = at + 1, table[at]
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        names: list[bytes] = []
        digests = self.entries["weightcast.digests"][1][0]
        for _ in range(digests):
            shared, more = number(), number()
            names.append((names[-1][:shared] if names else b"") + table[at : at + more])
            at += more
        codes, ranks = ([number() for _ in names] for _ in range(2))
        shapes = [tuple(number() for _ in range(rank)) for rank in ranks]
        boxes = [number() for _ in names]
        cut = [i for i, count in enumerate(boxes) for _ in range(count)]
        offsets, shares = ([tuple(number() for _ in shapes[i]) for i in cut] for _ in range(2))
        left = zip(offsets, shares, strict=True)
        parts = [(i, None if not count else next(left)) for i, count in enumerate(boxes) for _ in range(count or 1)]
        changed, counts = ([number() for _ in parts] for _ in range(2))
        skips, sizes = ([[number() for _ in range(count)] for count in counts] for _ in range(2))
        blocks = [tuple(zip(*pair, strict=True)) for pair in zip(skips, sizes, strict=True)]
        rows = [
            Row(names[i], codes[i], shapes[i], count, some, box)
            for (i, box), count, some in zip(parts, changed, blocks, strict=True)
        ]
        assert pack(rows) == table
        return rows

    def with_rows(self, rows: list[Row]) -> Object:
        return self.with_table(pack(rows))

    def row(self, at: int, **fields: Any) -> Object:
        rows = self.rows()
        return self.with_rows([*rows[:at], replace(rows[at], **fields), *rows[at + 1 :]])

    def digests(self) -> list[bytes]:
        raw = self.entries["weightcast.digests"][2]
        return [raw[i : i + 8] for i in range(0, len(raw), 8)]

    def with_digests(self, digests: list[bytes]) -> Object:
        return self.listing("weightcast.digests", "U64", b"".join(digests))

    def with_block(self, at: int, block: bytes) -> Object:
        """The only block of row ``at``, replaced."""
        rows, raw = self.rows(), self.entries["weightcast.blocks"][2]
        before = sum(size for row in rows[:at] for _, size in row.blocks)
        after = before + rows[at].blocks[0][1]
        return self.listing("weightcast.blocks", "U8", raw[:before] + block + raw[after:]).row(
            at, blocks=((0, len(block)),)
        )


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def pack(rows: list[Row]) -> bytes:
    """The columns of 5.2."""
    table, before = b"", b""
    # Boxes of one tensor stand together, and only the first of them tells its name; two whole tensors are two.
    tensors = [list(same) for _, same in groupby(rows, lambda row: (row.name, row.box is None and id(row)))]
    for row in (same[0] for same in tensors):
        shared = next((i for i, (a, b) in enumerate(zip(before, row.name, strict=False)) if a != b), None)
        shared = min(len(before), len(row.name)) if shared is None else shared
        table += varint(shared) + varint(len(row.name) - shared) + row.name[shared:]
        before = row.name
    firsts = [same[0] for same in tensors]
    numbers = [row.code for row in firsts] + [len(row.shape) for row in firsts] + [n for r in firsts for n in r.shape]
    numbers += [sum(row.box is not None for row in same) for same in tensors]
    numbers += [n for row in rows if row.box for n in row.box[0]] + [n for row in rows if row.box for n in row.box[1]]
    numbers += [row.changed for row in rows] + [len(row.blocks) for row in rows]
    numbers += [skip for row in rows for skip, _ in row.blocks] + [size for row in rows for _, size in row.blocks]
    return table + b"".join(map(varint, numbers))


# Blocks by hand, as characters 0 and 1


def u(value: int, count: int) -> str:
    """6.2, as characters 0 and 1."""
    return "".join(str(value >> i & 1) for i in range(count))


def rice(value: int, k: int, plain: int) -> str:
    """6.3"""
    return "1" * 24 + u(value, plain) if value >> k >= 24 else "1" * (value >> k) + "0" + u(value, k)


def gaps(*values: int, k: int = 0) -> str:
    return "".join(rice(value, k, 19) for value in values)


def to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


NOTHING = u(31, 5)
K0 = u(0, 5) + u(0, 1)


def tiny_bits(**parts: str) -> str:
    """The block of the tensor `tiny` of six elements: 1 goes up by 1, 4 goes down by 3."""
    block = {
        "bands": u(1, 8),
        "changed": K0,
        "far": K0,
        "other_bands": "",
        "changed_list": gaps(1, 2, 1),
        "directions": "10",
        "far_list": gaps(1, 0),
        "reach": u(0, 1) + u(0, 9),
        "distances": rice(1, 0, 8),
    }
    return "".join({**block, **parts}.values())
