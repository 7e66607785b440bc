"""Objects of boxes: however a version is cut and spread over objects, it decodes to the patch of whole tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from boxed import columns, encode_cut
from hypothesis import given, settings
from hypothesis import strategies as st

import weightcast as wc
from weightcast.errors import FormatError, UsageError
from weightcast.format.boxes import Box, Place, place_of
from weightcast.format.coding import cut_tensor
from weightcast.format.joined import JoinedPatch, joined, open_objects
from weightcast.format.patch import Patch
from weightcast.format.patch_layout import BLOCKS
from weightcast.format.patchfile import PatchReader, encode_boxes
from weightcast.format.safetensors import BytesSource
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row, pack_rows, unpack_rows
from weightcast.format.workers import ONE

SHAPES = {"a": (7, 12), "a.b": (3, 4, 5), "bias": (9,), "scale": (), "wide": (2, 300)}


def weights(seed: int = 0, density: float = 0.0) -> wc.Arrays:
    rng = np.random.default_rng(1)
    arrays = {
        name: (rng.standard_normal(shape).astype(np.float32) * 0.02).view(np.uint32) >> 16
        for name, shape in SHAPES.items()
    }
    arrays = {name: np.asarray(array, np.uint16) for name, array in arrays.items()}
    change = np.random.default_rng(seed)
    for array in arrays.values():
        array[...] += (change.random(array.shape) < density).astype(np.uint16)
    return wc.Arrays(arrays, dict.fromkeys(arrays, "BF16"))


def grid(spec: TensorSpec, cuts: list[list[int]]) -> list[Place]:
    """The boxes between cuts along each dimension."""
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for size, at in zip(spec.shape, cuts, strict=True):
        edges = sorted({0, size, *(cut % size for cut in at)})
        boxes = [([*offset, begin], [*sizes, end - begin]) for offset, sizes in boxes for begin, end in pairwise(edges)]
    return [place_of(spec, Box.of(offset, sizes)) for offset, sizes in boxes]


def objects(patch: Patch, old: wc.Arrays, places: list[list[Place]], codecs: list[str]) -> list[PatchReader]:
    """An object for each list of places, as ranks would write them."""
    made = []
    for mine, codec in zip(places, codecs, strict=True):
        parts = {place.label: place for place in mine}
        cut = [
            part
            for tensor in patch.tensors
            for _, part in cut_tensor(tensor, [p for p in mine if p.spec == tensor.spec])
        ]
        known = {place.label: place.read(old.read(place.spec.name)) for place in mine}
        local = replace(patch, tensors=tuple(cut))
        made.append(PatchReader(BytesSource(encode_boxes(local, codec, parts, known, ONE))))
    return made


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.02, 0.3, 1.0]),
    st.lists(st.lists(st.lists(st.integers(1, 299), max_size=2), min_size=3, max_size=3), min_size=5, max_size=5),
    st.lists(st.sampled_from(["banded", "gap", "plain"]), min_size=1, max_size=4),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_over_any_objects_gives_the_whole_patch(seed, density, cuts, codecs, random) -> None:  # type: ignore[no-untyped-def]
    old, new = weights(), weights(seed, density)
    patch = wc.diff(old, new)
    places: list[list[Place]] = [[] for _ in codecs]
    for spec, cut in zip(old.table, cuts, strict=True):
        for place in grid(spec, cut[: len(spec.shape)]):
            random.choice(places).append(place)
    found = joined(objects(patch, old, places, codecs))
    assert Patch(found.header.base, found.header.result, found.header.model, tuple(found.tensors(old))) == patch
    for row, one in zip(found.rows, patch.tensors, strict=True):
        assert (row.spec, row.digest) == (one.spec, one.digest)
        assert row.changed in (one.changed, row.spec.elements)  # all, where a box is stored whole


@pytest.mark.parametrize("parts", [1, 2, 8, 1000])
def test_columns_cover_a_tensor(parts: int) -> None:
    old, new = weights(), weights(3, 0.2)
    patch = wc.diff(old, new)
    cut = {spec.name: columns(spec, parts) for spec in old.table}
    data = encode_cut(patch, cut, old=old)
    assert wc.decode(data, old) == patch
    assert all(sum(place.box.elements for place in places) == old.table[name].elements for name, places in cut.items())


def test_whole_tensors_are_coded_as_ever() -> None:
    """A box that is all of its tensor is not written as a box: one form for one thing."""
    old, new = weights(), weights(3, 0.2)
    patch = wc.diff(old, new)
    assert encode_cut(patch, {}, old=old) == wc.encode(patch, old=old)


# -- lies --------------------------------------------------------------------------------------------------------------


def halves(name: str = "a") -> tuple[Patch, wc.Arrays, list[Place]]:
    old, new = weights(), weights(5, 1.0)
    patch = wc.diff(old, new)
    spec = old.table[name]
    one = tuple(tensor for tensor in patch.tensors if tensor.spec == spec)
    return (
        replace(patch, tensors=one),
        old,
        [place_of(spec, Box.of((0, 0), (4, 12))), place_of(spec, Box.of((4, 0), (3, 12)))],
    )


def test_objects_of_two_versions_are_refused() -> None:
    patch, old, (upper, lower) = halves()
    first, _ = objects(patch, old, [[upper], [lower]], ["gap", "gap"])
    _, other = objects(replace(patch, result="0" * 64), old, [[upper], [lower]], ["gap", "gap"])
    with pytest.raises(FormatError, match="lead from or to other weights"):
        JoinedPatch([first, other])


def test_error_in_one_of_several_objects_names_it() -> None:
    patch, old, (upper, lower) = halves()
    places = {upper.label: upper, lower.label: lower}
    good, bad = (
        encode_boxes(
            replace(patch, tensors=tuple(part for one in patch.tensors for _, part in cut_tensor(one, [place]))),
            "gap",
            places,
            None,
            ONE,
        )
        for place in (upper, lower)
    )
    header = int.from_bytes(bad[:8], "little")
    begin, _ = json.loads(bad[8 : 8 + header])[BLOCKS]["data_offsets"]
    damaged = bytearray(bad)
    damaged[8 + header + begin] = 255  # so many bands are impossible
    readers = [PatchReader(BytesSource(data, name)) for data, name in ((good, "good"), (bytes(damaged), "bad"))]
    with pytest.raises(FormatError) as raised:
        list(JoinedPatch(readers).tensors(old))
    assert (raised.value.file, raised.value.tensor) == ("bad", "a")


def test_boxes_that_disagree_about_their_tensor_are_refused() -> None:
    patch, old, (upper, lower) = halves()
    liar = replace(patch, tensors=tuple(replace(one, digest=one.digest ^ 1) for one in patch.tensors))
    first, _ = objects(patch, old, [[upper], [lower]], ["gap", "gap"])
    _, other = objects(liar, old, [[upper], [lower]], ["gap", "gap"])
    with pytest.raises(FormatError, match="disagree"):
        JoinedPatch([first, other])


def test_box_in_two_objects_is_refused() -> None:
    patch, old, (upper, _) = halves()
    twice = objects(patch, old, [[upper], [upper]], ["gap", "gap"])
    with pytest.raises(FormatError, match="repeated"):
        JoinedPatch(twice)


def test_boxes_that_overlap_in_part_are_refused() -> None:
    patch, old, (upper, _) = halves()
    inner = place_of(upper.spec, Box.of((3, 0), (2, 12)))
    patches = joined(objects(patch, old, [[upper], [inner]], ["banded", "banded"]))
    with pytest.raises(FormatError, match="overlap"):
        list(patches.tensors(old))


def test_whole_tensor_beside_a_box_of_it_is_refused() -> None:
    patch, old, (upper, lower) = halves()
    everything = columns(upper.spec, 1)
    with pytest.raises(FormatError, match="overlap"):
        JoinedPatch(objects(patch, old, [everything, [lower]], ["gap", "gap"]))


def test_more_rows_in_all_objects_than_their_limit_are_refused() -> None:
    patch, old, (upper, lower) = halves()
    data = [encode_cut(patch, {upper.spec.name: [upper, lower]}, old=old)] * 2
    assert len(open_objects(map(BytesSource, data), most=4)) == 2
    with pytest.raises(FormatError, match="more than 3 rows together"):
        open_objects(map(BytesSource, data), most=3)


def test_objects_that_say_another_size_of_the_model_are_read() -> None:
    """It is for people (SPEC 5.1.5)."""
    patch, old, (upper, lower) = halves()
    first, _ = objects(patch, old, [[upper], [lower]], ["gap", "gap"])
    _, second = objects(replace(patch, model=replace(patch.model, tensors=1)), old, [[upper], [lower]], ["gap", "gap"])
    assert tuple(JoinedPatch([first, second]).tensors(old)) == patch.tensors


@pytest.mark.parametrize("codec", ["plain", "gap"])
def test_writer_refuses_a_tensor_with_the_label_of_a_box(codec: str) -> None:
    tensors = {"a": np.zeros((2, 3), np.uint8), "a[1,0]": np.zeros(3, np.uint8)}
    old, new = wc.Arrays(tensors), wc.Arrays({name: bits + 1 for name, bits in tensors.items()})
    spec = old.table["a"]
    rows = [place_of(spec, Box.of((i, 0), (1, 3))) for i in range(2)]
    with pytest.raises(UsageError, match="the label of another one's box"):
        encode_cut(wc.diff(old, new), {"a": rows}, codec, old)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((0, 0), (8, 12)), ((0, 0), (7, 12)), ((6, 0), (2, 12)), ((0, 1 << 40), (7, 1))],
    ids=["larger", "all of it", "outside", "far outside"],
)
def test_impossible_box_in_a_table_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rows = [Row(TensorSpec("a", "BF16", (7, 12)), 1, 0, ((0, 1),), Box.of(offset, shape))]
    with pytest.raises(FormatError, match="a box is not a part of its tensor"):
        unpack_rows(*pack_rows(rows), [0], 1)


def test_box_of_packed_values_is_refused() -> None:
    rows = [Row(TensorSpec("a", "F4", (8, 8)), 1, 0, ((0, 1),), Box.of((0, 0), (4, 8)))]
    with pytest.raises(FormatError, match="a box is not a part of its tensor"):
        unpack_rows(*pack_rows(rows), [0], 1)


def test_count_above_the_elements_of_a_box_is_refused() -> None:
    rows = [Row(TensorSpec("a", "BF16", (7, 12)), 13, 0, ((0, 1),), Box.of((0, 0), (1, 12)))]
    with pytest.raises(FormatError, match="13 of 12 elements"):
        unpack_rows(*pack_rows(rows), [0], 1)


@pytest.mark.parametrize("second", [(0, 0), (3, 0)], ids=["the same", "not in order"])
def test_boxes_out_of_order_are_refused(second: tuple[int, int]) -> None:
    spec = TensorSpec("a", "BF16", (7, 12))
    rows = [Row(spec, 1, 0, ((0, 1),), Box.of(offset, (1, 12))) for offset in ((3, 0), second)]
    with pytest.raises(FormatError, match="unsorted or repeated"):
        unpack_rows(*pack_rows(rows), [0], 2)
