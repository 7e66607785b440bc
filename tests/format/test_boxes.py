"""Boxes of tensors: where their elements are, and how they are read (SPEC 2.6)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Place, place_of, whole
from weightcast.format.spec import TensorSpec


@st.composite
def places(draw: st.DrawFn) -> Place:
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    offset = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)]
    return place_of(TensorSpec("t", "U16", tuple(shape)), Box.of(offset, sizes))


@given(places())
def test_box_reads_and_places_the_elements_that_numpy_slices(place: Place) -> None:
    spec, box = place.spec, place.box
    tensor = np.arange(spec.elements, dtype=np.uint16)
    expected = tensor.reshape(spec.shape)[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    assert np.array_equal(place.read(tensor), expected.reshape(-1))
    flat = place.flat(np.arange(box.elements))
    assert np.array_equal(flat, expected.reshape(-1))
    assert (np.diff(flat) > 0).all()
    if place.first is not None and box.elements:
        assert place.first == expected.reshape(-1)[0]


@pytest.mark.parametrize(
    ("shape", "offset", "size", "is_run"),
    [
        ((4, 6), (1, 0), (2, 6), True),
        ((4, 6), (0, 2), (4, 2), False),
        ((4, 6), (2, 1), (1, 3), True),
        ((4, 6, 2), (1, 2, 0), (1, 3, 2), True),
        ((4, 6, 2), (1, 2, 0), (2, 3, 2), False),
        ((), (), (), True),
    ],
)
def test_rows_of_a_tensor_are_one_run(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], is_run: bool
) -> None:
    place = place_of(TensorSpec("t", "BF16", shape), Box.of(offset, size))
    assert (place.first is not None) == is_run
    tensor = np.arange(math.prod(shape), dtype=np.uint16)
    assert np.shares_memory(place.read(tensor), tensor) == is_run


def test_box_outside_its_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="is not inside a tensor"):
        place_of(TensorSpec("t", "BF16", (4, 6)), Box.of((3, 0), (2, 6)))


def test_values_that_share_a_byte_are_not_cut() -> None:
    spec = TensorSpec("t", "F4", (4, 6))
    assert place_of(spec, whole(spec.shape)).first == 0
    with pytest.raises(UsageError, match="cannot be cut"):
        place_of(spec, Box.of((0, 0), (2, 6)))
