"""One test per lie a file can tell: it is refused by name, and the weights are what they were (SPEC 8 and 10)."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
from cases import Bag, gaussian, moved, random_bits, same_bits, write_file, write_folder

from weightcast import Checkpoint, Fingerprint, Patch, TensorSpec, advance, anchor, decode, diff, encode, fingerprint
from weightcast.checkpoint import INDEX, SINGLE, redo_path
from weightcast.container import BytesSource
from weightcast.errors import (
    BaseError,
    CheckpointError,
    FormatError,
    ResultError,
    UsageError,
    VersionError,
    WeightcastError,
)
from weightcast.offline import apply_in_place, resume
from weightcast.wire import PatchReader

CODECS = ("plain", "gap", "banded")
BLOCK_CODECS = ("gap", "banded")
ITEM = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8, "U64": 8}
DIGESTS, TABLE, BLOCKS = "weightcast.digests", "weightcast.table", "weightcast.blocks"

E = TypeVar("E", bound=WeightcastError)
Header = dict[str, Any]


# -- taking objects apart, and joining them with a lie inside ----------------------------------------------------------


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
        sizes, changed, counts = column(sum(ranks)), column(rows), column(rows)
        return cls(names, dtypes, ranks, sizes, changed, counts, column(sum(counts)), column(sum(counts)))

    def raw(self) -> bytes:
        names = b"".join(varint(shared) + varint(len(rest)) + rest for shared, rest in self.names)
        columns = (self.dtypes, self.ranks, self.sizes, self.changed, self.counts, self.skips, self.lengths)
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


# -- the weights that are lied to --------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    """All there is in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def sample() -> tuple[Bag, Bag]:
    """Two tensors before and after a step: in one only small weights move, in the other some move far."""
    rng = np.random.default_rng(7)
    a, b = TensorSpec("a", "BF16", (40, 25)), TensorSpec("b", "F32", (300,))
    old = {a: gaussian(rng, 1000), b: random_bits(rng, b)}
    small = old[a] & 0x7FFF < 0x3C00
    new = {a: np.where(small, moved(rng, old[a], 0.2), old[a]), b: moved(rng, old[b], 0.06, furthest=900)}
    return Bag(old), Bag(new)


class World:
    """Weights in memory and, the same, in a file; patches that lead on from them; and a place for lies."""

    def __init__(self, folder: Path):
        self.old, self.new = sample()
        self.changed = int((self.old.read("a") != self.new.read("a")).sum())
        self.standing, self.reached = fingerprint(self.old), fingerprint(self.new)
        self.diff = diff(self.old, self.new, self.standing)
        self.home = folder / "home"
        self.home.mkdir()
        self.target = self.home / "weights.safetensors"
        write_file(self.target, self.old)
        self.file = folder / "lie.patch"

    def patch(self, codec: str = "gap") -> bytes:
        return encode(self.diff, codec, self.old)

    def anchor(self) -> bytes:
        """The new weights as a patch without a base."""
        return encode(anchor(self.new), "plain")

    def read(self, patch: bytes) -> Patch:
        """Decode and prove in memory."""
        read = decode(patch, self.old)
        advance(self.standing, read)
        return read

    def refuses(self, lie: bytes, kind: type[E], says: str) -> E:
        """Both ways to read a patch refuse it with this very error, and the target is as it was."""
        with pytest.raises(kind, match=says) as in_memory:
            self.read(lie)
        assert type(in_memory.value) is kind
        self.file.write_bytes(lie)
        before = tree(self.home)
        with pytest.raises(kind, match=says) as caught:
            apply_in_place(self.file, self.target)
        assert type(caught.value) is kind
        assert tree(self.home) == before
        return caught.value


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Outcome(NamedTuple):
    kind: str
    text: str


HEADROOM = 2 << 30
CHILD = f"""
import json, resource, sys
from pathlib import Path
import weightcast
from weightcast.offline import apply_in_place, resume

weightcast.warm_up()
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {HEADROOM}, size + {HEADROOM}))
target, *patches = map(Path, sys.argv[1:])
for run in [lambda p=p: apply_in_place(p, target) for p in patches] or [lambda: resume(target)]:
    try:
        kind, text = "accepted", run().position
    except (weightcast.WeightcastError, MemoryError, LookupError) as error:
        kind, text = type(error).__name__, str(error)
    print(json.dumps([kind, text]), flush=True)
"""


