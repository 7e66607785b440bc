"""The table inside a patch: one row per changed tensor, column by column, compressed (SPEC 5.2)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise

import numpy as np

from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.format.boxes import Box, Place, whole
from weightcast.format.kernels.bands import BLOCK
from weightcast.format.spec import DTYPES, MAX_ELEMENTS, TensorSpec

MAX_ROWS = 1 << 18
MAX_TABLE = 1 << 24
"""Bytes of a table before compression, and of all its names together."""

MAX_NAME = 4096
MAX_DIMENSIONS = 16
MAX_VARINT = 9
"""Bytes of a number."""

_AT_ONCE = 1 << 16
"""Numbers that are read in one go."""

MAX_OFFSETS = 20 * MAX_DIMENSIONS
"""Characters of the offsets in a label are fewer."""

_DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
_DTYPE_NAMES = tuple(DTYPES)


@dataclass(frozen=True)
class Row:
    """One changed tensor, or a box of one: how many elements changed there, and its blocks as (ordinal, bytes)."""

    spec: TensorSpec
    changed: int
    digest: int
    """Of the whole tensor after the patch, and after all other objects of its version."""
    blocks: tuple[tuple[int, int], ...] = ()
    box: Box | None = None
    """None for all of the tensor."""

    @cached_property
    def place(self) -> Place:
        return Place(self.spec, self.box or whole(self.spec.shape))

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What distinguishes the rows of a table; unlike labels, it holds no copy of the name."""
        return self.spec.name, () if self.box is None else self.box.offset

    @property
    def elements(self) -> int:
        """Of the tensor, or of the box."""
        return self.spec.elements if self.box is None else self.box.elements

    @property
    def part(self) -> Row:
        """The row as that of a tensor of the box's shape: what codecs see.

        It has the tensor's name, not the label: a small file may list 2¹⁸ boxes of a tensor whose name is long.
        """
        if self.box is None:
            return self
        return Row(TensorSpec(self.spec.name, self.spec.dtype, self.box.shape), self.changed, self.digest, self.blocks)


def order_of(place: Place) -> tuple[bytes, tuple[int, ...]]:
    """What rows are sorted by."""
    return place.spec.name.encode(), place.box.offset


def pack_rows(rows: Sequence[Row]) -> tuple[bytes, int]:
    """The compressed table, and its size before compression."""
    names, before, total = bytearray(), b"", 0
    taken = _shared_label(rows)
    if taken is not None:
        hint = "Cut the tensor in another way, or put the two into different objects."
        raise UsageError("a tensor has the label of another one's box", tensor=taken, hint=hint)
    tensors = [list(same) for _, same in groupby(rows, lambda row: row.spec.name)]
    specs = [same[0].spec for same in tensors]
    boxes = [row.box for row in rows if row.box is not None]
    for spec in specs:
        name = spec.name.encode()
        if len(name) > MAX_NAME or len(spec.shape) > MAX_DIMENSIONS or math.prod(spec.shape) > MAX_ELEMENTS:
            raise UsageError("the tensor's name or shape is over the format's limits", tensor=spec.name[:80])
        total += len(name)
        shared = _shared_prefix(before, name)
        names += _varints([shared, len(name) - shared]) + name[shared:]
        before = name
    numbers = _columns(
        [_DTYPE_CODES[spec.dtype] for spec in specs]
        + [len(spec.shape) for spec in specs]
        + [size for spec in specs for size in spec.shape]
        + [sum(row.box is not None for row in same) for same in tensors]
        + [start for box in boxes for start in box.offset]
        + [size for box in boxes for size in box.shape]
        + [row.changed for row in rows]
        + [len(row.blocks) for row in rows]
        + [b - a - 1 for row in rows for a, b in pairwise([-1, *(ordinal for ordinal, _ in row.blocks)])]
        + [length for row in rows for _, length in row.blocks]
    )
    table = bytes(names) + numbers
    if max(len(table), total) > MAX_TABLE or len(rows) > MAX_ROWS:
        raise UsageError(f"{len(rows)} tensors with their names and shapes are over the format's limits")
    return zlib.compress(table, 9), len(table)


