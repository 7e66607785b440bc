"""The table inside a patch: one row per changed tensor, column by column, compressed (SPEC 5.2)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.format.kernels.bands import BLOCK
from weightcast.format.spec import DTYPES, MAX_ELEMENTS, TensorSpec

MAX_ROWS = 1 << 18
MAX_TABLE = 1 << 24
"""Bytes of a table before compression, and of all its names together."""

MAX_NAME = 4096
MAX_DIMENSIONS = 16

_DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
_DTYPE_NAMES = tuple(DTYPES)


@dataclass(frozen=True)
class Row:
    """One changed tensor: how many elements changed, its digest afterwards, and its blocks as (ordinal, bytes)."""

    spec: TensorSpec
    changed: int
    digest: int
    blocks: tuple[tuple[int, int], ...] = field(default=())


def pack_rows(rows: Sequence[Row]) -> tuple[bytes, int]:
    """The compressed table, and its size before."""
    names, before, total = bytearray(), b"", 0
    for row in rows:
        name = row.spec.name.encode()
        if len(name) > MAX_NAME or len(row.spec.shape) > MAX_DIMENSIONS or math.prod(row.spec.shape) > MAX_ELEMENTS:
            raise UsageError("the tensor's name or shape is over the format's limits", tensor=row.spec.name[:80])
        total += len(name)
        shared = _shared_prefix(before, name)
        names += _varints([shared, len(name) - shared]) + name[shared:]
        before = name
    numbers = _varints(
        [_DTYPE_CODES[row.spec.dtype] for row in rows]
        + [len(row.spec.shape) for row in rows]
        + [size for row in rows for size in row.spec.shape]
        + [row.changed for row in rows]
        + [len(row.blocks) for row in rows]
        + [skipped for row in rows for skipped in _skips([ordinal for ordinal, _ in row.blocks])]
        + [length for row in rows for _, length in row.blocks]
    )
    table = bytes(names) + numbers
    if max(len(table), total) > MAX_TABLE or len(rows) > MAX_ROWS:
        raise UsageError(f"{len(rows)} tensors with their names and shapes are over the format's limits")
    return zlib.compress(table, 9), len(table)


def unpack_rows(packed: bytes, size: int, digests: Sequence[int], block_bytes: int | None) -> tuple[Row, ...]:
    """Read a table of ``size`` bytes with one row per digest; `FormatError` for anything that does not add up.

    ``block_bytes`` is the size of all blocks together, or None for a codec without blocks.
    """
    if not 0 <= size <= MAX_TABLE:
        raise FormatError(f"the table says it has {size} bytes, over the limit of {MAX_TABLE}")
    if len(digests) > MAX_ROWS:
        raise FormatError(f"the table says it has {len(digests)} rows, over the limit of {MAX_ROWS}")
    table = _inflate(packed, size)
    names, at = _names(table, len(digests))
    numbers = _Numbers(table[at:], len(digests) * (4 + MAX_DIMENSIONS) + 2 * (block_bytes or 0))
    dtypes = [_dtype_name(code) for code in numbers.take(len(digests))]
    ranks = numbers.take(len(digests))
    if any(rank > MAX_DIMENSIONS for rank in ranks):
        raise FormatError("a shape has too many dimensions")
    shapes = [tuple(numbers.take(rank)) for rank in ranks]
    changed = numbers.take(len(digests))
    block_counts = numbers.take(len(digests))
    skips = [numbers.take(count) for count in block_counts]
    lengths = [numbers.take(count) for count in block_counts]
    numbers.done()
    rows = []
    for i, name in enumerate(names):
        ordinals = list(accumulate(skips[i], lambda before, skipped: before + 1 + skipped))
        row = Row(
            _spec(name, dtypes[i], shapes[i]), changed[i], digests[i], tuple(zip(ordinals, lengths[i], strict=True))
        )
        _check_row(row, block_bytes is not None)
        rows.append(row)
    return tuple(rows)


def _shared_prefix(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _check_row(row: Row, blocks: bool) -> None:
    elements = row.spec.elements
    if not 0 < row.changed <= elements:
        raise FormatError(f"the table says {row.changed} of {elements} elements changed", tensor=row.spec.name)
    if bool(row.blocks) != blocks:
        raise FormatError("a row has blocks its codec has not, or none where it must", tensor=row.spec.name)
    if row.blocks and row.blocks[-1][0] >= -(-elements // BLOCK):
        raise FormatError("a block lies outside its tensor", tensor=row.spec.name)
    if any(length < 1 for _, length in row.blocks):
        raise FormatError("a block is empty", tensor=row.spec.name)


def _inflate(packed: bytes, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        table = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise FormatError(f"the table cannot be decompressed: {error}") from None
    if len(table) != size or not stream.eof or stream.unused_data:
        raise FormatError("the table has another size than stated")
    return table


def _names(table: bytes, count: int) -> tuple[list[str], int]:
    names: list[str] = []
    before, at, total = b"", 0, 0
    for _ in range(count):
        shared, at = _varint(table, at)
        length, at = _varint(table, at)
        total += shared + length
        if shared > len(before) or at + length > len(table) or shared + length > MAX_NAME or total > MAX_TABLE:
            raise FormatError("a name in the table is impossible or too long")
        name = before[:shared] + table[at : at + length]
        at += length
        if names and name <= before:
            raise FormatError("names in the table are unsorted or repeated")
        try:
            names.append(name.decode())
        except UnicodeDecodeError:
            raise FormatError("a name in the table is not UTF-8") from None
        before = name
    return names, at


def _dtype_name(code: int) -> str:
    if code >= len(_DTYPE_NAMES):
        raise VersionError(f"dtype code {code} is not known", hint="A newer release may know it.")
    return _DTYPE_NAMES[code]


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    if math.prod(shape) > MAX_ELEMENTS or math.prod(shape) * DTYPES[dtype].per_value % 8:
        raise FormatError("a shape in the table is impossible", tensor=name)
    return TensorSpec(name, dtype, shape)


# -- variable-length integers: seven bits a byte, least significant first, the top bit means "more" ----------------


def _varints(values: Sequence[int]) -> bytes:
    out = bytearray()
    for value in values:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 63, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise FormatError("a number in the table is cut off or too large")


def _skips(ordinals: list[int]) -> list[int]:
    return [b - a - 1 for a, b in pairwise([-1, *ordinals])]


class _Numbers:
    """All varints of a byte string, in order; at most ``most`` of them, so that a lie cannot take memory."""

    def __init__(self, data: bytes, most: int):
        raw = np.frombuffer(data, np.uint8)
        if np.count_nonzero(raw < 128) > most:
            raise FormatError("the table continues after its last row")
        ends = np.flatnonzero(raw < 128)
        if raw.size and (ends.size == 0 or ends[-1] != raw.size - 1):
            raise FormatError("a number in the table is cut off or too large")
        starts = np.concatenate([[0], ends[:-1] + 1]) if ends.size else ends
        widths = ends - starts + 1
        if ends.size and widths.max() > 9:
            raise FormatError("a number in the table is cut off or too large")
        self._values: npt.NDArray[np.int64] = np.zeros(ends.size, np.int64)
        for i in range(int(widths.max()) if ends.size else 0):
            more = np.flatnonzero(widths > i)
            self._values[more] |= (raw[starts[more] + i].astype(np.int64) & 127) << (7 * i)
        self._at = 0

    def take(self, count: int) -> list[int]:
        if count > self._values.size - self._at:
            raise FormatError("the table ends too early")
        self._at += count
        values: list[int] = self._values[self._at - count : self._at].tolist()
        return values

    def done(self) -> None:
        if self._at != self._values.size:
            raise FormatError("the table continues after its last row")