def bounded(target: Path, *patches: Path, seconds: float = 120) -> list[Outcome]:
    """What applying them says, in a process of its own that may neither crash nor take much memory or time.

    Without patches: what resuming says.
    """
    command = [sys.executable, "-c", CHILD, str(target), *map(str, patches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"the reader died with {done.returncode}: {done.stderr[-2000:]}"
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def refused_in_bounds(world: World, lie: bytes) -> Outcome:
    world.file.write_bytes(lie)
    before = tree(world.home)
    (outcome,) = bounded(world.target, world.file)
    assert tree(world.home) == before
    return outcome


# -- controls: without a lie all of this is accepted -------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_joined_again_without_a_lie_it_is_accepted(world: World, codec: str) -> None:
    honest = world.patch(codec)
    rejoined = with_table(Parts.of(honest).joined(), Table.of(honest))
    assert world.read(rejoined).result == world.reached.position
    world.file.write_bytes(rejoined)
    assert apply_in_place(world.file, world.target).position == world.reached.position
    with Checkpoint(world.target) as weights:
        assert same_bits(weights, world.new)


def test_honest_patch_without_a_base_is_accepted(world: World) -> None:
    world.file.write_bytes(Parts.of(world.anchor()).joined())
    assert apply_in_place(world.file, world.target).position == world.reached.position


def test_block_written_by_hand_is_read(world: World) -> None:
    lone = with_column(with_block(world.patch(), 0, ONE_UP), "changed", 0, 1)
    changed = decode(lone, world.old).tensors[0]
    assert changed.indices.tolist() == [3]
    assert int(changed.new[0]) in (int(changed.old[0]) + 1, int(changed.old[0]) - 1)


def test_the_sample_makes_use_of_bands(world: World) -> None:
    assert Parts.of(world.patch("banded")).entries[BLOCKS].data[0] > 1


@pytest.mark.parametrize("codec", CODECS)
def test_honest_patch_needs_little_memory(world: World, codec: str) -> None:
    world.file.write_bytes(world.patch(codec))
    assert bounded(world.target, world.file) == [("accepted", world.reached.position)]


# -- the container -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_truncated_at_every_byte(world: World, codec: str) -> None:
    honest = world.patch(codec)
    for length in range(len(honest)):
        world.refuses(honest[:length], FormatError, "too short|ends within its header|bytes of data, its header")


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_behind_the_end(world: World, codec: str) -> None:
    world.refuses(world.patch(codec) + b"\0", FormatError, "bytes of data, its header speaks of")


@pytest.mark.parametrize(
    "file",
    [b"PK\x03\x04" + bytes(100), b"\x80\x04\x95" + bytes(100), b"\x1f\x8b" + bytes(100), b"weightcast" * 20],
    ids=["zip", "pickle", "gzip", "text"],
)
def test_not_safetensors(world: World, file: bytes) -> None:
    world.refuses(file, FormatError, "over the limit|ends within its header|no JSON")


def test_html_where_a_patch_should_be(world: World) -> None:
    world.refuses(sealed(b"<html>404</html>"), FormatError, "the header is no JSON")


def test_empty_file(world: World) -> None:
    world.refuses(b"", FormatError, "too short")


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_oversized_header(world: World, length: int) -> None:
    lie = struct.pack("<Q", length) + world.patch()[8:]
    world.refuses(lie, FormatError, f"{length} bytes, over the limit")


def test_header_longer_than_file(world: World) -> None:
    honest = world.patch()
    lie = struct.pack("<Q", len(honest) - 7) + honest[8:]
    world.refuses(lie, FormatError, "ends within its header")


def test_header_not_utf8(world: World) -> None:
    world.refuses(sealed(b'{"\xff": 1}'), FormatError, "header is no JSON")


@pytest.mark.parametrize("text", [b"[]", b"null", b"7", b'"x"'])
def test_header_not_an_object(world: World, text: bytes) -> None:
    world.refuses(sealed(text), FormatError, "no JSON object")


@pytest.mark.parametrize("text", [b"", b"{", b"{} {}", b"{'a': 1}", b'{"a": 1,}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_header_not_json(world: World, text: bytes) -> None:
    world.refuses(sealed(text), FormatError, "header is no JSON")


def test_duplicate_json_keys(world: World) -> None:
    header, data = opened(world.patch())
    text = json.dumps(header).encode()
    table = json.dumps(header[TABLE]).encode()
    meta = header["__metadata__"]["weightcast"]
    twice_in_header = text[:-1] + b', "' + TABLE.encode() + b'": ' + table + b"}"
    twice_in_entry = text.replace(table, table[:-1] + b', "dtype": "U8"}')
    header["__metadata__"]["weightcast"] = meta[:-1] + ',"format":1}'
    world.refuses(sealed(twice_in_header, data), FormatError, "header has a key twice")
    world.refuses(sealed(twice_in_entry, data), FormatError, "header has a key twice")
    world.refuses(sealed(header, data), FormatError, "metadata has a key twice")


def test_deeply_nested_json(world: World) -> None:
    deep = b"[" * 1_000_000
    closed = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    meta = {"__metadata__": {"weightcast": "[" * 1_000_000}}
    for lie in (sealed(deep), sealed(closed), sealed(meta)):
        world.refuses(lie, FormatError, "is no JSON")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, 8.5, 1e30, "0", None, True, [0], 1 << 70])
def test_nan_or_float_in_offsets(world: World, number: Any) -> None:
    end = opened(world.patch())[0][DIGESTS]["data_offsets"][1]
    error = world.refuses(with_field(world.patch(), DIGESTS, "data_offsets", [number, end]), FormatError, "offsets are")
    assert error.tensor == DIGESTS


@pytest.mark.parametrize("number", [float("nan"), 2.0, "2", None, True, -2, 1 << 63])
def test_impossible_number_in_shape(world: World, number: Any) -> None:
    error = world.refuses(with_field(world.patch(), DIGESTS, "shape", [number]), FormatError, "a shape is impossible")
    assert error.tensor == DIGESTS


@pytest.mark.parametrize("offsets", [[-16, 0], [-1, 15], [16, 0], [0], [0, 16, 32], [], {}, "0,16", 16])
def test_negative_offsets(world: World, offsets: Any) -> None:
    error = world.refuses(with_field(world.patch(), DIGESTS, "data_offsets", offsets), FormatError, "offsets are imp")
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


def test_hole_in_front_of_the_first_entry(world: World) -> None:
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
    error = world.refuses(sealed(header | {TABLE: fields}, data), FormatError, "other fields than dtype, shape, data_o")
    assert error.tensor == TABLE
    world.refuses(with_field(world.patch(), TABLE, "extra", 1), FormatError, "other fields than dtype, shape, data_o")


def test_more_than_64_dimensions(world: World) -> None:
    lie = with_field(world.patch(), DIGESTS, "shape", [2] + [1] * 64)
    assert world.refuses(lie, FormatError, "a shape is impossible").tensor == DIGESTS


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
    world.refuses(metadata_lie(world, {"weightcast": text}), FormatError, "metadata is no JSON|no format version")


def test_metadata_with_half_a_character(world: World) -> None:
    """JSON can escape half of a surrogate pair, which UTF-8 cannot hold."""
    world.refuses(metadata_lie(world, {"weightcast": "\ud800"}), FormatError, "header has half a surrogate pair")
    world.refuses(with_meta(world.patch(), base="\ud800" * 64), FormatError, "metadata has half a surrogate pair")


def test_metadata_without_a_field(world: World) -> None:
    for field in Parts.of(world.patch()).meta:
        parts = Parts.of(world.patch())
        del parts.meta[field]
        world.refuses(parts.joined(), FormatError, "other fields|no format version")


def test_metadata_with_another_field(world: World) -> None:
    world.refuses(with_meta(world.patch(), signature="x"), FormatError, "other fields")


@pytest.mark.parametrize("version", [0, 2, -1, 1 << 80])
def test_unknown_version(world: World, version: int) -> None:
    error = world.refuses(with_meta(world.patch(), format=version), VersionError, f"format version {version} is not")
    assert "reads 1" in (error.hint or "")


def test_unknown_version_is_judged_before_the_rest(world: World) -> None:
    later = json.dumps({"format": 2, "boxes": []})
    world.refuses(metadata_lie(world, {"weightcast": later}), VersionError, "format version 2")
    world.refuses(metadata_lie(world, {"weightcast": later, "signature": "x"}), VersionError, "format version 2")


@pytest.mark.parametrize("version", ["1", 1.0, True, None, [1]])
def test_version_that_is_no_number(world: World, version: Any) -> None:
    world.refuses(with_meta(world.patch(), format=version), FormatError, "no format version")


@pytest.mark.parametrize("codec", ["zstd", "", "GAP", "gap "])
def test_unknown_codec(world: World, codec: str) -> None:
    error = world.refuses(with_meta(world.patch(), codec=codec), VersionError, f"unknown codec '{codec}'")
    assert "plain, gap, banded" in (error.hint or "")


@pytest.mark.parametrize("codec", [1, None, ["gap"], {}])
def test_codec_that_is_no_name(world: World, codec: Any) -> None:
    world.refuses(with_meta(world.patch(), codec=codec), FormatError, "codec or table size is impossible")


@pytest.mark.parametrize("field", ["base", "result"])
@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "٣" * 64, " " * 64, 0, [], {}])
def test_digest_not_hexadecimal(world: World, field: str, digest: Any) -> None:
    world.refuses(with_meta(world.patch(), **{field: digest}), FormatError, "base or result is no position digest")


