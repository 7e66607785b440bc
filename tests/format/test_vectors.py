"""The golden vectors through two readers that share no code, and the values that docs/SPEC.md itself states."""

import contextlib
import glob
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import simple_reader
import simple_table
from cases import Bag
from simple_reader import apply_objects, position, read_checkpoint, tensor_digest
from simple_safetensors import Rejected

import weightcast as wc
from weightcast.errors import VersionError, WeightcastError
from weightcast.format.joined import joined
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource
from weightcast.format.spec import DTYPES
from weightcast.format.tensors import Weights

SPEC = (Path(__file__).parents[2] / "docs" / "SPEC.md").read_text(encoding="utf-8")
VECTORS = Path(__file__).parents[1] / "vectors" / "v1"
CODECS = ("plain", "gap", "banded")
GOOD = sorted(path.name.removesuffix(".patch.safetensors") for path in (VECTORS / "good").glob("*.patch.safetensors"))
BROKEN = json.loads((VECTORS / "broken" / "cases.json").read_text())
DTYPE_ROWS = re.findall(r"\| (\d+) \| ([A-Z]\w+)(?: \((\d) bits a value\))? \| (\d+) \| (\d*) ?(?=\|)", SPEC)

good = pytest.mark.parametrize("name", GOOD)
broken = pytest.mark.parametrize("case", sorted(file.removesuffix(".patch.safetensors") for file in BROKEN))


def good_path(name: str, part: str) -> Path:
    return VECTORS / "good" / f"{name}.{part}.safetensors"


def objects_of(patch: Path) -> list[bytes]:
    """The objects of a patch: the file, and those beside it."""
    beside = patch.parent.glob(glob.escape(patch.name.replace(".patch.safetensors", "")) + ".beside-*.safetensors")
    return [path.read_bytes() for path in (patch, *sorted(beside))]


def decoded(objects: list[bytes], old: Weights | None) -> wc.Patch:
    """What weightcast reads in the objects of a patch."""
    patch = joined([PatchReader(BytesSource(data)) for data in objects])
    return wc.Patch(patch.header.base, patch.header.result, patch.header.model, tuple(patch.tensors(old)))


def held(table: wc.TensorTable, original: Weights | None) -> Bag:
    """A copy of weights in memory, of any dtype; zeros without an original to copy."""
    return Bag(
        {
            spec: np.zeros(spec.elements, spec.kind.word) if original is None else original.read(spec.name).copy()
            for spec in table
        }
    )


# -- good ------------------------------------------------------------------------------------------------------------


@good
def test_weightcast_reads_a_good_vector(name: str) -> None:
    with wc.Checkpoint(good_path(name, "new")) as new:
        old = wc.Checkpoint(good_path(name, "old")) if good_path(name, "old").exists() else None
        target = held(new.table, old)
        fingerprint = wc.fingerprint(target)
        patch = decoded(objects_of(good_path(name, "patch")), old)
        reached = patch.apply(target, fingerprint)
        assert patch.base == (fingerprint.digest if old else None)
        assert patch.result == reached.digest == wc.fingerprint(new).digest
        for spec in new.table:
            np.testing.assert_array_equal(target.read(spec.name), new.read(spec.name))
        if old:
            old.close()


@good
def test_simple_reader_reads_a_good_vector(name: str) -> None:
    path = good_path(name, "old")
    old = read_checkpoint(path.read_bytes()) if path.exists() else None
    new = apply_objects(objects_of(good_path(name, "patch")), old)
    assert new == read_checkpoint(good_path(name, "new").read_bytes())


@good
def test_both_find_the_same_position(name: str) -> None:
    path = good_path(name, "new")
    with wc.Checkpoint(path) as weights:
        assert position(read_checkpoint(path.read_bytes())) == wc.fingerprint(weights).digest


def test_positions_of_tables_with_aliases() -> None:
    aliases = {"tied.é": "w", "tied.\U0001f600": "w", "tied.\uff5e": "w"}
    table = wc.TensorTable.of([wc.TensorSpec("w", "U8", (1,))], aliases)
    expected = wc.Fingerprint(table, (tensor_digest([5]),)).digest
    assert position({"w": simple_reader.Tensor("U8", (1,), [5])}, aliases) == expected


# -- broken ----------------------------------------------------------------------------------------------------------


def broken_bytes(case: str) -> tuple[list[bytes], Path]:
    """The objects of a broken patch, and the checkpoint to read it against."""
    file = f"{case}.patch.safetensors"
    return objects_of(VECTORS / "broken" / file), VECTORS / "broken" / BROKEN[file]["old"]


def read_with_weightcast(case: str) -> None:
    objects, base = broken_bytes(case)
    with wc.Checkpoint(base) as old:
        wc.advance(wc.fingerprint(old), decoded(objects, old))


