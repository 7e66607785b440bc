"""One test per lie a file can tell: container and metadata (SPEC 8.1, 8.2)."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from cases import same_bits
from liars import World, bounded
from surgery import (
    BLOCK_CODECS,
    BLOCKS,
    CODECS,
    DIGESTS,
    TABLE,
    Parts,
    Table,
    opened,
    sealed,
    with_column,
    with_field,
    with_meta,
    with_table,
)

from weightcast import Checkpoint
from weightcast.disk.apply import apply_in_place
from weightcast.errors import (
    FormatError,
    VersionError,
)

# -- controls: without a lie all of this is accepted -------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_joined_again_without_a_lie_it_is_accepted(world: World, codec: str) -> None:
    honest = world.patch(codec)
    rejoined = with_table(Parts.of(honest).joined(), Table.of(honest))
    assert world.read(rejoined).result == world.reached.digest
    world.file.write_bytes(rejoined)
    assert apply_in_place(world.file, world.target).digest == world.reached.digest
    with Checkpoint(world.target) as weights:
        assert same_bits(weights, world.new)


def test_honest_patch_without_a_base_is_accepted(world: World) -> None:
    world.file.write_bytes(Parts.of(world.anchor()).joined())
    assert apply_in_place(world.file, world.target).digest == world.reached.digest


def test_sample_makes_use_of_bands(world: World) -> None:
    assert Parts.of(world.patch("banded")).entries[BLOCKS].data[0] > 1


@pytest.mark.parametrize("codec", CODECS)
def test_honest_patch_needs_little_memory(world: World, codec: str) -> None:
    world.file.write_bytes(world.patch(codec))
    assert bounded(world.target, world.file) == [("accepted", world.reached.digest)]


# -- the container -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_truncated_at_every_byte(world: World, codec: str) -> None:
    honest = world.patch(codec)
    for length in range(len(honest)):
        world.refuses(honest[:length], FormatError, "too short|ends within its header|bytes of data, its header")


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_after_the_end(world: World, codec: str) -> None:
    world.refuses(world.patch(codec) + b"\0", FormatError, "bytes of data, its header describes")


@pytest.mark.parametrize(
    "file",
    [b"PK\x03\x04" + bytes(100), b"\x80\x04\x95" + bytes(100), b"\x1f\x8b" + bytes(100), b"weightcast" * 20],
    ids=["zip", "pickle", "gzip", "text"],
)
def test_not_safetensors(world: World, file: bytes) -> None:
    world.refuses(file, FormatError, "not a safetensors file|not JSON")


def test_html_where_a_patch_should_be(world: World) -> None:
    world.refuses(sealed(b"<html>404</html>"), FormatError, "the header is not JSON")


def test_empty_file(world: World) -> None:
    world.refuses(b"", FormatError, "too short")


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_oversized_header(world: World, length: int) -> None:
    lie = struct.pack("<Q", length) + world.patch()[8:]
    world.refuses(lie, FormatError, f"{length} bytes long, over the limit")


def test_header_longer_than_file(world: World) -> None:
    honest = world.patch()
    lie = struct.pack("<Q", len(honest) - 7) + honest[8:]
    world.refuses(lie, FormatError, "ends within its header")


def test_header_not_utf8(world: World) -> None:
    world.refuses(sealed(b'{"\xff": 1}'), FormatError, "header is not JSON")


@pytest.mark.parametrize("text", [b"[]", b"null", b"7", b'"x"'])
def test_header_not_an_object(world: World, text: bytes) -> None:
    world.refuses(sealed(text), FormatError, "not a JSON object")


@pytest.mark.parametrize("text", [b"", b"{", b"{} {}", b"{'a': 1}", b'{"a": 1,}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_header_not_json(world: World, text: bytes) -> None:
    world.refuses(sealed(text), FormatError, "header is not JSON")


def test_duplicate_json_keys(world: World) -> None:
    header, data = opened(world.patch())
    text = json.dumps(header).encode()
    table = json.dumps(header[TABLE]).encode()
    meta = header["__metadata__"]["weightcast"]
    twice_in_header = text[:-1] + b', "' + TABLE.encode() + b'": ' + table + b"}"
    twice_in_entry = text.replace(table, table[:-1] + b', "dtype": "U8"}')
    header["__metadata__"]["weightcast"] = meta[:-1] + ',"format":1}'
    world.refuses(sealed(twice_in_header, data), FormatError, "header has a duplicate key")
    world.refuses(sealed(twice_in_entry, data), FormatError, "header has a duplicate key")
    world.refuses(sealed(header, data), FormatError, "metadata has a duplicate key")


def test_deeply_nested_json(world: World) -> None:
    deep = b"[" * 1_000_000
    closed = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    meta = {"__metadata__": {"weightcast": "[" * 1_000_000}}
    for lie in (sealed(deep), sealed(closed), sealed(meta)):
        world.refuses(lie, FormatError, "is not JSON")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["data_offsets", "shape"])
def test_nan_or_infinity_is_not_json(world: World, field: str, number: float) -> None:
    world.refuses(with_field(world.patch(), DIGESTS, field, [number, 1]), FormatError, "the header is not JSON")


@pytest.mark.parametrize("number", [0.0, 8.5, 1e30, "0", None, True, [0], 1 << 70])
def test_float_in_offsets(world: World, number: Any) -> None:
    end = opened(world.patch())[0][DIGESTS]["data_offsets"][1]
    error = world.refuses(
        with_field(world.patch(), DIGESTS, "data_offsets", [number, end]), FormatError, "impossible data_o"
    )
    assert error.tensor == DIGESTS


@pytest.mark.parametrize("number", [2.0, "2", None, True, -2, 1 << 63])
def test_impossible_number_in_shape(world: World, number: Any) -> None:
    error = world.refuses(with_field(world.patch(), DIGESTS, "shape", [number]), FormatError, "impossible shape")
    assert error.tensor == DIGESTS


@pytest.mark.parametrize("offsets", [[-16, 0], [-1, 15], [16, 0], [0], [0, 16, 32], [], {}, "0,16", 16])
def test_negative_offsets(world: World, offsets: Any) -> None:
    error = world.refuses(with_field(world.patch(), DIGESTS, "data_offsets", offsets), FormatError, "impossible data_o")
    assert error.tensor == DIGESTS


def test_overlapping_entries(world: World) -> None:
    lie = with_field(world.patch(), BLOCKS, "data_offsets", [8, 8 + len(Parts.of(world.patch()).entries[BLOCKS].data)])
    assert world.refuses(lie, FormatError, "entries overlap or leave a hole").tensor == BLOCKS


def test_two_entries_with_the_same_bytes(world: World) -> None:
    header, data = opened(world.patch())
    header["another"] = header[BLOCKS]
    world.refuses(sealed(header, data), FormatError, "entries overlap or leave a hole")


def test_hole_between_entries(world: World) -> None:
    header, data = opened(world.patch())
    digests = header.pop(DIGESTS)["data_offsets"][1]
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    header[DIGESTS] = {"dtype": "U64", "shape": [2], "data_offsets": [0, 16]}
    world.refuses(sealed(header, data[:digests] + bytes(8) + data[digests:]), FormatError, "overlap or leave a hole")


def test_hole_before_the_first_entry(world: World) -> None:
    header, data = opened(world.patch())
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    world.refuses(sealed(header, bytes(8) + data), FormatError, "overlap or leave a hole")


@pytest.mark.parametrize(("field", "value"), [("dtype", "U32"), ("shape", [1]), ("shape", [3]), ("shape", [])])
def test_dtype_shape_and_offsets_disagree(world: World, field: str, value: Any) -> None:
    error = world.refuses(with_field(world.patch(), DIGESTS, field, value), FormatError, "do not agree")
    assert error.tensor == DIGESTS


@pytest.mark.parametrize("fields", [{}, {"dtype": "U8"}, 7, None, [1], "U8"])
def test_entry_with_other_fields(world: World, fields: Any) -> None:
    header, data = opened(world.patch())
    error = world.refuses(
        sealed(header | {TABLE: fields}, data), FormatError, "must have exactly dtype, shape and data_o"
    )
    assert error.tensor == TABLE
    world.refuses(
        with_field(world.patch(), TABLE, "extra", 1), FormatError, "must have exactly dtype, shape and data_o"
    )


def test_more_than_64_dimensions(world: World) -> None:
    lie = with_field(world.patch(), DIGESTS, "shape", [2] + [1] * 64)
    assert world.refuses(lie, FormatError, "impossible shape").tensor == DIGESTS


@pytest.mark.parametrize("dtype", ["F128", "", "u64", 7, None, ["U64"], {}])
def test_unknown_dtype(world: World, dtype: Any) -> None:
    world.refuses(with_field(world.patch(), DIGESTS, "dtype", dtype), VersionError, "unknown dtype")


def test_unknown_dtype_names_its_entry(world: World) -> None:
    lie = with_field(world.patch(), DIGESTS, "dtype", "F128")
    assert world.refuses(lie, VersionError, "unknown dtype").tensor == DIGESTS


@pytest.mark.parametrize("code", [22, 1 << 40])
def test_unknown_dtype_code_in_table(world: World, code: int) -> None:
    world.refuses(with_column(world.patch(), "dtypes", 0, code), VersionError, f"dtype.* {code}")


# -- metadata ----------------------------------------------------------------------------------------------------------


def metadata_lie(world: World, metadata: Any) -> bytes:
    header, data = opened(world.patch())
    return sealed(header | {"__metadata__": metadata}, data)


def test_checkpoint_where_a_patch_should_be(world: World) -> None:
    error = world.refuses(world.target.read_bytes(), FormatError, "not a weightcast patch")
    assert "checkpoint" in (error.hint or "")


def test_metadata_with_two_keys(world: World) -> None:
    honest = opened(world.patch())[0]["__metadata__"]
    world.refuses(metadata_lie(world, honest | {"format": "pt"}), FormatError, "metadata")


@pytest.mark.parametrize("metadata", [[], "x", 7, {"weightcast": {}}, {"weightcast": None}, {"weightcast": 1}])
def test_metadata_not_a_map_of_strings(world: World, metadata: Any) -> None:
    world.refuses(metadata_lie(world, metadata), FormatError, "not a map of strings")


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '"x"'])
def test_metadata_not_a_json_object(world: World, text: str) -> None:
    world.refuses(metadata_lie(world, {"weightcast": text}), FormatError, "metadata is not JSON|no format version")


def test_metadata_with_half_a_character(world: World) -> None:
    """JSON can escape half of a surrogate pair, which UTF-8 cannot hold."""
    world.refuses(metadata_lie(world, {"weightcast": "\ud800"}), FormatError, "header has half a surrogate pair")
    world.refuses(with_meta(world.patch(), base="\ud800" * 64), FormatError, "metadata has half a surrogate pair")


def test_metadata_without_a_field(world: World) -> None:
    for field in Parts.of(world.patch()).meta:
        parts = Parts.of(world.patch())
        del parts.meta[field]
        world.refuses(parts.joined(), FormatError, "exactly the fields|no format version")


def test_metadata_with_another_field(world: World) -> None:
    world.refuses(with_meta(world.patch(), signature="x"), FormatError, "exactly the fields")


@pytest.mark.parametrize("version", [0, 2, -1, 1 << 80])
def test_unknown_version(world: World, version: int) -> None:
    error = world.refuses(with_meta(world.patch(), format=version), VersionError, f"unknown format version {version}")
    assert "reads 1" in (error.hint or "")


def test_unknown_version_is_judged_before_the_rest(world: World) -> None:
    later = json.dumps({"format": 2, "boxes": []})
    world.refuses(metadata_lie(world, {"weightcast": later}), VersionError, "format version 2")
    world.refuses(metadata_lie(world, {"weightcast": later, "signature": "x"}), VersionError, "format version 2")


@pytest.mark.parametrize("version", ["1", 1.0, True, None, [1]])
def test_version_that_is_not_a_number(world: World, version: Any) -> None:
    world.refuses(with_meta(world.patch(), format=version), FormatError, "no format version")


@pytest.mark.parametrize("codec", ["zstd", "", "GAP", "gap "])
def test_unknown_codec(world: World, codec: str) -> None:
    error = world.refuses(with_meta(world.patch(), codec=codec), VersionError, f"unknown codec '{codec}'")
    assert "plain, gap, banded" in (error.hint or "")


@pytest.mark.parametrize("codec", [1, None, ["gap"], {}])
def test_codec_that_is_not_a_name(world: World, codec: Any) -> None:
    world.refuses(with_meta(world.patch(), codec=codec), FormatError, "impossible codec or table size")


@pytest.mark.parametrize("field", ["base", "result"])
@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "٣" * 64, " " * 64, 0, [], {}])
def test_digest_not_hexadecimal(world: World, field: str, digest: Any) -> None:
    world.refuses(with_meta(world.patch(), **{field: digest}), FormatError, "base or result is not a digest")


def test_no_result(world: World) -> None:
    world.refuses(with_meta(world.patch(), result=None), FormatError, "base or result is not a digest")


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_no_base_with_gap(world: World, codec: str) -> None:
    lie = with_meta(world.patch(codec), base=None)
    world.refuses(lie, FormatError, f"without a base cannot be coded with {codec}")


@pytest.mark.parametrize(
    "model", [[], [1, 2], [1, 2, 3, 4], [1, 2, -3], [1, 2, 3.0], [1, 2, True], None, {}, [1 << 63] * 3]
)
def test_impossible_model_size(world: World, model: Any) -> None:
    world.refuses(with_meta(world.patch(), model=model), FormatError, "impossible model size")