def test_no_result(world: World) -> None:
    world.refuses(with_meta(world.patch(), result=None), FormatError, "base or result is no position digest")


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_no_base_with_gap(world: World, codec: str) -> None:
    lie = with_meta(world.patch(codec), base=None)
    world.refuses(lie, FormatError, f"without a base cannot be coded with {codec}")


@pytest.mark.parametrize(
    "model", [[], [1, 2], [1, 2, 3, 4], [1, 2, -3], [1, 2, 3.0], [1, 2, True], None, {}, [1 << 63] * 3]
)
def test_impossible_model_size(world: World, model: Any) -> None:
    world.refuses(with_meta(world.patch(), model=model), FormatError, "model's size is impossible")


# -- the table ---------------------------------------------------------------------------------------------------------


def test_table_is_no_zlib_stream(world: World) -> None:
    honest = Parts.of(world.patch()).entries[TABLE].data
    world.refuses(with_stream(world.patch(), TABLE, bytes(20)), FormatError, "cannot be decompressed")
    world.refuses(with_stream(world.patch(), TABLE, b""), FormatError, "another size than stated")
    bad_checksum = honest[:-1] + bytes([honest[-1] ^ 1])
    world.refuses(with_stream(world.patch(), TABLE, bad_checksum), FormatError, "cannot be decompressed")


