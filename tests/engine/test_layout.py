"""Where a checkpoint's elements are in an engine: boxes, the loops over them, casts, and digests that add up."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Bag, random_bits
from hypothesis import given
from hypothesis import strategies as st
from simple_reader import mix

import weightcast as wc
from weightcast.engine.box_digests import BoxDigest, combine
from weightcast.engine.casts import ROUNDED, WIDENED, can_cast, cast, cast_back
from weightcast.engine.layout import Layout, Part
from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Range
from weightcast.format.digest import MODULUS, tensor_digest
from weightcast.format.kernels import places
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import round_to

ranges = st.builds(Range, st.integers(0, 20), st.integers(0, 8), st.integers(1, 7))


def whole(shape: tuple[int, ...]) -> Box:
    return Box(tuple(Range(0, size) for size in shape))


def members(one: Range) -> set[int]:
    return set(range(one.start, one.start + one.count * one.step, one.step))


@given(ranges, ranges)
def test_ranges_meet_where_they_share_a_coordinate(a: Range, b: Range) -> None:
    assert a.meets(b) == bool(members(a) & members(b))
    assert a.fits(30) == (a.last < 30)


@pytest.mark.parametrize("bad", [Range(-1, 1), Range(0, -1), Range(0, 1, 0), Range(0, 4), Range(0, 2, 3)])
def test_range_outside_its_axis_does_not_fit(bad: Range) -> None:
    assert not bad.fits(3)
    assert not Box((bad,)).fits((3,))


def test_box_of_another_rank_does_not_fit() -> None:
    assert whole((3, 4)).fits((3, 4))
    assert not whole((3, 4)).fits((12,))
    assert whole(()).fits(())


# -- parts -------------------------------------------------------------------------------------------------------------


@st.composite
def parts(draw: st.DrawFn) -> tuple[TensorSpec, Part, int]:
    """A box of a tensor in a dense parameter, its dimensions in any order, between others' elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    box = []
    for size in shape:
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
        box.append(Range(start, draw(st.integers(1, 1 + (size - 1 - start) // step)), step))
    strides, width = [0] * len(shape), draw(st.integers(1, 2))
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = width
        width *= box[axis].count + draw(st.integers(0, 1))
    offset = draw(st.integers(0, 5))
    part = Part("x", Box(tuple(box)), "p", "U16", offset, tuple(strides))
    return TensorSpec("x", "U16", shape), part, offset + width


def by_hand(spec: TensorSpec, part: Part) -> dict[int, int]:
    """Flat index of the tensor to place in the storage, element by element."""
    found = {}
    for at in np.ndindex(*(one.count for one in part.box.ranges)):
        here = [one.start + i * one.step for one, i in zip(part.box.ranges, at, strict=True)]
        flat = int(np.ravel_multi_index(here, spec.shape)) if here else 0
        found[flat] = part.offset + sum(i * stride for i, stride in zip(at, part.strides, strict=True))
    return found


@given(parts(), st.data())
def test_loops_over_a_part_are_its_elements(drawn: tuple[TensorSpec, Part, int], data: st.DataObject) -> None:
    spec, part, room = drawn
    truth, steps = by_hand(spec, part), part.steps(spec.shape)
    assert steps.extent == (min(truth.values()), max(truth.values()) + 1)
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, spec.elements - 1)))), np.int64)
    which, where = steps.translate(indices)
    assert dict(zip(indices[which].tolist(), where.tolist(), strict=True)) == {
        i: truth[i] for i in indices.tolist() if i in truth
    }
    words = random_bits(np.random.default_rng(0), TensorSpec("p", "U16", (room,)))
    alone = sum(mix(i, int(words[at])) for i, at in truth.items())
    assert int(places.digest_places(words, steps.source, steps.target, steps.table)) == alone % MODULUS


@given(parts())
def test_part_given_twice_counts_once_and_is_found_by_its_parameter(drawn: tuple[TensorSpec, Part, int]) -> None:
    spec, part, _ = drawn
    layout = Layout(TensorTable.of([spec]), [part, part], {})
    assert list(layout) == [part]
    assert layout.by_parameter == {"p": (part,)}


