"""One test per lie a file can tell: streams, blocks, and where they lead (SPEC 8.4 to 8.6)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import write_file
from liars import World, refused_in_bounds, sample, tree
from surgery import (
    BLOCK_CODECS,
    BLOCKS,
    CODECS,
    DIGESTS,
    ITEM,
    TABLE,
    Parts,
    Table,
    bitstring,
    rice,
    with_block,
    with_column,
    with_field,
    with_meta,
    with_stream,
    with_table,
    without,
)

from weightcast import Fingerprint, decode, encode
from weightcast.disk.apply import apply_in_place
from weightcast.errors import (
    BaseError,
    FormatError,
    ResultError,
    UsageError,
    WeightcastError,
)
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource

# -- the streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_missing_stream(world: World, codec: str) -> None:
    honest = world.patch(codec)
    for name in Parts.of(honest).entries:
        if not name.endswith(".indices"):
            world.refuses(without(honest, name), FormatError, f"the entry {name} is missing")


def test_missing_indices(world: World) -> None:
    error = world.refuses(without(world.patch("plain"), "b.indices"), FormatError, "indices and values do not fit")
    assert error.tensor == "b"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["c.values", "a.indices2", "a", "weightcast.extra", "../../etc/passwd"])
def test_unexpected_entry_is_refused(world: World, codec: str, name: str) -> None:
    lie = with_stream(world.patch(codec), name, b"x", "U8")
    assert world.refuses(lie, FormatError, "an entry does not belong to any tensor").tensor == name


def test_blocks_entry_in_a_plain_patch(world: World) -> None:
    lie = with_stream(world.patch("plain"), BLOCKS, b"x", "U8")
    assert world.refuses(lie, FormatError, "an entry does not belong to any tensor").tensor == BLOCKS


def indices_lie(world: World, dtype: str, swaps: dict[int, int]) -> bytes:
    """A plain patch in which some indices into ``a`` are others."""
    honest = world.patch("plain")
    indices = honest_indices(world).astype(np.int32 if dtype == "I32" else np.int64)
    for at, index in swaps.items():
        indices[at] = index
    return with_stream(honest, "a.indices", indices.tobytes(), dtype)


def honest_indices(world: World) -> np.ndarray:
    return np.frombuffer(Parts.of(world.patch("plain")).entries["a.indices"].data, np.int32)


@pytest.mark.parametrize("dtype", ["I32", "I64"])
@pytest.mark.parametrize(("at", "index"), [(-1, 1000), (-1, (1 << 31) - 1), (0, -1), (0, -1000), (0, -(1 << 31))])
def test_indices_out_of_range(world: World, at: int, index: int, dtype: str) -> None:
    error = world.refuses(indices_lie(world, dtype, {at: index}), FormatError, "indices are out of range")
    assert error.tensor == "a"


@pytest.mark.parametrize("dtype", ["I32", "I64"])
def test_indices_unsorted(world: World, dtype: str) -> None:
    tenth, eleventh = honest_indices(world)[10:12].tolist()
    lie = indices_lie(world, dtype, {10: eleventh, 11: tenth})
    assert world.refuses(lie, FormatError, "unsorted").tensor == "a"


@pytest.mark.parametrize("dtype", ["I32", "I64"])
@pytest.mark.parametrize("at", [0, 30, -2])
def test_indices_repeated(world: World, at: int, dtype: str) -> None:
    lie = indices_lie(world, dtype, {at + 1: int(honest_indices(world)[at])})
    assert world.refuses(lie, FormatError, "repeated").tensor == "a"


def test_indices_that_ascend_only_because_differences_overflow(world: World) -> None:
    """From each of these to the next is a positive step, modulo 2**64."""
    kind, text = refused_in_bounds(world, indices_lie(world, "I64", {10: 1 << 62, 11: -(1 << 62) - 1}))
    assert kind == "FormatError"
    assert "indices are out of range" in text


def test_indices_and_values_of_different_length(world: World) -> None:
    for name in ("a.indices", "a.values"):
        entry = Parts.of(world.patch("plain")).entries[name]
        for data in (entry.data[: -ITEM[entry.dtype]], entry.data + bytes(ITEM[entry.dtype])):
            lie = with_stream(world.patch("plain"), name, data)
            assert world.refuses(lie, FormatError, "indices and values do not fit").tensor == "a"


@pytest.mark.parametrize(("name", "dtype"), [("a.values", "F16"), ("a.values", "U8"), ("a.indices", "F32")])
def test_stream_of_another_dtype(world: World, name: str, dtype: str) -> None:
    lie = with_stream(world.patch("plain"), name, Parts.of(world.patch("plain")).entries[name].data, dtype)
    assert world.refuses(lie, FormatError, "indices and values do not fit").tensor == "a"


def test_indices_of_two_dimensions(world: World) -> None:
    data = Parts.of(world.patch("plain")).entries["a.indices"].data
    lie = with_stream(world.patch("plain"), "a.indices", data, shape=[1, world.changed])
    assert world.refuses(lie, FormatError, "indices and values do not fit").tensor == "a"


def test_whole_tensor_of_another_shape(world: World) -> None:
    lie = with_field(world.anchor(), "a.values", "shape", [25, 40])
    assert world.refuses(lie, FormatError, "indices and values do not fit").tensor == "a"


@pytest.mark.parametrize("name", [TABLE, BLOCKS])
def test_table_or_blocks_not_a_list_of_bytes(world: World, name: str) -> None:
    data = Parts.of(world.patch()).entries[name].data
    world.refuses(with_stream(world.patch(), name, data, dtype="I8"), FormatError, name)
    world.refuses(with_stream(world.patch(), name, data, shape=[1, len(data)]), FormatError, name)


@pytest.mark.parametrize("by", [-1, 1])
def test_block_bytes_do_not_add_up(world: World, by: int) -> None:
    table = Table.of(world.patch())
    table.lengths[1] += by
    world.refuses(with_table(world.patch(), table), FormatError, "the table lists .* bytes of blocks")


@pytest.mark.parametrize("length", [1 << 40, (1 << 63) - 1])
def test_block_longer_than_any_file(world: World, length: int) -> None:
    lie = with_column(world.patch(), "lengths", 0, length)
    world.refuses(lie, FormatError, "the table lists .* bytes of blocks")


# -- blocks ------------------------------------------------------------------------------------------------------------

NOTHING = (31, 5)
ONE_BAND = (1, 8)
PLACE_3 = ((10, 5), (0, 1), NOTHING, *rice(3, 10), *rice(996, 10))
"""The parameters and the list of a changed set with one member, 3 of 1000, and an empty far set."""
UP = (1, 1)
ONE_UP = bitstring(ONE_BAND, *PLACE_3, UP)
FAR = (ONE_BAND, (10, 5), (0, 1), (0, 5), (0, 1), *rice(3, 10), *rice(996, 10), UP, *rice(0, 0), *rice(0, 0))
"""The same with its one member far, up to where the distances begin."""

BAD_BLOCKS = {
    "17 bands": (bitstring((17, 8)) + bytes(40), "impossible bands"),
    "255 bands": (bitstring((255, 8)) + bytes(40), "impossible bands"),
    "first key 255": (bitstring((2, 8), (255, 8)) + bytes(40), "impossible bands"),
    "key past 255": (bitstring((3, 8), (250, 8), *rice(4, 0)) + bytes(40), "impossible bands"),
    "escaped key past 255": (bitstring((3, 8), (0, 8), *rice(255, 0, 8)) + bytes(40), "impossible bands"),
    "k of 19": (bitstring(ONE_BAND, (19, 5), (0, 1)) + bytes(40), "impossible Rice parameter"),
    "k of 30": (bitstring(ONE_BAND, (30, 5), (0, 1)) + bytes(40), "impossible Rice parameter"),
    "far k of 19": (bitstring(ONE_BAND, (10, 5), (0, 1), (19, 5)) + bytes(40), "impossible Rice parameter"),
    "gap past the end": (bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, *rice(1001, 10)), "gaps run past"),
    "closing gap too long": (
        bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, *rice(3, 10), *rice(997, 10)),
        "gaps run p",
    ),
    "escaped gap past the end": (bitstring(ONE_BAND, (0, 5), (0, 1), NOTHING, *rice((1 << 19) - 1, 0)), "gaps run p"),
    "far gap past the end": (bitstring(*FAR[:-4], *rice(2, 0)), "gaps run past"),
    "distance too far": (bitstring(*FAR, (0, 1), (0, 9), *rice((1 << 15) - 1, 0, 16)), "impossible distance"),
    "escaped distance of all ones": (bitstring(*FAR, (0, 1), (0, 9), *rice((1 << 16) - 1, 0, 16)), "impossible dist"),
    "distance of a huge k": (bitstring(*FAR, (0, 1), (511, 9), *rice(1 << 57, 58)), "impossible distance"),
    "only its first byte": (bitstring(ONE_BAND), "ends before its codes do"),
    "an escape without its gap": (
        bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, ((1 << 24) - 1, 24)),
        "ends before its codes do",
    ),
    "no closing gap": (bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, *rice(3, 10)), "ends before its codes do"),
    "no directions": (bitstring(ONE_BAND, (0, 5), (1, 1), NOTHING, *rice(1000, 0)), "ends before its codes do"),
    "no distances": (bitstring(*FAR), "ends before its codes do"),
    "a byte more": (ONE_UP + b"\0", "longer than its codes"),
    "many bytes more": (ONE_UP + bytes(1000), "longer than its codes"),
    "a one behind the last code": (bitstring(ONE_BAND, *PLACE_3, UP, (1, 1)), "longer than its codes"),
    "no band changes": (bitstring(ONE_BAND, NOTHING, NOTHING), "changes nothing"),
    "an empty list": (bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, *rice(1000, 10)), "changes nothing"),
    "a raw block too short": (b"\0" + bytes(1999), "a raw block has .* bytes, its elements have 2000"),
    "a raw block too long": (b"\0" + bytes(2001), "a raw block has .* bytes, its elements have 2000"),
    "a raw block of nothing": (b"\0", "a raw block has .* bytes, its elements have 2000"),
}


@pytest.mark.parametrize(("block", "says"), BAD_BLOCKS.values(), ids=BAD_BLOCKS)
@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_bad_rice_streams(world: World, codec: str, block: bytes, says: str) -> None:
    assert world.refuses(with_block(world.patch(codec), 0, block), FormatError, says).tensor == "a"


def test_raw_block_that_changes_nothing(world: World) -> None:
    lie = with_block(world.patch(), 0, b"\0" + world.old.read("a").tobytes())
    assert world.refuses(lie, FormatError, "changes nothing").tensor == "a"


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_block_cut_off_at_every_byte(world: World, codec: str) -> None:
    honest = world.patch(codec)
    block = Parts.of(honest).entries[BLOCKS].data[: Table.of(honest).lengths[0]]
    for length in range(1, len(block)):
        assert world.refuses(with_block(honest, 0, block[:length]), FormatError, "a block").tensor == "a"


def test_block_of_another_tensor(world: World) -> None:
    table, blocks = Table.of(world.patch()), Parts.of(world.patch()).entries[BLOCKS].data
    lie = with_block(world.patch(), 1, blocks[: table.lengths[0]])
    with pytest.raises(FormatError, match=r"a block|streams change"):
        world.read(lie)


def test_refusal_names_the_file_at_every_level(world: World) -> None:
    container, metadata = world.patch()[:-1], with_meta(world.patch(), table=-1)
    table = with_column(world.patch(), "changed", 0, 0)
    block, indices = with_block(world.patch(), 0, b"\xff"), indices_lie(world, "I32", {0: -1})
    for lie in (container, metadata, table, block, indices):
        assert world.refuses(lie, FormatError, "table|block|indices|its header").file == str(world.file)


def test_block_written_by_hand_is_read(world: World) -> None:
    lone = with_column(with_block(world.patch(), 0, ONE_UP), "changed", 0, 1)
    changed = decode(lone, world.old).tensors[0]
    assert changed.indices.tolist() == [3]
    assert int(changed.new[0]) in (int(changed.old[0]) + 1, int(changed.old[0]) - 1)


# -- where it leads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_base(world: World, codec: str) -> None:
    error = world.refuses(with_meta(world.patch(codec), base="0" * 64), BaseError, "the patch begins at 000000000000")
    assert (error.expected, error.found) == ("0" * 64, world.fingerprint.digest)
    assert error.hint


@pytest.mark.parametrize("codec", CODECS)
def test_weights_that_are_not_the_base(world: World, codec: str) -> None:
    world.old.read("b")[7] ^= 1
    write_file(world.target, world.old)
    before = tree(world.home)
    world.file.write_bytes(encode(world.diff, codec, sample()[0]))
    with pytest.raises(BaseError, match="the weights are at") as caught:
        apply_in_place(world.file, world.target)
    assert caught.value.expected == world.fingerprint.digest
    assert tree(world.home) == before


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_result(world: World, codec: str) -> None:
    error = world.refuses(
        with_meta(world.patch(codec), result="f" * 64), ResultError, "not to its stated result ffffffffffff"
    )
    assert (error.expected, error.found) == ("f" * 64, world.reached.digest)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("codec", CODECS)
def test_digest_lies(world: World, codec: str, row: int) -> None:
    digests = np.frombuffer(Parts.of(world.patch(codec)).entries[DIGESTS].data, np.uint64).copy()
    honest = int(digests[row])
    digests[row] += 1
    lie = with_stream(world.patch(codec), DIGESTS, digests.tobytes())
    error = world.refuses(lie, ResultError, "not lead to the tensor digest")
    assert error.tensor == "ab"[row]
    assert int(error.expected, 16) == int(error.found, 16) + 1 == honest + 1


@pytest.mark.parametrize("row", [0, 1])
def test_value_lies(world: World, row: int) -> None:
    name = "ab"[row]
    values = bytearray(Parts.of(world.patch("plain")).entries[f"{name}.values"].data)
    values[0] ^= 64
    lie = with_stream(world.patch("plain"), f"{name}.values", bytes(values))
    assert world.refuses(lie, ResultError, "not lead to the tensor digest").tensor == name


def test_patch_that_leaves_a_changed_tensor_out(world: World) -> None:
    parts, table = Parts.of(world.patch("plain")), Table.of(world.patch("plain"))
    for column in (table.names, table.dtypes, table.ranks, table.sizes, table.boxes, table.changed, table.counts):
        column.pop()
    del parts.entries["b.indices"], parts.entries["b.values"]
    digests = parts.entries[DIGESTS].data
    lie = with_table(with_stream(parts.joined(), DIGESTS, digests[:8]), table)
    assert world.refuses(lie, ResultError, "not to its stated result").expected == world.reached.digest


def test_patch_without_a_base_that_leaves_a_tensor_out(world: World) -> None:
    """Its result counts the missing tensor as if it had no elements; the weights' own bits would stay."""
    table = Table.of(world.anchor())
    for column in (table.names, table.dtypes, table.ranks, table.boxes, table.changed, table.counts):
        column.pop()
    table.sizes = table.sizes[:2]
    lie = with_stream(without(world.anchor(), "b.values"), DIGESTS, world.reached["a"].to_bytes(8, "little"))
    half = Fingerprint(world.reached.table, (world.reached["a"], 0))
    lie = with_meta(with_table(lie, table), result=half.digest)
    world.file.write_bytes(lie)
    before = tree(world.home)
    with pytest.raises(WeightcastError):
        world.read(lie)
    with pytest.raises(WeightcastError):
        apply_in_place(world.file, world.target)
    assert tree(world.home) == before