def read_with_simple_reader(case: str) -> None:
    objects, base = broken_bytes(case)
    apply_objects(objects, read_checkpoint(base.read_bytes()))


@broken
def test_weightcast_rejects_a_broken_vector(case: str) -> None:
    with pytest.raises(WeightcastError):
        read_with_weightcast(case)


@broken
def test_simple_reader_rejects_a_broken_vector(case: str) -> None:
    clause = BROKEN[f"{case}.patch.safetensors"]["clause"]
    with pytest.raises(Rejected, match=rf"^{re.escape(clause)} "):
        read_with_simple_reader(case)


@pytest.mark.parametrize("case", ["8.3-long-names-that-share", "8.3-table-of-zeros"])
@pytest.mark.parametrize(
    "read",
    [
        pytest.param(read_with_weightcast, id="weightcast"),
        pytest.param(read_with_simple_reader, id="simple_reader"),
    ],
)
def test_small_file_takes_little_memory(read: Callable[[str], None], case: str) -> None:
    tracemalloc.start()
    with contextlib.suppress(WeightcastError, Rejected):
        read(case)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * (1 << 22)


@pytest.mark.parametrize("what", ["unknown-format", "unknown-codec"])
def test_objects_of_a_later_release_are_reported_as_unknown(what: str) -> None:
    with pytest.raises(VersionError):
        wc.decode((VECTORS / "broken" / f"8.2-{what}.patch.safetensors").read_bytes())


# -- what the vectors cover ------------------------------------------------------------------------------------------


def test_every_dtype_with_every_codec() -> None:
    assert {f"{codec}-{dtype.lower()}" for codec in CODECS for _, dtype, *_ in DTYPE_ROWS} <= set(GOOD)
    for name in GOOD:
        codec, what = name.split("-", 1)
        metadata, _ = simple_reader.read_container(good_path(name, "patch").read_bytes())
        assert simple_reader.read_metadata(metadata)["codec"] == codec
        if what.upper() in DTYPES:
            assert read_checkpoint(good_path(name, "new").read_bytes())["w"].dtype == what.upper()


def test_every_broken_file_is_listed_and_every_clause_has_some() -> None:
    files = {path.name for path in (VECTORS / "broken").glob("*.patch.safetensors")}
    assert files == set(BROKEN)
    assert all(file.startswith(f"{case['clause']}-") for file, case in BROKEN.items())
    assert {case["clause"] for case in BROKEN.values()} == {f"8.{i}" for i in range(1, 7)}


@pytest.mark.parametrize("case", sorted(file for file in BROKEN if objects_of(VECTORS / "broken" / file)[1:]))
def test_objects_beside_a_broken_one_are_good(case: str) -> None:
    """So what is rejected is the broken object, or that the two are together."""
    for path in (VECTORS / "broken").glob(case.replace(".patch.", ".beside-*.")):
        with wc.Checkpoint(VECTORS / "broken" / BROKEN[case]["old"]) as old:
            assert decoded([path.read_bytes()], old).changed


def test_every_kind_of_box_occurs() -> None:
    seen: set[str] = set()
    for name in GOOD:
        objects = objects_of(good_path(name, "patch"))
        seen.update({"several objects"} if objects[1:] else ())
        for data in objects:
            metadata, entries = simple_reader.read_container(data)
            meta = simple_reader.read_metadata(metadata)
            digests = simple_reader.unpack(entries["weightcast.digests"].raw, 64)
            for row in simple_table.read_table(
                entries,
                meta["table"],
                digests,
                meta["codec"],
                None if meta["base"] is None else read_checkpoint(good_path(name, "old").read_bytes()),
            ):
                seen.update(traits_of(row, meta))
    wanted = {f"{codec}, {kind}" for codec in CODECS for kind in ("run", "strided", "1-d", "3-d")}
    assert wanted | {"several objects", "no base", "second block", "counts all"} <= seen


def traits_of(row: simple_table.Row, meta: dict) -> Iterator[str]:
    if row.box is None:
        return
    places = list(row.places())
    yield f"{meta['codec']}, {'run' if places[-1] - places[0] == len(places) - 1 else 'strided'}"
    yield f"{meta['codec']}, {len(row.shape)}-d"
    yield "no base" if meta["base"] is None else "base"
    yield "counts all" if row.changed == row.elements else "counts some"
    yield f"{('first', 'second')[max(index for index, _ in row.blocks)]} block" if row.blocks else "no blocks"


