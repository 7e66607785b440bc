"""One test per lie a file can tell: the table (SPEC 8.3, 8.7)."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Bag
from liars import World, bounded, refused_in_bounds, tree
from surgery import (
    BLOCK_CODECS,
    BLOCKS,
    CODECS,
    DIGESTS,
    TABLE,
    Parts,
    Table,
    varint,
    with_block,
    with_column,
    with_field,
    with_meta,
    with_stream,
    with_table,
)

from weightcast import TensorSpec, decode, diff, encode
from weightcast.errors import (
    FormatError,
    UsageError,
)


def test_table_is_not_a_zlib_stream(world: World) -> None:
    honest = Parts.of(world.patch()).entries[TABLE].data
    world.refuses(with_stream(world.patch(), TABLE, bytes(20)), FormatError, "cannot be decompressed")
    world.refuses(with_stream(world.patch(), TABLE, b""), FormatError, "does not have the .* bytes")
    bad_checksum = honest[:-1] + bytes([honest[-1] ^ 1])
    world.refuses(with_stream(world.patch(), TABLE, bad_checksum), FormatError, "cannot be decompressed")


def test_table_cut_off(world: World) -> None:
    honest = Parts.of(world.patch()).entries[TABLE].data
    for length in range(len(honest)):
        world.refuses(with_stream(world.patch(), TABLE, honest[:length]), FormatError, "does not have the .* bytes")


@pytest.mark.parametrize("more", [b"\0", b"x" * 1000, zlib.compress(b"")])
def test_bytes_after_the_zlib_stream(world: World, more: bytes) -> None:
    honest = Parts.of(world.patch()).entries[TABLE].data
    world.refuses(with_stream(world.patch(), TABLE, honest + more), FormatError, "does not have the .* bytes")


@pytest.mark.parametrize("by", [-1, 1, 1000])
def test_declared_table_size_is_another(world: World, by: int) -> None:
    size = Parts.of(world.patch()).meta["table"]
    world.refuses(with_meta(world.patch(), table=size + by), FormatError, "does not have the .* bytes")


@pytest.mark.parametrize("size", [(1 << 24) + 1, 1 << 40, 1 << 100, -1])
def test_declared_table_size_would_exhaust_memory(world: World, size: int) -> None:
    world.refuses(with_meta(world.patch(), table=size), FormatError, "over the limit")


def test_table_at_its_limit_but_not_there(world: World) -> None:
    kind, text = refused_in_bounds(world, with_meta(world.patch(), table=1 << 24))
    assert kind == "FormatError"
    assert "bytes that the metadata states" in text


@pytest.mark.parametrize("size", ["9", 9.0, None, True, [9]])
def test_declared_table_size_is_not_a_number(world: World, size: Any) -> None:
    world.refuses(with_meta(world.patch(), table=size), FormatError, "impossible codec or table size")


def zeros_deflated(megabytes: int) -> bytes:
    """A zlib stream that gives that many megabytes of zeros, then breaks off."""
    squeeze = zlib.compressobj(9)
    first = squeeze.compress(bytes(1 << 20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    again = squeeze.compress(bytes(1 << 20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    return first + again * (megabytes - 1)


@pytest.mark.parametrize("stated", [100, 1 << 24])
def test_zip_bomb_table(world: World, stated: int) -> None:
    lie = with_meta(with_stream(world.patch(), TABLE, zeros_deflated(16 << 10)), table=stated)
    kind, text = refused_in_bounds(world, lie)
    assert kind == "FormatError"
    assert "bytes that the metadata states" in text


def test_small_file_with_a_table_of_millions_of_numbers(world: World) -> None:
    honest = Table.of(world.patch()).raw()
    lie = with_table(world.patch(), honest + bytes((1 << 24) - len(honest)))
    kind, text = refused_in_bounds(world, lie)
    assert kind == "FormatError"
    assert "continues after its last row" in text


def test_small_file_with_a_table_of_millions_of_blocks(world: World) -> None:
    table = Table.of(world.patch())
    many = 30_000_000
    table.sizes = [1 << 47, 1, table.sizes[-1]]
    table.counts[0] = many
    table.skips, table.lengths = [], []
    raw = table.raw() + bytes(many + 1) + b"\1" * (many + 1)
    (kind, _text) = refused_in_bounds(world, with_table(world.patch(), raw))
    assert kind in ("FormatError", "UsageError")


def test_small_file_with_long_names_that_share_all_but_a_byte(world: World) -> None:
    """A row costs four bytes and claims a name of 16 MB."""
    length, rows = 16 << 20, 1000
    names = [(0, b"a" * length)] + [(length + i, b"a") for i in range(rows - 1)]
    lie = with_stream(world.patch(), DIGESTS, bytes(8 * rows))
    none: list[int] = []
    table = Table(names, [4] * rows, [1] * rows, [1] * rows, [0] * rows, none, none, [1] * rows, [0] * rows, none, none)
    (kind, _text) = refused_in_bounds(world, with_table(lie, table))
    assert kind in ("FormatError", "UsageError")


def test_small_file_with_very_many_boxes(world: World) -> None:
    """All that the limits allow: boxes of one element, of 16 dimensions, of a tensor whose name is long."""
    boxes, rank = 1 << 18, 16
    shifts = 3 * np.arange(rank, dtype=np.int64)[::-1]
    offsets = (np.arange(boxes, dtype=np.int64)[:, None] >> shifts & 7).astype(np.uint8)
    names = varint(0) + varint(4096) + b"x" * 4096
    tensor = b"".join(map(varint, [14, rank, *[8] * rank, boxes]))
    columns = offsets.tobytes() + b"\1" * (boxes * rank) + b"\1" * (2 * boxes) + bytes(boxes) + b"\1" * boxes
    lie = with_table(with_stream(world.patch(), DIGESTS, bytes(8)), names + tensor + columns)
    kind, text = refused_in_bounds(world, with_stream(lie, BLOCKS, bytes(boxes)))
    assert kind == "UsageError", text


@pytest.mark.parametrize("boxes", [(1 << 18) + 1, 1 << 40, (1 << 63) - 1])
def test_more_boxes_than_the_limit(world: World, boxes: int) -> None:
    world.refuses(with_column(world.patch(), "boxes", 0, boxes), FormatError, "rows, over the limit")


def test_tensors_and_boxes_together_are_over_the_limit(world: World) -> None:
    world.refuses(with_column(world.patch(), "boxes", 0, 1 << 18), FormatError, f"{(1 << 18) + 1} rows, over the limit")


@pytest.mark.parametrize("name", [b"x" * 4097, b"x" * (1 << 20)])
def test_name_longer_than_the_limit(world: World, name: bytes) -> None:
    world.refuses(with_column(world.patch(), "names", 1, (0, name)), FormatError, "name in the table is .*too long")


@pytest.mark.parametrize("codec", CODECS)
def test_writer_refuses_what_no_reader_accepts(codec: str) -> None:
    """A name one byte over the limit; the longest that is not over it is written and read."""
    for length, fits in ((4096, True), (4097, False)):
        spec = TensorSpec("x" * length, "U8", (4,))
        old, new = Bag({spec: np.zeros(4, np.uint8)}), Bag({spec: np.ones(4, np.uint8)})
        if fits:
            assert decode(encode(diff(old, new), codec, old), old).changed == 4
        else:
            with pytest.raises(UsageError):
                encode(diff(old, new), codec, old)


def test_more_digests_than_rows(world: World) -> None:
    lie = with_stream(world.patch(), DIGESTS, Parts.of(world.patch()).entries[DIGESTS].data + bytes(8))
    world.refuses(lie, FormatError, "table")


def test_fewer_digests_than_rows(world: World) -> None:
    lie = with_stream(world.patch(), DIGESTS, Parts.of(world.patch()).entries[DIGESTS].data[:8])
    world.refuses(lie, FormatError, "table")


def test_no_digests_at_all(world: World) -> None:
    world.refuses(with_stream(world.patch(), DIGESTS, b""), FormatError, "the table continues after its last row")


def test_digests_of_another_shape(world: World) -> None:
    digests = Parts.of(world.patch()).entries[DIGESTS].data
    world.refuses(
        with_stream(world.patch(), DIGESTS, digests, shape=[1, 2]), FormatError, "digests is not a list of U64"
    )
    world.refuses(
        with_stream(world.patch(), DIGESTS, digests, dtype="I64"), FormatError, "digests is not a list of U64"
    )


@pytest.mark.parametrize("name", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_name_not_utf8(world: World, name: bytes) -> None:
    world.refuses(with_column(world.patch(), "names", 1, (0, name)), FormatError, "not UTF-8")


def test_unsorted_names(world: World) -> None:
    world.refuses(with_column(world.patch(), "names", 0, (0, b"c")), FormatError, "unsorted or repeated")


def test_repeated_names(world: World) -> None:
    world.refuses(with_column(world.patch(), "names", 1, (0, b"a")), FormatError, "unsorted or repeated")
    world.refuses(with_column(world.patch(), "names", 1, (1, b"")), FormatError, "unsorted or repeated")


@pytest.mark.parametrize("shared", [2, 1 << 40, (1 << 63) - 1])
def test_name_shares_more_than_there_is(world: World, shared: int) -> None:
    world.refuses(
        with_column(world.patch(), "names", 1, (shared, b"b")), FormatError, "name in the table is impossible"
    )
    world.refuses(
        with_column(world.patch(), "names", 0, (shared, b"a")), FormatError, "name in the table is impossible"
    )


def test_name_longer_than_the_table(world: World) -> None:
    raw = varint(0) + varint(1 << 60) + b"a"
    world.refuses(with_table(world.patch(), raw), FormatError, "name in the table is impossible")


@pytest.mark.parametrize("tail", [b"\x80", b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x00", b"\xff" * 1000 + b"\0"])
def test_varint_cut_off_or_too_long(world: World, tail: bytes) -> None:
    honest = Table.of(world.patch()).raw()
    world.refuses(with_table(world.patch(), honest[:-1] + tail), FormatError, "number in the table is cut off or too")
    world.refuses(with_table(world.patch(), tail), FormatError, "number in the table is cut off or too")


def test_table_ends_within_a_column(world: World) -> None:
    honest = Table.of(world.patch()).raw()
    for length in range(len(honest)):
        world.refuses(with_table(world.patch(), honest[:length]), FormatError, "table")


def test_bytes_after_the_last_column(world: World) -> None:
    world.refuses(with_table(world.patch(), Table.of(world.patch()).raw() + b"\0"), FormatError, "after its last row")


@pytest.mark.parametrize("rank", [65, 1 << 20, 1 << 62])
def test_too_many_dimensions_in_table(world: World, rank: int) -> None:
    world.refuses(with_column(world.patch(), "ranks", 0, rank), FormatError, "too many dimensions|ends too early")


@pytest.mark.parametrize("size", [(1 << 48) + 1, 1 << 60])
def test_impossible_shape_in_table(world: World, size: int) -> None:
    error = world.refuses(with_column(world.patch(), "sizes", 0, size), FormatError, "impossible shape in the table")
    assert error.tensor == "a"


def test_packed_values_that_do_not_fill_bytes(world: World) -> None:
    table = Table.of(world.patch())
    table.dtypes[0], table.sizes[0:2] = 1, [1, 1001]
    assert world.refuses(with_table(world.patch(), table), FormatError, "impossible shape in the table").tensor == "a"


def test_declared_shape_would_exhaust_memory(world: World, tmp_path: Path) -> None:
    """A row, a patch without a base and an entry that all claim 2**47 elements or more."""
    huge = 1 << 47
    row = with_column(with_column(world.patch(), "sizes", 0, huge), "sizes", 1, 1)
    plain_row = with_column(with_column(world.patch("plain"), "sizes", 0, huge), "sizes", 1, 1)
    without_base = with_meta(plain_row, base=None)
    whole = with_column(with_column(world.anchor(), "sizes", 0, huge), "sizes", 1, 1)
    entry = with_field(with_field(whole, "a.values", "shape", [huge, 1]), "a.values", "data_offsets", [0, 2 * huge])
    lies = [row, plain_row, without_base, whole, entry, with_column(row, "skips", 0, (huge >> 18) - 1)]
    files = [tmp_path / f"{i}.patch" for i in range(len(lies))]
    for file, lie in zip(files, lies, strict=True):
        file.write_bytes(lie)
    before = tree(world.home)
    outcomes = bounded(world.target, *files)
    assert tree(world.home) == before
    assert len(outcomes) == len(lies)
    for kind, text in outcomes:
        assert kind in ("FormatError", "UsageError")
        assert "tensor a" in text or "header describes" in text or "entries overlap" in text


@pytest.mark.parametrize(
    ("changed", "says"), [(0, "says 0 of 1000"), (1001, "says 1001 of 1000"), (1 << 62, "of 1000")]
)
@pytest.mark.parametrize("codec", CODECS)
def test_count_lies(world: World, codec: str, changed: int, says: str) -> None:
    error = world.refuses(with_column(world.patch(codec), "changed", 0, changed), FormatError, says)
    assert error.tensor == "a"


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("codec", CODECS)
def test_count_is_off_by_one(world: World, codec: str, by: int) -> None:
    table = Table.of(world.patch(codec))
    table.changed[0] += by
    says = (
        "indices and values do not fit"
        if codec == "plain"
        else f"streams change {world.changed} elements, the table says"
    )
    assert world.refuses(with_table(world.patch(codec), table), FormatError, says).tensor == "a"


def test_count_of_a_whole_tensor_is_off(world: World) -> None:
    error = world.refuses(with_column(world.anchor(), "changed", 1, 299), FormatError, "does not change all")
    assert error.tensor == "b"


@pytest.mark.parametrize("skipped", [1, 1 << 20, 1 << 61])
@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_blocks_past_end(world: World, codec: str, skipped: int) -> None:
    error = world.refuses(with_column(world.patch(codec), "skips", 1, skipped), FormatError, "outside its tensor")
    assert error.tensor == "b"


def test_more_blocks_than_the_tensor_has(world: World) -> None:
    table = Table.of(world.patch())
    table.counts[1] += 1
    table.skips.append(0)
    table.lengths[1:] = [table.lengths[1] - 1, 1]
    assert world.refuses(with_table(world.patch(), table), FormatError, "outside its tensor").tensor == "b"


def test_block_of_no_bytes(world: World) -> None:
    assert world.refuses(with_block(world.patch(), 0, b""), FormatError, "a block is empty").tensor == "a"


def test_blocks_with_plain(world: World) -> None:
    table = Table.of(world.patch("plain"))
    table.counts[0], table.skips, table.lengths = 1, [0], [1]
    assert world.refuses(with_table(world.patch("plain"), table), FormatError, "a row has blocks").tensor == "a"


def test_no_blocks_without_plain(world: World) -> None:
    table = Table.of(world.patch())
    table.counts[0], table.skips, table.lengths = 0, table.skips[1:], table.lengths[1:]
    assert world.refuses(with_table(world.patch(), table), FormatError, "a row has no blocks").tensor == "a"


def test_plain_patch_that_says_it_is_gap(world: World) -> None:
    world.refuses(with_meta(world.patch("plain"), codec="gap"), FormatError, f"the entry {BLOCKS} is missing")
    world.refuses(with_meta(world.patch("gap"), codec="plain"), FormatError, "a row has blocks|too ear")
