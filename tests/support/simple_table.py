"""A reader of the table inside a patch, written from docs/SPEC.md 2.6, 5.2 and 8.3 alone, for `simple_reader.py`."""

import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from simple_safetensors import DTYPES, Entry, Rejected, count_elements, decode_text, need

BLOCK = 1 << 18
ROWS = 1 << 18


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    bits: list[int]


class Box(NamedTuple):
    """2.6.1"""

    offset: tuple[int, ...]
    size: tuple[int, ...]


class Row(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int
    box: Box | None  # None: the whole tensor
    changed: int
    blocks: list[tuple[int, int]]  # which block of the tensor or box, its bytes

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what is coded (2.6.3)."""
        return self.shape if self.box is None else self.box.size

    @property
    def label(self) -> str:
        return label_of(self.name, self.box)

    @property
    def elements(self) -> int:
        """How many elements are coded."""
        return count_elements(self.dtype, self.part, "8.3")

    def places(self) -> Iterable[int]:
        """The flat index in the tensor of each coded element (2.6.2)."""
        if self.box is None:
            return range(self.elements)
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        along = [
            [(start + i) * stride for i in range(size)] for start, size, stride in zip(*self.box, strides, strict=True)
        ]
        return map(sum, product(*along))


def label_of(name: str, box: Box | None) -> str:
    """5.2.8"""
    return name if box is None else f"{name}[{','.join(map(str, box.offset))}]"


def entry_of(entries: Mapping[str, Entry], name: str, dtype: str) -> bytes:
    """An entry that has to be there, of this dtype and one dimension (5.1, 8.4)."""
    need(name in entries, f"8.4 a missing entry: {name}")
    need(entries[name].dtype == dtype and len(entries[name].shape) == 1, f"8.4 {name} is not {dtype} [n]")
    return entries[name].raw


def inflate(stream: bytes, size: int) -> bytes:
    """A zlib stream of exactly `size` bytes (5.2, 8.3), never making more than one byte too many (8.7)."""
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stream, size + 1)
    except zlib.error as error:
        raise Rejected("8.3 a broken zlib stream") from error
    need(len(text) == size and inflater.eof, "8.3 a zlib stream that does not give exactly `table` bytes")
    need(not inflater.unused_data, "8.3 a zlib stream followed by other bytes")
    return text


class Columns:
    """The table's byte string, read from left to right (5.2)."""

    def __init__(self, text: bytes) -> None:
        self.text, self.at = text, 0

    def take(self, count: int) -> bytes:
        need(count <= len(self.text) - self.at, "8.3 a varint or name cut off")
        self.at += count
        return self.text[self.at - count : self.at]

    def varint(self) -> int:
        value = 0
        for i in range(9):
            byte = self.take(1)[0]
            value |= (byte & 127) << 7 * i
            if byte < 128:
                return value
        raise Rejected("8.3 a varint too long")

    def column(self, rows: Iterable) -> list[int]:
        return [self.varint() for _ in rows]


def read_table(
    entries: Mapping[str, Entry], size: int, digests: list[int], codec: str, old: Mapping[str, Tensor] | None
) -> list[Row]:
    """The rows, column after column (5.2, 8.3)."""
    need(len(digests) <= ROWS, "8.3 more rows than their limit")
    columns = Columns(inflate(entry_of(entries, "weightcast.table", "U8"), size))
    names = read_names(columns, len(digests), names_brought(entries) if old is None else old)
    codes = columns.column(names)
    need(all(code < len(DTYPES) for code in codes), "8.3 an unknown dtype code")
    dtypes = [list(DTYPES)[code] for code in codes]
    ranks = columns.column(names)
    need(all(rank <= 16 for rank in ranks), "8.3 an impossible shape: more than 16 dimensions")
    shapes = [tuple(columns.column(range(rank))) for rank in ranks]
    for name, *spec in zip(names, dtypes, shapes, strict=True):
        count_elements(*spec, "8.3")
        need(old is None or [*old[name][:2]] == spec, "8.6 a row of another dtype or shape than the tensor held")
    tensors = list(zip(names, dtypes, shapes, digests, strict=True))
    parts = [
        (*tensor, box) for tensor, boxes in zip(tensors, read_boxes(columns, tensors), strict=True) for box in boxes
    ]
    labels = {label_of(name, box) for name, *_, box in parts}
    need(len(labels) == len(parts), "8.3 (8.3.9) two rows with the same label")
    elements = [count_elements(part[1], part[2] if part[4] is None else part[4].size, "8.3") for part in parts]
    changed = columns.column(parts)
    need(all(1 <= c <= n for c, n in zip(changed, elements, strict=True)), "8.3 a changed count of 0 or above all")
    counts = columns.column(parts)
    need(all((c == 0) == (codec == "plain") for c in counts), "8.3 blocks with plain, or none without")
    indices = [read_block_indices(columns, c, n) for c, n in zip(counts, elements, strict=True)]
    sizes = [columns.column(row) for row in indices]
    need(all(all(row) for row in sizes), "8.3 a block of 0 bytes")
    need(columns.at == size, "8.3 bytes behind the last column")
    blocks = [list(zip(*pair, strict=True)) for pair in zip(indices, sizes, strict=True)]
    return [Row(*part, *rest) for part, *rest in zip(parts, changed, blocks, strict=True)]


def names_brought(entries: Mapping[str, Entry]) -> set[str]:
    """The names that a patch without a base can list: those of its entries, and of tensors whose boxes they hold."""
    labels = {name.removesuffix(".values") for name in entries if name.endswith(".values")}
    return labels | {re.sub(r"\[[0-9,]+\]\Z", "", label) for label in labels}


def read_names(columns: Columns, count: int, known: Collection[str]) -> list[str]:
    """Column 1 (5.2). An unknown name ends it at once."""
    names: list[str] = []
    before, total = b"", 0
    for _ in range(count):
        shared = columns.varint()
        need(shared <= len(before), "8.3 a name shares more bytes than the one before has")
        raw = before[:shared] + columns.take(columns.varint())
        total += len(raw)
        need(len(raw) <= 4096 and total <= 1 << 24, "8.3 names over their limits")
        need(not names or raw > before, "8.3 names unsorted or repeated")
        names.append(decode_text(raw, "8.3 a name that is not UTF-8"))
        need(names[-1] in known, "8.6 a row of a tensor that is not held")
        before = raw
    return names


def read_boxes(columns: Columns, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> list[list[Box | None]]:
    """Columns 5 to 7: of each tensor its boxes, or None for the whole (5.2, 8.3.9)."""
    counts = columns.column(tensors)
    need(sum(max(count, 1) for count in counts) <= ROWS, "8.3 more rows than their limit")
    shapes = [shape for _, _, shape, _ in tensors]
    offsets, sizes = (
        [[tuple(columns.column(shape)) for _ in range(n)] for shape, n in zip(shapes, counts, strict=True)]
        for _ in range(2)
    )
    found: list[list[Box | None]] = []
    for (_, dtype, shape, _), *pair in zip(tensors, offsets, sizes, strict=True):
        boxes = [Box(*one) for one in zip(*pair, strict=True)]
        need(not boxes or DTYPES[dtype] >= 8, "8.3 (8.3.9) a box of packed values")
        for box in boxes:
            need(all(o + s <= n for o, s, n in zip(*box, shape, strict=True)), "8.3 (8.3.9) a box outside its tensor")
            need(box.size != shape, "8.3 (8.3.9) a box of all of its tensor")
        need(all(a.offset < b.offset for a, b in pairwise(boxes)), "8.3 (8.3.9) boxes out of order or repeated")
        need(sum(prod(box.size) for box in boxes) <= prod(shape), "8.3 (8.3.9) boxes of more elements than the tensor")
        found.append([*boxes] or [None])
    return found


def read_block_indices(columns: Columns, count: int, elements: int) -> list[int]:
    """Column 10 of one row, as numbers of blocks (5.2)."""
    indices: list[int] = []
    following = 0
    for _ in range(count):
        following += columns.varint() + 1
        need((following - 1) * BLOCK < elements, "8.3 a block outside its tensor")
        indices.append(following - 1)
    return indices