def test_every_construct_of_section_6_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    read_block, read_set, read_bands, read_distances = (
        getattr(simple_reader, f"read_{part}") for part in ("block", "set", "bands", "distances")
    )

    class Noting(simple_reader.Bits):
        def rice(self, k: int, p: int) -> int:
            value = super().rice(k, p)
            seen.add(f"escaped to {p} bits" if value >> k >= 24 else "not escaped")
            return value

    def noting_block(raw: bytes, old: list[int], dtype: str) -> list[int]:
        seen.add("coded" if raw[0] else "raw")
        return read_block(raw, old, dtype)

    def noting_set(bits: simple_reader.Bits, total: int, parameters: tuple[int, int] | None) -> list[int]:
        seen.add("empty set" if parameters is None else "inverted" if parameters[1] else "not inverted")
        return read_set(bits, total, parameters)

    def noting_bands(bits: simple_reader.Bits, count: int) -> list[int]:
        seen.add(f"{count} bands")
        return read_bands(bits, count)

    def noting_distances(bits: simple_reader.Bits, far: list[int], keys: list[int], w: int) -> dict[int, int]:
        seen.add("sloped" if bits.raw[bits.at // 8] >> bits.at % 8 & 1 else "flat")
        distances = read_distances(bits, far, keys, w)
        seen.update({"half way round"} if 1 << (w - 1) in distances.values() else ())
        return distances

    monkeypatch.setattr(simple_reader, "Bits", Noting)
    monkeypatch.setattr(simple_reader, "read_block", noting_block)
    monkeypatch.setattr(simple_reader, "read_set", noting_set)
    monkeypatch.setattr(simple_reader, "read_bands", noting_bands)
    monkeypatch.setattr(simple_reader, "read_distances", noting_distances)
    for name in GOOD:
        if not name.startswith("plain-") and "block" not in name:
            apply_objects(objects_of(good_path(name, "patch")), read_checkpoint(good_path(name, "old").read_bytes()))
    wanted = {"coded", "raw", "empty set", "inverted", "not inverted", "1 bands", "16 bands", "sloped", "flat"}
    wanted |= {"half way round", "not escaped", *(f"escaped to {p} bits" for p in (8, 16, 19, 32, 64))}
    assert wanted <= seen


# -- the values that docs/SPEC.md states -----------------------------------------------------------------------------


def test_dtypes_of_clause_2_4() -> None:
    assert [int(code) for code, *_ in sorted(DTYPE_ROWS, key=lambda row: int(row[0]))] == list(range(22))
    for code, name, packed, width, mantissa in DTYPE_ROWS:
        kind, expected = DTYPES[name], (int(packed or width), int(width), int(mantissa) if mantissa else None)
        assert (kind.per_value, kind.width, kind.mantissa) == expected
        simple = (simple_reader.DTYPES[name], simple_reader.width(name), simple_reader.MANTISSA.get(name))
        assert simple == expected
        assert int(code) == list(DTYPES).index(name) == list(simple_reader.DTYPES).index(name)


ROUNDED = re.findall(r"`([0-9A-F]{8})` \| `([0-9A-F]{4})` \| `([0-9A-F]{4})`", SPEC)


@pytest.mark.parametrize(("fp32", "bf16", "f16"), ROUNDED)
def test_rounding_of_clause_3_2(fp32: str, bf16: str, f16: str) -> None:
    value = np.array([int(fp32, 16)], np.uint32).view(np.float32)
    for dtype, expected in (("BF16", bf16), ("F16", f16)):
        assert f"{wc.round_to(dtype, value)[0]:04X}" == expected
        assert f"{simple_reader.round_to(dtype, int(fp32, 16)):04X}" == expected


DIGESTS = re.findall(r"^\| (\w+)(?: bits)? `?\[([^]]*)\]`?(?: of shape \[0\])? \| `([0-9a-f]{16})` \|$", SPEC, re.M)


@pytest.mark.parametrize(("dtype", "listed", "expected"), DIGESTS)
def test_tensor_digests_of_clause_4_3(dtype: str, listed: str, expected: str) -> None:
    bits = [int(number, 16) for number in listed.split(",") if number]
    array = wc.Arrays({"w": np.array(bits, DTYPES[dtype].word)}, {"w": dtype})
    assert f"{wc.fingerprint(array)['w']:016x}" == f"{tensor_digest(bits):016x}" == expected


def test_position_of_clause_4_3() -> None:
    (expected,) = re.findall(r"has position `([0-9a-f]{64})`", SPEC)
    array = wc.Arrays({"w": np.array([0x3F80, 0xBF80], np.uint16)}, {"w": "BF16"})
    assert wc.fingerprint(array).digest == expected
    assert position({"w": simple_reader.Tensor("BF16", (2,), [0x3F80, 0xBF80])}) == expected


def test_page_states_as_many_values_as_are_tested() -> None:
    assert (len(DTYPE_ROWS), len(ROUNDED), len(DIGESTS)) == (22, 8, 4)
