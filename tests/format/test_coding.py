"""Cuts: tensors are coded in the boxes that readers hold, and each reader decodes its own against its own bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightcast as wc
from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Place, place_of, whole
from weightcast.format.coding import MAX_BOXES, Coding, Cutting, cut_tensor
from weightcast.format.cut import MAX_CUTS, Cut, merged_cuts
from weightcast.format.patch import TensorPatch
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource
from weightcast.format.spec import TensorSpec

DOWN = TensorSpec("layers.3.down.weight", "BF16", (6, 16))


def states(shape: tuple[int, ...], seed: int = 0) -> tuple[wc.Arrays, wc.Arrays]:
    """Weights before and after a step that moves a fifth of them."""
    rng = np.random.default_rng(seed)
    old = wc.round_to("BF16", rng.normal(0, 0.02, shape).astype(np.float32).reshape(-1)).reshape(shape)
    new = old + (rng.random(shape) < 0.2).astype(np.uint16)
    return wc.Arrays({DOWN.name: old}, {DOWN.name: "BF16"}), wc.Arrays({DOWN.name: new}, {DOWN.name: "BF16"})


def boxes(spec: TensorSpec, *cuts: Cut) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.offset, box.shape) for box in Cutting(cuts).boxes(spec)]


# -- which boxes -------------------------------------------------------------------------------------------------------


def test_columns_of_the_tensors_that_a_pattern_names() -> None:
    cut = Cut("layers.*.down.weight", axis=1, parts=4)
    assert boxes(DOWN, cut) == [((0, at), (6, 4)) for at in (0, 4, 8, 12)]
    assert boxes(TensorSpec("layers.3.up.weight", "BF16", (6, 16)), cut) == []
    assert boxes(TensorSpec("layers.3.down.weight", "BF16", (6,)), cut) == []


def test_last_of_the_parts_may_be_smaller() -> None:
    assert boxes(DOWN, Cut(DOWN.name, 0, 4)) == [((0, 0), (2, 16)), ((2, 0), (2, 16)), ((4, 0), (2, 16))]
    assert boxes(DOWN, Cut(DOWN.name, 0, 5)) == boxes(DOWN, Cut(DOWN.name, 0, 3))


def test_readers_of_other_parts_are_all_served() -> None:
    found = boxes(DOWN, Cut(DOWN.name, 1, 2), Cut(DOWN.name, 1, 4), Cut(DOWN.name, 0, 2))
    assert found == [((row, at), (3, 4)) for row in (0, 3) for at in (0, 4, 8, 12)]


def test_tensor_that_cannot_be_cut_stays_whole() -> None:
    assert boxes(TensorSpec("a", "F4", (6, 16)), Cut("a", 1, 4)) == []
    assert boxes(TensorSpec("a", "BF16", (0, 16)), Cut("a", 1, 4)) == []
    assert boxes(TensorSpec("a", "BF16", (1, 1)), Cut("a", 1, 4)) == []
    assert boxes(DOWN, Cut(DOWN.name, 1, 1)) == []


def test_cuts_that_would_make_too_many_boxes_are_left_out() -> None:
    wide = TensorSpec("a", "BF16", (256, 256))
    assert boxes(wide, Cut("a", 1, 64), Cut("a", 0, 2)) == boxes(wide, Cut("a", 1, 64))
    assert len(boxes(wide, Cut("a", 1, 256), Cut("a", 0, 16), Cut("a", 1, 4))) == MAX_BOXES


def test_box_of_a_rank_is_cut_where_its_tensor_is() -> None:
    """The rank has columns 6 to 15; the tensor is cut at 4, 8 and 12."""
    part = place_of(DOWN, Box.of((2, 6), (3, 10)))
    cutting = Cutting((Cut("layers.*.down.weight", 1, 4),), {part.label: part})
    found = [(box.offset, box.shape) for box in cutting.boxes(part.part)]
    assert found == [((0, 0), (3, 2)), ((0, 2), (3, 4)), ((0, 6), (3, 4))]


def test_cuts_may_change_between_scans() -> None:
    cutting = Cutting()
    assert cutting.boxes(DOWN) == ()
    cutting.follow((Cut(DOWN.name, 1, 2),))
    assert len(cutting.boxes(DOWN)) == 2
    cutting.follow(())
    assert cutting.boxes(DOWN) == ()


def test_gap_is_not_cut() -> None:
    """Its readers need the old bits of their own changes alone."""
    cutting = Cutting((Cut(DOWN.name, 1, 2),))
    assert Coding("gap", cutting).boxes(DOWN) == ()
    assert len(Coding("banded", cutting).boxes(DOWN)) == 2


@pytest.mark.parametrize("wrong", [("a", -1, 2), ("a", 0, 0), ("a", 0, 257), ("a" * 1001, 0, 2)])
def test_impossible_cuts_are_refused(wrong: tuple[str, int, int]) -> None:
    with pytest.raises(UsageError, match="cannot be cut"):
        Cut(*wrong)


def test_what_most_readers_want_comes_first() -> None:
    four, eight = Cut("a", 1, 4), Cut("a", 1, 8)
    assert merged_cuts([[eight], [four], [eight, four], [eight]]) == (eight, four)
    assert len(merged_cuts([[Cut(f"t{i}", 0, 2) for i in range(100)]])) == MAX_CUTS


# -- what is coded -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["banded", "gap", "plain"])
def test_every_reader_decodes_its_own_box_against_its_own_bits(codec: str) -> None:
    old, new = states((6, 16))
    reader = PatchReader(BytesSource(wc.encode(wc.diff(old, new), codec, old, cut=[Cut("*", 1, 4)])))
    assert [row.place.box.offset for row in reader.rows] == [(0, 0), (0, 4), (0, 8), (0, 12)]
    for row in reader.rows:
        held = row.place.read(old.read(DOWN.name)).copy()
        (patch,) = reader.decode([row], [held])
        held[patch.indices] = patch.new
        assert np.array_equal(held, row.place.read(new.read(DOWN.name)))


@settings(max_examples=40)
@given(st.data())
def test_cut_patches_decode_to_the_same_patch(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    old, new = states(shape, data.draw(st.integers(0, 99)))
    cuts = [
        Cut("*", data.draw(st.integers(0, 3)), data.draw(st.integers(1, 9)))
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    patch = wc.diff(old, new)
    assert wc.decode(wc.encode(patch, old=old, cut=cuts), old) == patch


@settings(max_examples=60)
@given(st.data())
def test_changes_are_found_in_their_boxes(data: st.DataObject) -> None:
    """Against a count by coordinates; boxes may be a grid or not."""
    shape = (data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7)))
    spec = TensorSpec("a", "U16", shape)
    at = np.array(sorted(data.draw(st.sets(st.integers(0, spec.elements - 1)))), np.int64)
    patch = TensorPatch(spec, at, at.astype(np.uint16) + 1, at.astype(np.uint16), 0)
    row, column = data.draw(st.integers(0, shape[0])), data.draw(st.integers(0, shape[1]))
    parts = {
        "grid": [(0, 0, row, column), (0, column, row, shape[1]), (row, 0, shape[0], column), (row, column, *shape)],
        "stairs": [(0, 0, row, shape[1]), (row, 0, shape[0], column), (row, column, *shape)],
    }[data.draw(st.sampled_from(["grid", "stairs"]))]
    places = [place_of(spec, Box.of((a, b), (c - a, d - b))) for a, b, c, d in parts if c > a and d > b]
    found = dict(cut_tensor(patch, places))
    for place in places:
        wanted = np.zeros(shape, bool).reshape(-1)
        wanted[at] = True
        inside = np.flatnonzero(place.read(wanted))
        assert inside.size == (found[place].changed if place in found else 0)
        if place in found:
            assert np.array_equal(found[place].indices, inside)
            assert np.array_equal(found[place].old, place.read(np.arange(spec.elements, dtype=np.uint16))[inside])


def test_boxes_that_leave_a_change_out_are_refused() -> None:
    from boxed import encode_cut

    old, new = states((6, 16))
    half = place_of(DOWN, Box.of((0, 0), (6, 8)))
    with pytest.raises(UsageError, match="do not cover"):
        encode_cut(wc.diff(old, new), {DOWN.name: [half]}, old=old)
    assert Place(DOWN, whole(DOWN.shape)).is_whole