def test_table_cut_off(world: World) -> None:
    honest = Parts.of(world.patch()).entries[TABLE].data
    for length in range(len(honest)):
        world.refuses(with_stream(world.patch(), TABLE, honest[:length]), FormatError, "another size than stated")


@pytest.mark.parametrize("more", [b"\0", b"x" * 1000, zlib.compress(b"")])
def test_bytes_behind_the_zlib_stream(world: World, more: bytes) -> None:
    honest = Parts.of(world.patch()).entries[TABLE].data
    world.refuses(with_stream(world.patch(), TABLE, honest + more), FormatError, "another size than stated")


@pytest.mark.parametrize("by", [-1, 1, 1000])
def test_declared_table_size_is_another(world: World, by: int) -> None:
    size = Parts.of(world.patch()).meta["table"]
    world.refuses(with_meta(world.patch(), table=size + by), FormatError, "another size than stated")


@pytest.mark.parametrize("size", [(1 << 24) + 1, 1 << 40, 1 << 100, -1])
def test_declared_table_size_would_exhaust_memory(world: World, size: int) -> None:
    world.refuses(with_meta(world.patch(), table=size), FormatError, "over the limit")


def test_table_at_its_limit_but_not_there(world: World) -> None:
    kind, text = refused_in_bounds(world, with_meta(world.patch(), table=1 << 24))
    assert kind == "FormatError"
    assert "another size than stated" in text


@pytest.mark.parametrize("size", ["9", 9.0, None, True, [9]])
def test_declared_table_size_is_no_number(world: World, size: Any) -> None:
    world.refuses(with_meta(world.patch(), table=size), FormatError, "codec or table size is impossible")


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
    assert "another size than stated" in text


def test_small_file_with_a_table_of_millions_of_numbers(world: World) -> None:
    honest = Table.of(world.patch()).raw()
    lie = with_table(world.patch(), honest + bytes((1 << 24) - len(honest)))
    kind, text = refused_in_bounds(world, lie)
    assert kind == "FormatError"
    assert "goes on behind its last row" in text


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
    table = Table(names, [4] * rows, [1] * rows, [1] * rows, [1] * rows, [1] * rows, [0] * rows, none)
    (kind, _text) = refused_in_bounds(world, with_table(lie, table))
    assert kind in ("FormatError", "UsageError")