def unpack_rows(packed: bytes, size: int, digests: Sequence[int], block_bytes: int | None) -> tuple[Row, ...]:
    """Read a table of ``size`` bytes with one tensor per digest; `FormatError` if anything in it is inconsistent.

    ``block_bytes`` is the size of all blocks together, or None for a codec without blocks.
    """
    if not 0 <= size <= MAX_TABLE:
        raise FormatError(f"the table says it has {size} bytes, over the limit of {MAX_TABLE}")
    tensors = len(digests)
    if tensors > MAX_ROWS:
        raise FormatError(f"the table says it has {tensors} tensors, over the limit of {MAX_ROWS}")
    table = _inflate(packed, size)
    names, at = _names(table, tensors)
    numbers = _Numbers(table, at)
    dtypes = [_dtype_name(code) for code in numbers.take(tensors)]
    ranks = numbers.take(tensors)
    if any(rank > MAX_DIMENSIONS for rank in ranks):
        raise FormatError("a shape has too many dimensions")
    shapes = numbers.take_each(ranks)
    specs = [_spec(*one) for one in zip(names, dtypes, shapes, strict=True)]
    parts = _parts(numbers, specs)
    changed = numbers.take(len(parts))
    block_counts = numbers.take(len(parts))
    for (tensor, _), count in zip(parts, block_counts, strict=True):
        if bool(count) != (block_bytes is not None):
            problem = "a row has blocks, its codec has none" if count else "a row has no blocks, its codec needs some"
            raise FormatError(problem, tensor=names[tensor])
    if sum(block_counts) > (block_bytes or 0):  # before memory is taken for them
        raise FormatError("the table lists more blocks than there are bytes of them")
    skips, lengths = (numbers.take_each(block_counts) for _ in range(2))
    if not numbers.at_end:
        raise FormatError("the table continues after its last row")
    found = []
    for i, (tensor, box) in enumerate(parts):
        ordinals = accumulate(skips[i], lambda before, skipped: before + 1 + skipped)
        blocks = tuple(zip(ordinals, lengths[i], strict=True))
        found.append(Row(specs[tensor], changed[i], digests[tensor], blocks, box))
        _check_row(found[-1])
    for name, same in groupby(found, lambda row: row.spec.name):
        refuse_other_boxes(name, list(same))
    taken = _shared_label(found)
    if taken is not None:
        raise FormatError("two rows have the same label", tensor=taken)
    return tuple(found)


def _parts(numbers: _Numbers, specs: Sequence[TensorSpec]) -> list[tuple[int, Box | None]]:
    """For each row the index of its tensor, and its box; a tensor without boxes is one row."""
    counts = numbers.take(len(specs))
    rows = sum(max(count, 1) for count in counts)
    if rows > MAX_ROWS:
        raise FormatError(f"the table says it has {rows} rows, over the limit of {MAX_ROWS}")
    cut = [i for i, count in enumerate(counts) for _ in range(count)]
    offsets, sizes = (numbers.take_each([len(specs[i].shape) for i in cut]) for _ in range(2))
    boxes = [Box.of(*one) for one in zip(offsets, sizes, strict=True)]
    whole = [(i, None) for i, count in enumerate(counts) if not count]
    return sorted([*zip(cut, boxes, strict=True), *whole], key=lambda part: part[0])