def test_indices_in_a_patch_without_a_base(world: World) -> None:
    lie = with_meta(world.patch("plain"), base=None)
    assert world.refuses(lie, FormatError, "without a base|indices and values do not fit").tensor == "a"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("names", 1, (0, b"c")), ("dtypes", 1, 16), ("sizes", 2, 301)],
    ids=["name", "dtype", "shape"],
)
def test_tensor_missing_from_the_weights(world: World, codec: str, column: str, row: int, value: Any) -> None:
    lie = with_column(world.patch(codec), column, row, value)
    if codec == "plain":
        name, dtype = ("c" if column == "names" else "b"), ("U32" if column == "dtypes" else "F32")
        parts = Parts.of(lie)
        values, indices = parts.entries.pop("b.values"), parts.entries.pop("b.indices")
        parts.entries |= {f"{name}.values": values._replace(dtype=dtype), f"{name}.indices": indices}
        lie = parts.joined()
    error = world.refuses(lie, UsageError, "changes a tensor that the weights do not have")
    assert error.tensor == ("c" if column == "names" else "b")


# -- one bit -----------------------------------------------------------------------------------------------------------


def flips(patch: bytes) -> Iterator[tuple[int, bytes]]:
    """The patch with each of its bits flipped in turn."""
    for at in range(8 * len(patch)):
        flipped = bytearray(patch)
        flipped[at >> 3] ^= 1 << (at & 7)
        yield at, bytes(flipped)