@pytest.mark.parametrize("name", [b"x" * 4097, b"x" * (1 << 20)])
def test_name_longer_than_the_limit(world: World, name: bytes) -> None:
    world.refuses(with_column(world.patch(), "names", 1, (0, name)), FormatError, "name in the table is .*too long")


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_written_that_no_reader_takes(codec: str) -> None:
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
    world.refuses(with_stream(world.patch(), DIGESTS, b""), FormatError, "the table goes on behind its last row")


def test_digests_of_another_shape(world: World) -> None:
    digests = Parts.of(world.patch()).entries[DIGESTS].data
    world.refuses(with_stream(world.patch(), DIGESTS, digests, shape=[1, 2]), FormatError, "digests are no list of U64")
    world.refuses(with_stream(world.patch(), DIGESTS, digests, dtype="I64"), FormatError, "digests are no list of U64")


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


def test_table_goes_on(world: World) -> None:
    world.refuses(with_table(world.patch(), Table.of(world.patch()).raw() + b"\0"), FormatError, "behind its last row")


@pytest.mark.parametrize("rank", [65, 1 << 20, 1 << 62])
def test_too_many_dimensions_in_table(world: World, rank: int) -> None:
    world.refuses(with_column(world.patch(), "ranks", 0, rank), FormatError, "too many dimensions|ends too early")


@pytest.mark.parametrize("size", [(1 << 48) + 1, 1 << 60])
def test_impossible_shape_in_table(world: World, size: int) -> None:
    error = world.refuses(with_column(world.patch(), "sizes", 0, size), FormatError, "shape in the table is impossible")
    assert error.tensor == "a"


def test_packed_values_that_do_not_fill_bytes(world: World) -> None:
    table = Table.of(world.patch())
    table.dtypes[0], table.sizes[0:2] = 1, [1, 1001]
    assert (
        world.refuses(with_table(world.patch(), table), FormatError, "shape in the table is impossible").tensor == "a"
    )


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
        assert "tensor a" in text or "header speaks of" in text or "entries overlap" in text


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
    error = world.refuses(with_column(world.anchor(), "changed", 1, 299), FormatError, "without a base changes less")
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
    assert (
        world.refuses(with_table(world.patch("plain"), table), FormatError, "a row has blocks its codec").tensor == "a"
    )


def test_no_blocks_without_plain(world: World) -> None:
    table = Table.of(world.patch())
    table.counts[0], table.skips, table.lengths = 0, table.skips[1:], table.lengths[1:]
    assert world.refuses(with_table(world.patch(), table), FormatError, "none where it must").tensor == "a"


def test_plain_patch_that_says_it_is_gap(world: World) -> None:
    world.refuses(with_meta(world.patch("plain"), codec="gap"), FormatError, f"the entry {BLOCKS} is missing")
    world.refuses(
        with_meta(world.patch("gap"), codec="plain"), FormatError, "a row has blocks its codec has not|too ear"
    )


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
def test_stranger_entry(world: World, codec: str, name: str) -> None:
    lie = with_stream(world.patch(codec), name, b"x", "U8")
    assert world.refuses(lie, FormatError, "an entry belongs to no tensor").tensor == name


def test_blocks_entry_in_a_plain_patch(world: World) -> None:
    lie = with_stream(world.patch("plain"), BLOCKS, b"x", "U8")
    assert world.refuses(lie, FormatError, "an entry belongs to no tensor").tensor == BLOCKS


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
    world.refuses(with_table(world.patch(), table), FormatError, "the table speaks of .* bytes of blocks")


@pytest.mark.parametrize("length", [1 << 40, (1 << 63) - 1])
def test_block_longer_than_any_file(world: World, length: int) -> None:
    lie = with_column(world.patch(), "lengths", 0, length)
    world.refuses(lie, FormatError, "the table speaks of .* bytes of blocks")


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
    "gap past the end": (bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, *rice(1001, 10)), "gaps lead past"),
    "closing gap too long": (
        bitstring(ONE_BAND, (10, 5), (0, 1), NOTHING, *rice(3, 10), *rice(997, 10)),
        "gaps lead p",
    ),
    "escaped gap past the end": (bitstring(ONE_BAND, (0, 5), (0, 1), NOTHING, *rice((1 << 19) - 1, 0)), "gaps lead p"),
    "far gap past the end": (bitstring(*FAR[:-4], *rice(2, 0)), "gaps lead past"),
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
    "a raw block too short": (b"\0" + bytes(1999), "another size than its elements"),
    "a raw block too long": (b"\0" + bytes(2001), "another size than its elements"),
    "a raw block of nothing": (b"\0", "another size than its elements"),
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