@pytest.mark.parametrize("dtype", ["U8", "I16", "F32", "F64"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4, 5)])
def test_whole_tensor_in_its_own_order_is_one_loop_and_its_digest(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("x", dtype, shape)
    strides = tuple(int(np.prod(shape[k + 1 :])) for k in range(len(shape)))
    steps = Part("x", whole(shape), "p", dtype, 0, strides).steps(shape)
    assert len(steps.table) == 1
    bits = random_bits(np.random.default_rng(1), spec)
    assert int(places.digest_places(bits, steps.source, steps.target, steps.table)) == tensor_digest(bits)


def test_unknown_tensors_and_empty_boxes_have_no_parts() -> None:
    specs = [TensorSpec(name, "U8", (2,)) for name in "abc"]
    made = [Part(name, Box((Range(0, 2),)), "p", "U8", 0, (1,)) for name in "ab"]
    made.append(Part("c", Box((Range(0, 0),)), "p", "U8", 0, (1,)))
    layout = Layout(TensorTable.of(specs), made, {"a": "why"})
    assert [part.name for part in layout] == ["b"]
    assert layout.locate("a") == layout.locate("c") == layout.locate("elsewhere") == ()
    assert layout.unknown == {"a": "why"}


# -- casts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_widening_keeps_every_bit(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)  # infinities, denormals, -0.0 and NaNs
    if dtype == "F16":  # some processors quieten a signalling NaN on the way: then it is no cast of what it was
        bits = bits[((bits & 0x7C00) != 0x7C00) | ((bits & 0x3FF) == 0) | ((bits & 0x200) != 0)]
    wide = cast(bits, dtype, "F32")
    back = cast_back(wide, dtype, "F32")
    assert back is not None
    assert np.array_equal(back, bits)
    finite = np.isfinite(wide.view(np.float32))
    assert np.array_equal(round_to(dtype, wide.view(np.float32))[finite], bits[finite])


@pytest.mark.parametrize(("dtype", "value"), [("BF16", 0x3F800001), ("F16", 0x3F800001), ("F16", 0x7F800001)])
def test_value_that_is_not_a_cast_is_noticed(dtype: str, value: int) -> None:
    assert cast_back(np.array([0, value], np.uint32), dtype, "F32") is None


def test_rounding_is_not_reversible() -> None:
    values = np.array([1.0, 1.001, -0.0], np.float32)
    for dtype, narrow in ROUNDED:
        rounded = cast(values.view(np.uint32), dtype, narrow)
        assert np.array_equal(rounded, round_to(narrow, values))
        assert cast_back(rounded, dtype, narrow) is None


def test_known_casts_are_these() -> None:
    assert can_cast("I8", "I8")
    assert all(can_cast(*pair) for pair in WIDENED | ROUNDED)
    assert not can_cast("BF16", "F16")
    bits = np.arange(3, dtype=np.uint8)
    assert cast(bits, "I8", "I8") is cast_back(bits, "I8", "I8") is bits


# -- what workers hold -------------------------------------------------------------------------------------------------

SPEC = TensorSpec("x", "U8", (4, 6))
COLUMNS = Range(0, 6)
BITS = random_bits(np.random.default_rng(2), SPEC)


def held(rows: Range, columns: Range = COLUMNS, **other: object) -> BoxDigest:
    index = np.arange(24).reshape(4, 6)[
        rows.start : rows.last + 1 : rows.step, columns.start : columns.last + 1 : columns.step
    ]
    digest = sum(mix(i, int(BITS[i])) for i in index.reshape(-1).tolist()) % MODULUS
    return BoxDigest(Box((rows, columns)), **{"digest": digest} | other)


@pytest.mark.parametrize(
    "workers",
    [
        [held(Range(0, 4))],
        [held(Range(0, 4)), held(Range(0, 4))],
        [held(Range(0, 3)), held(Range(3, 1))],
        [held(Range(0, 2, 2)), held(Range(1, 2, 2))],
        [held(Range(0, 4), Range(0, 3, 2)), held(Range(0, 4), Range(1, 3, 2))],
        [held(Range(0, 2, 2)), held(Range(1, 1)), held(Range(3, 1)), held(Range(1, 1))],
    ],
)
def test_boxes_add_up(workers: list[BoxDigest]) -> None:
    total = combine(SPEC, iter(workers))
    assert total.digest == wc.fingerprint(Bag({SPEC: BITS}))["x"]
    assert total.problem is None


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ([], "no worker holds it"),
        ([held(Range(0, 3))], "no worker holds some of its elements"),
        ([held(Range(0, 4), digest=1), held(Range(0, 4), digest=2)], "copies of the same elements differ"),
        ([held(Range(0, 3)), held(Range(2, 2))], "workers hold boxes that overlap in part"),
        ([held(Range(0, 2)), held(Range(0, 2, 2))], "workers hold boxes that overlap in part"),
        ([held(Range(0, 4)), held(Range(0, 4), digest=None, problem="why")], "why"),
        ([held(Range(0, 4), digest=None, problem="why"), held(Range(0, 4))], "why"),
        ([held(Range(0, 4), digest=None)], "a worker has no digest of it"),
    ],
)
def test_missing_or_contradicting_parts_are_reported(workers: list[BoxDigest], problem: str) -> None:
    assert combine(SPEC, workers).digest is None
    assert combine(SPEC, workers).problem == problem


@given(
    st.lists(
        st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 3))] * 2), min_size=2, max_size=5
    )
)
def test_overlap_is_found_whatever_the_order(ranges: list[tuple[tuple[int, int, int], ...]]) -> None:
    spec = TensorSpec("x", "U8", (12, 12))
    boxes = [Box(tuple(Range(*one) for one in box)) for box in ranges]
    grid = np.zeros((12, 12), int)
    for box in set(boxes):
        grid[tuple(slice(one.start, one.last + 1, one.step) for one in box.ranges)] += 1
    problem = combine(spec, [BoxDigest(box, 0) for box in boxes]).problem
    assert ("overlap" in (problem or "")) == bool((grid > 1).any())


@pytest.mark.parametrize("box", [whole((24,)), whole((4, 7)), Box((Range(-1, 4), Range(0, 6)))])
def test_boxes_of_another_shape_are_refused(box: Box) -> None:
    with pytest.raises(UsageError, match="not inside"):
        combine(SPEC, [BoxDigest(box, 0)])


def test_thousands_of_boxes_of_one_tensor_are_refused() -> None:
    spec = TensorSpec("x", "U8", (5000,))
    found = combine(spec, [BoxDigest(Box((Range(i, 1),)), 0) for i in range(5000)])
    assert found.problem == "workers report 5,000 boxes of it, the limit is 2,048"


def test_tensor_without_elements_needs_no_worker() -> None:
    assert combine(TensorSpec("x", "U8", (3, 0)), []).digest == 0