@pytest.mark.parametrize("codec", CODECS)
def test_flipped_bit_anywhere_is_refused(world: World, codec: str) -> None:
    """But for bits without a meaning: sizes that are for people, what zlib fills its last byte with, and the like."""
    honest = world.patch(codec)
    said = PatchReader(BytesSource(honest))
    accepted = []
    for at, flipped in flips(honest):
        try:
            read = world.read(flipped)
        except WeightcastError:
            continue
        accepted.append(at)
        says = PatchReader(BytesSource(flipped))
        assert replace(says.header, model=said.header.model) == said.header, f"bit {at}"
        assert says.rows == said.rows, f"bit {at}"
        for tensor in read.tensors:
            bits = world.old.read(tensor.spec.name).copy()
            tensor.scatter(bits)
            assert np.array_equal(bits, world.new.read(tensor.spec.name)), f"bit {at}"
    digits = len(json.dumps(Parts.of(honest).meta["model"]))
    padding_and_slopes = 7 + 2
    assert len(accepted) <= 8 * digits + padding_and_slopes


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_flipped_byte_anywhere_leaves_the_target_alone(world: World, codec: str) -> None:
    honest, before = world.patch(codec), tree(world.home)
    start = 8 + int.from_bytes(honest[:8], "little")
    for at in (*range(0, start, 7), *range(start, len(honest))):
        flipped = bytearray(honest)
        flipped[at] ^= 255
        world.file.write_bytes(flipped)
        with pytest.raises(WeightcastError):
            apply_in_place(world.file, world.target)
        assert tree(world.home) == before