# -- where it leads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_base(world: World, codec: str) -> None:
    error = world.refuses(with_meta(world.patch(codec), base="0" * 64), BaseError, "the patch begins at 000000000000")
    assert (error.expected, error.found) == ("0" * 64, world.standing.position)
    assert error.hint


@pytest.mark.parametrize("codec", CODECS)
def test_weights_that_are_not_the_base(world: World, codec: str) -> None:
    world.old.read("b")[7] ^= 1
    write_file(world.target, world.old)
    before = tree(world.home)
    world.file.write_bytes(encode(world.diff, codec, sample()[0]))
    with pytest.raises(BaseError, match="the weights stand at") as caught:
        apply_in_place(world.file, world.target)
    assert caught.value.expected == world.standing.position
    assert tree(world.home) == before


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_result(world: World, codec: str) -> None:
    error = world.refuses(
        with_meta(world.patch(codec), result="f" * 64), ResultError, "not to ffffffffffff as it states"
    )
    assert (error.expected, error.found) == ("f" * 64, world.reached.position)


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
    for column in (table.names, table.dtypes, table.ranks, table.sizes, table.changed, table.counts):
        column.pop()
    del parts.entries["b.indices"], parts.entries["b.values"]
    digests = parts.entries[DIGESTS].data
    lie = with_table(with_stream(parts.joined(), DIGESTS, digests[:8]), table)
    assert world.refuses(lie, ResultError, "as it states").expected == world.reached.position


def test_patch_without_a_base_that_leaves_a_tensor_out(world: World) -> None:
    """Its result counts the missing tensor as if it had no elements; the weights' own bits would stay."""
    table = Table.of(world.anchor())
    for column in (table.names, table.dtypes, table.ranks, table.changed, table.counts):
        column.pop()
    table.sizes = table.sizes[:2]
    lie = with_stream(without(world.anchor(), "b.values"), DIGESTS, world.reached["a"].to_bytes(8, "little"))
    half = Fingerprint(world.reached.table, (world.reached["a"], 0))
    lie = with_meta(with_table(lie, table), result=half.position)
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
def test_tensor_that_the_weights_have_not(world: World, codec: str, column: str, row: int, value: Any) -> None:
    lie = with_column(world.patch(codec), column, row, value)
    if codec == "plain":
        name, dtype = ("c" if column == "names" else "b"), ("U32" if column == "dtypes" else "F32")
        parts = Parts.of(lie)
        values, indices = parts.entries.pop("b.values"), parts.entries.pop("b.indices")
        parts.entries |= {f"{name}.values": values._replace(dtype=dtype), f"{name}.indices": indices}
        lie = parts.joined()
    error = world.refuses(lie, UsageError, "a tensor that the weights have not, or of another dtype or shape")
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


# -- files and folders of weights --------------------------------------------------------------------------------------


@dataclass
class Shards:
    """A checkpoint folder of two files, and a patch that leads on from it."""

    folder: Path
    patch: Path

    def file(self, i: int) -> Path:
        return sorted(self.folder.glob("*.safetensors"))[i]

    def edit_index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        index = json.loads((self.folder / INDEX).read_text())
        change(index["weight_map"])
        (self.folder / INDEX).write_text(json.dumps(index))

    def refuses(self, kind: type[E], says: str) -> E:
        """Neither reading nor applying takes it, and nothing in it or beside it is touched."""
        before = tree(self.folder.parent)
        for action in (lambda: Checkpoint(self.folder).close(), lambda: apply_in_place(self.patch, self.folder)):
            with pytest.raises(kind, match=says) as caught:
                action()
            assert type(caught.value) is kind
            assert tree(self.folder.parent) == before
        return caught.value


@pytest.fixture
def shards(world: World, tmp_path: Path) -> Shards:
    write_folder(tmp_path / "shards", world.old)
    world.file.write_bytes(world.patch())
    return Shards(tmp_path / "shards", world.file)


