"""What a worker holds of a box of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sharded_engine import model_of  # noqa: E402

from weightcast.engine.held import Held, count_before, overlap_of  # noqa: E402
from weightcast.engine.layout import Layout, Part  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.prepared import unsigned  # noqa: E402
from weightcast.format.boxes import Box, Place, Range, whole  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402


@st.composite
def ranges(draw: st.DrawFn, size: int) -> Range:
    step = draw(st.integers(1, 3))
    start = draw(st.integers(0, size - 1))
    return Range(start, draw(st.integers(1, (size - 1 - start) // step + 1)), step)


def elements(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Their flat indices, the plainest way."""
    flat = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    return flat[tuple(slice(one.start, one.last + 1, one.step) for one in box.ranges)].reshape(-1)


@given(st.data())
def test_elements_of_a_box_are_counted_and_found(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    box = Box(tuple(data.draw(ranges(size)) for size in shape))
    inside, size = elements(box, shape), int(np.prod(shape, dtype=int))
    edges = np.arange(size + 1)
    assert count_before(box, shape, edges).tolist() == [int((inside < edge).sum()) for edge in edges]


@given(st.data())
def test_overlap_of_a_part_and_a_box_has_the_elements_of_both(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    spec = TensorSpec("x", "BF16", shape)
    mine = Box(tuple(data.draw(ranges(size)) for size in shape))
    theirs = Box(tuple(Range(one.start, one.count) for one in (data.draw(ranges(size)) for size in shape)))
    part, place = Part("x", mine, "p", "BF16", 0, (0,) * len(shape)), Place(spec, theirs)
    common = sorted(set(elements(mine, shape).tolist()) & set(elements(theirs, shape).tolist()))
    one = overlap_of(part, theirs)
    if one is None:
        assert not common
        return
    assert place.flat(elements(one.within, theirs.shape)).tolist() == common
    assert elements(mine, shape).reshape(mine.shape)[one.inside].reshape(-1).tolist() == common
    held = Held(place, [one])
    inside = elements(one.within, theirs.shape)
    assert held.between(0, theirs.elements).tolist() == inside.tolist()
    assert np.flatnonzero(held.choose(np.arange(theirs.elements))).tolist() == inside.tolist()
    assert held.is_all == (len(common) == theirs.elements)
    if held.run is not None:
        assert list(held.run) == inside.tolist()


SHAPE = (6, 4)
SPEC = TensorSpec("x", "BF16", SHAPE)


def held_by(parts: list[Part], place: Place) -> tuple[LiveParameters, Held]:
    model = model_of(p=torch.empty(100, dtype=torch.bfloat16), wide=torch.empty(100))
    live = LiveParameters(model, Layout(TensorTable.of([SPEC]), parts, {}))
    overlaps = [one for part in parts if (one := overlap_of(part, place.box)) is not None]
    return live, Held(place, overlaps)


@pytest.mark.parametrize(
    ("box", "strides", "place", "run", "is_shared"),
    [
        (whole(SHAPE), (4, 1), whole(SHAPE), range(24), True),
        (Box.of((2, 0), (3, 4)), (4, 1), whole(SHAPE), range(8, 20), True),
        (Box.of((2, 0), (3, 4)), (4, 1), Box.of((3, 0), (3, 4)), range(8), True),
        (Box.of((0, 2), (6, 2)), (2, 1), Box.of((0, 2), (6, 2)), range(12), True),
        (whole(SHAPE), (1, 6), whole(SHAPE), range(24), False),
        (whole(SHAPE), (7, 1), whole(SHAPE), range(24), False),
        (whole(SHAPE), (4, 1), Box.of((0, 2), (6, 2)), range(12), False),
        (Box.of((0, 2), (6, 2)), (2, 1), whole(SHAPE), None, False),
    ],
)
def test_parameter_is_read_where_it_is_if_its_order_is_the_place_s(
    box: Box, strides: tuple[int, ...], place: Box, run: range | None, is_shared: bool
) -> None:
    part = Part("x", box, "p", "BF16", 5, strides)
    live, held = held_by([part], Place(SPEC, place))
    assert held.run == run
    window = held.window(live)
    assert np.shares_memory(window.bits, unsigned(live.view(part))) == is_shared
    inside = held.between(0, place.elements)
    mine = np.zeros(24, np.uint16)
    mine[elements(box, SHAPE)] = live.read(part)
    assert window.bits[inside - window.first].tolist() == mine[Place(SPEC, place).flat(inside)].tolist()


def test_parts_together_hold_what_none_of_them_does() -> None:
    odd, even = (Part("x", Box((Range(i, 3, 2), Range(0, 4))), "p", "BF16", 50 * i, (4, 1)) for i in (0, 1))
    live, held = held_by([odd, even], Place(SPEC, whole(SHAPE)))
    assert [flags.tolist() for flags in held.blocks(np.array([0]))] == [[True], [True]]
    expected = np.empty((6, 4), np.uint16)
    expected[::2], expected[1::2] = live.read(odd).reshape(3, 4), live.read(even).reshape(3, 4)
    assert held.window(live).bits.tolist() == expected.reshape(-1).tolist()
    assert [flags.tolist() for flags in Held(held.place, held.overlaps[:1]).blocks(np.array([0]))] == [[False], [True]]


def test_value_that_is_no_cast_is_not_read() -> None:
    part = Part("x", whole(SHAPE), "wide", "F32", 0, (4, 1))
    live, held = held_by([part], Place(SPEC, whole(SHAPE)))
    assert held.window(live) is None
    live.write(part, np.arange(24, dtype=np.uint16))
    assert held.window(live).bits.tolist() == list(range(24))


def test_value_that_is_no_cast_in_one_of_several_parts_is_not_read() -> None:
    parts = [Part("x", Box.of((i, 0), (3, 4)), "wide", "F32", 10 * i, (4, 1)) for i in (0, 3)]
    live, held = held_by(parts, Place(SPEC, whole(SHAPE)))
    live.write(parts[0], np.arange(12, dtype=np.uint16))
    assert held.window(live) is None
    live.write(parts[1], np.arange(12, 24, dtype=np.uint16))
    assert held.window(live).bits.tolist() == list(range(24))