def _shared_prefix(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def refuse_other_boxes(name: str, rows: Sequence[Row]) -> None:
    """`FormatError` unless these can be boxes of one tensor, none of whose elements is in two of them."""
    first = rows[0]
    if len(rows) < 2:
        return
    if any((row.spec, row.digest) != (first.spec, first.digest) for row in rows):
        raise FormatError("two boxes of a tensor disagree about it", tensor=name)
    if any(a.place.box.offset >= b.place.box.offset for a, b in pairwise(rows)):
        raise FormatError("boxes of a tensor are unsorted or repeated", tensor=name)
    if sum(row.place.box.elements for row in rows) > first.spec.elements:
        raise FormatError("boxes of a tensor overlap", tensor=name)


_BOX_LABEL = re.compile(r"(.*)\[(\d+(?:,\d+)*)\]", re.ASCII | re.DOTALL)


def _shared_label(rows: Sequence[Row]) -> str | None:
    """The name of a whole tensor that is also the label of a box, if there is one (SPEC 5.2.8)."""
    boxes = {row.key for row in rows if row.box is not None}
    for row in rows if boxes else ():
        found = _BOX_LABEL.fullmatch(row.spec.name) if row.box is None else None
        if found and len(found[2]) < MAX_OFFSETS:
            offset = tuple(map(int, found[2].split(",")))
            if (found[1], offset) in boxes and found[2] == ",".join(map(str, offset)):
                return row.spec.name
    return None


def _check_row(row: Row) -> None:
    if row.box is not None:
        whole_bytes = row.spec.kind.per_value >= 8
        if not whole_bytes or not row.box.fits(row.spec.shape) or row.box.is_all_of(row.spec.shape):
            raise FormatError("a box is not a part of its tensor", tensor=row.spec.name)
    elements = row.elements
    if not 0 < row.changed <= elements:
        raise FormatError(f"the table says {row.changed} of {elements} elements changed", tensor=row.spec.name)
    if row.blocks and row.blocks[-1][0] >= -(-elements // BLOCK):
        raise FormatError("a block is outside its tensor", tensor=row.spec.name)
    if any(length < 1 for _, length in row.blocks):
        raise FormatError("a block is empty", tensor=row.spec.name)


def _inflate(packed: bytes, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        table = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise FormatError(f"the table cannot be decompressed: {error}") from None
    if len(table) != size or not stream.eof or stream.unused_data:
        raise FormatError(f"the table does not have the {size} bytes that the metadata states")
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
        raise VersionError(f"unknown dtype code {code}", hint="Install a newer release.")
    return _DTYPE_NAMES[code]


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    if math.prod(shape) > MAX_ELEMENTS or math.prod(shape) * DTYPES[dtype].per_value % 8:
        raise FormatError("impossible shape in the table", tensor=name)
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


def _columns(values: Sequence[int]) -> bytes:
    """`_varints` for thousands."""
    numbers = np.array(values, np.int64)
    widths = np.ones(numbers.size, np.int64)
    for shift in range(7, 63, 7):
        widths += numbers >> shift > 0
    ends = np.cumsum(widths)
    out = np.empty(ends[-1] if values else 0, np.uint8)
    for i in range(int(widths.max(initial=0))):
        more = widths > i
        out[(ends - widths + i)[more]] = numbers[more] >> (7 * i) & 127 | 128 * (widths[more] > i + 1)
    return out.tobytes()


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


class _Numbers:
    """The varints of a byte string, read as they are asked for: a small file may hold millions that nobody asks for."""

    def __init__(self, table: bytes, at: int):
        self._raw = np.frombuffer(table, np.uint8)
        self._at = at

    @property
    def at_end(self) -> bool:
        return self._at == self._raw.size

    def take(self, count: int) -> list[int]:
        """The next ``count``; `FormatError` if there are fewer, before memory is taken for them."""
        if count > self._raw.size - self._at:
            raise FormatError("the table ends too early")
        return [value for begin in range(0, count, _AT_ONCE) for value in self._some(min(_AT_ONCE, count - begin))]

    def take_each(self, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """The next numbers, so many for each."""
        numbers = iter(self.take(sum(counts)))
        return [tuple(islice(numbers, count)) for count in counts]

    def _some(self, count: int) -> list[int]:
        raw = self._raw[self._at : self._at + MAX_VARINT * count]
        ends = np.flatnonzero(raw < 128)[:count]
        widths = np.diff(ends, prepend=-1)
        longest = int(widths.max(initial=0))
        if ends.size < count and raw.size < MAX_VARINT * count and (not raw.size or raw[-1] < 128):
            raise FormatError("the table ends too early")
        if ends.size < count or longest > MAX_VARINT:
            raise FormatError("a number in the table is cut off or too large")
        values = np.zeros(count, np.int64)
        for i in range(longest):
            more = np.flatnonzero(widths > i)
            values[more] |= (raw[ends[more] - widths[more] + 1 + i].astype(np.int64) & 127) << (7 * i)
        self._at += int(ends[-1]) + 1
        found: list[int] = values.tolist()
        return found