def test_honest_folder_is_accepted(shards: Shards, world: World) -> None:
    assert apply_in_place(shards.patch, shards.folder).position == world.reached.position


@pytest.mark.parametrize("place", ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..", ".", "./x"])
def test_index_points_outside_its_folder(shards: Shards, place: str) -> None:
    """A readable file waits there, so that nothing but the rule keeps it from being read."""
    (shards.folder / "sub").mkdir()
    for waiting in (shards.folder.parent / "x.safetensors", shards.folder / "sub" / "x.safetensors"):
        waiting.write_bytes(shards.file(0).read_bytes())
    shards.edit_index(lambda weight_map: weight_map.update(a=place))
    error = shards.refuses(CheckpointError, "the index points outside its folder")
    assert (error.tensor, error.file) == ("a", str(shards.folder / INDEX))


@pytest.mark.parametrize("place", [7, None, ["x"], {"file": "x"}])
def test_index_points_to_no_file_name(shards: Shards, place: Any) -> None:
    shards.edit_index(lambda weight_map: weight_map.update(a=place))
    assert shards.refuses(CheckpointError, "the index points").tensor == "a"


UNUSABLE = {"empty": "", "nul": "x\0y", "long": "x" * 300}


@pytest.mark.parametrize("place", UNUSABLE.values(), ids=UNUSABLE)
def test_index_names_a_file_that_cannot_be(shards: Shards, place: str) -> None:
    shards.edit_index(lambda weight_map: weight_map.update(a=place))
    shards.refuses(CheckpointError, "the index points|cannot open|not a regular file")


def test_index_with_half_a_character(shards: Shards) -> None:
    for change in ({"a": "\ud800"}, {"\ud800": "x"}):
        shards.edit_index(lambda weight_map, change=change: weight_map.update(change))
        assert shards.refuses(FormatError, "half a surrogate pair").file == str(shards.folder / INDEX)


def test_index_names_a_file_that_is_not_there(shards: Shards) -> None:
    gone = shards.file(1)
    gone.unlink()
    assert shards.refuses(CheckpointError, "cannot open: No such file").file == str(gone)


def test_symlink_where_a_tensor_file_should_be(shards: Shards) -> None:
    file = shards.file(0)
    moved_to = file.rename(shards.folder.parent / "elsewhere")
    file.symlink_to(moved_to)
    error = shards.refuses(CheckpointError, "a symbolic link stands where a file should be")
    assert error.file == str(file)
    assert error.hint


def test_symlink_to_nowhere(shards: Shards) -> None:
    file = shards.file(0)
    file.unlink()
    file.symlink_to("nowhere")
    assert shards.refuses(CheckpointError, "a symbolic link").file == str(file)


@pytest.mark.timeout(60)
def test_fifo_where_a_tensor_file_should_be(shards: Shards) -> None:
    file = shards.file(0)
    file.unlink()
    os.mkfifo(file)
    assert shards.refuses(CheckpointError, "not a regular file").file == str(file)


@pytest.mark.timeout(60)
def test_fifo_where_the_index_should_be(shards: Shards) -> None:
    (shards.folder / INDEX).unlink()
    os.mkfifo(shards.folder / INDEX)
    assert shards.refuses(CheckpointError, "not a regular file").file == str(shards.folder / INDEX)


@pytest.mark.timeout(60)
def test_fifo_where_a_patch_should_be(world: World) -> None:
    before = tree(world.home)
    os.mkfifo(world.file)
    with pytest.raises(CheckpointError, match="not a regular file") as caught:
        apply_in_place(world.file, world.target)
    assert caught.value.file == str(world.file)
    assert tree(world.home) == before


def test_device_where_a_patch_should_be(world: World) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        apply_in_place(Path("/dev/zero"), world.target)


def test_directory_where_a_tensor_file_should_be(shards: Shards) -> None:
    file = shards.file(0)
    file.unlink()
    file.mkdir()
    assert shards.refuses(CheckpointError, "not a regular file|Is a directory").file == str(file)


def test_index_and_file_disagree(shards: Shards) -> None:
    shards.edit_index(lambda weight_map: weight_map.update(c=weight_map["a"]))
    error = shards.refuses(CheckpointError, "the index and the file disagree")
    assert (error.tensor, error.file) == ("c", str(shards.file(0)))


def test_file_holds_a_tensor_the_index_has_not(shards: Shards) -> None:
    rest = [spec for spec in sample()[0].table if spec.name == "b"]
    write_file(shards.file(0), sample()[0])
    error = shards.refuses(CheckpointError, "the index and the file disagree")
    assert (error.tensor, error.file) == (rest[0].name, str(shards.file(0)))


def test_tensor_in_two_files(shards: Shards) -> None:
    (shards.folder / INDEX).unlink()
    write_file(shards.file(1), sample()[0])
    error = shards.refuses(CheckpointError, "a tensor is in .* too")
    assert (error.tensor, error.file) == ("a", str(shards.file(1)))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"weight_map": {"a": "x", "a": "y"}}', b"[" * 200_000])
def test_index_not_json(shards: Shards, text: bytes) -> None:
    (shards.folder / INDEX).write_bytes(text)
    error = shards.refuses(FormatError, "the index is no JSON|the index has a key twice")
    assert error.file == str(shards.folder / INDEX)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"weight_map": null}', '{"weight_map": ["a"]}'])
def test_no_weight_map(shards: Shards, text: str) -> None:
    (shards.folder / INDEX).write_text(text)
    assert shards.refuses(FormatError, "the index has no weight_map").file == str(shards.folder / INDEX)


def test_oversized_index(shards: Shards) -> None:
    with (shards.folder / INDEX).open("r+b") as index:
        index.truncate(100_000_001)
    with pytest.raises(FormatError, match="over the limit") as caught:
        Checkpoint(shards.folder)
    assert caught.value.file == str(shards.folder / INDEX)


def test_empty_folder(shards: Shards) -> None:
    for path in shards.folder.iterdir():
        path.unlink()
    error = shards.refuses(CheckpointError, "the folder has no safetensors files")
    assert error.file == str(shards.folder)
    assert SINGLE in (error.hint or "")


def test_no_such_folder(shards: Shards) -> None:
    gone = Shards(shards.folder / "gone", shards.patch)
    assert gone.refuses(CheckpointError, "no such file or folder").file == str(gone.folder)


@pytest.mark.parametrize("cut", [0, 7, 8, 50, -1])
def test_truncated_tensor_file(shards: Shards, cut: int) -> None:
    file = shards.file(1)
    file.write_bytes(file.read_bytes()[:cut])
    error = shards.refuses(FormatError, "too short|ends within its header|its header speaks of")
    assert error.file == str(file)


def test_tensor_name_with_half_a_character(world: World) -> None:
    header, data = opened(world.target.read_bytes())
    header["\ud800"] = header.pop("b")
    world.target.write_bytes(sealed(header, data))
    with pytest.raises(WeightcastError):
        Checkpoint(world.target)


# -- redo files: they lie beside the weights, and may have come with them ----------------------------------------------


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("names", 1, (0, b"c")), ("dtypes", 1, 16), ("sizes", 2, 1 << 40)],
    ids=["name", "dtype", "shape"],
)
def test_redo_file_of_another_model(world: World, column: str, row: int, value: Any) -> None:
    """The last index is at home in the tensor that the redo file speaks of, and far outside the one that is there."""
    lie = with_column(world.patch("plain"), column, row, value)
    name, dtype = ("c" if column == "names" else "b"), ("U32" if column == "dtypes" else "F32")
    parts = Parts.of(lie)
    values, indices = parts.entries.pop("b.values"), parts.entries.pop("b.indices")
    wide = np.frombuffer(indices.data, np.int32).astype(np.int64)
    if column == "sizes":
        wide[-1] = value - 1
    parts.entries[f"{name}.values"] = values._replace(dtype=dtype)
    parts.entries[f"{name}.indices"] = Stream("I64", indices.shape, wide.tobytes())
    redo_path(world.target).write_bytes(parts.joined())
    before = tree(world.home)
    ((kind, _text),) = bounded(world.target)
    assert tree(world.home) == before
    assert kind in ("FormatError", "CheckpointError", "UsageError", "ResultError")


def test_redo_file_cut_off(world: World) -> None:
    honest = world.patch("plain")
    redo_path(world.target).write_bytes(honest[:-1])
    before = tree(world.home)
    with pytest.raises(FormatError, match="bytes of data, its header speaks of"):
        resume(world.target)
    assert tree(world.home) == before
