"""The estimate of what cutting costs: routes are the cheapest, and what it says is cheap is cheap."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.analysis.cadence import ANCHORS, SQUASHES, Cadence, Fleet, cadences, squash_bytes

MODEL = 1_000_000
DELTAS = (10_000,) * 6
GROWING = {1: DELTAS, 2: (17_000,) * 3, 4: (29_000,)}
"""A union that grows by 1.7 with each doubling."""


def way(found: list[Cadence], levels: tuple[int, ...], every: int | None) -> Cadence:
    (one,) = (one for one in found if (one.levels, one.anchor_every) == (levels, every))
    return one


def test_every_way_is_there_once_the_cheapest_first() -> None:
    found = cadences(DELTAS, GROWING, MODEL, Fleet())
    assert {(one.levels, one.anchor_every) for one in found} == set(product(SQUASHES, ANCHORS))
    assert len(found) == len(SQUASHES) * len(ANCHORS)
    assert [one.moved for one in found] == sorted(one.moved for one in found)


def test_costs_without_squashes_are_sums_of_deltas() -> None:
    """Version 0 is the only anchor: a join at version v fetches it and v deltas; a return after k versions, k."""
    alone = way(cadences(DELTAS, GROWING, MODEL, Fleet(3, 2.0)), (), None)
    assert alone.uploaded == 10_000
    assert alone.join == pytest.approx(MODEL + 10_000 * sum(range(256, 512)) / 256)
    assert alone.back == pytest.approx(10_000 * 101 / 2)
    assert alone.downloaded == pytest.approx(3 * (10_000 + 2 / 100 * (alone.join + alone.back)))
    assert alone.stored == MODEL + 511 * 10_000


def test_with_anchors_a_join_is_one_and_the_deltas_since() -> None:
    anchored = way(cadences(DELTAS, GROWING, MODEL, Fleet()), (), 16)
    assert anchored.join == pytest.approx(MODEL + 10_000 * 7.5)
    assert anchored.uploaded == pytest.approx(10_000 + MODEL / 16)
    assert anchored.stored < MODEL + 511 * 10_000


def test_without_readers_nothing_pays() -> None:
    best = cadences(DELTAS, GROWING, MODEL, Fleet(replicas=0))[0]
    assert (best.levels, best.anchor_every, best.moved) == ((), None, 10_000)


def test_the_more_join_the_more_anchors_pay() -> None:
    def every(joins: float) -> int:
        return cadences(DELTAS, GROWING, MODEL, Fleet(100, joins))[0].anchor_every or 10**9

    found = [every(joins) for joins in (0.0, 1.0, 100.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
    st.integers(1, 10**7),
    st.integers(1, 4096),
    st.integers(1, 4096),
)
@settings(max_examples=100)
def test_wider_squash_is_no_smaller_and_never_larger_than_the_model(
    sizes: list[int], most: int, one: int, other: int
) -> None:
    windows = {1 << i: (size,) for i, size in enumerate(sorted(sizes))}
    narrow, wide = (squash_bytes(windows, 1 << span.bit_length(), most) for span in sorted((one, other)))
    assert narrow <= wide * (1 + 1e-9)
    assert wide <= most


def test_measured_sizes_are_taken_and_growth_goes_on_beyond() -> None:
    assert squash_bytes(GROWING, 4, MODEL) == 29_000
    assert squash_bytes(GROWING, 8, MODEL) == pytest.approx(29_000 * 29 / 17)
    assert squash_bytes({1: (500,)}, 8, MODEL) == 4000, "one size alone: as if no weight changed twice"
    assert squash_bytes({1: (500,)}, 1 << 20, MODEL) == MODEL
    assert squash_bytes({1: (10,), 2: (100,)}, 4, MODEL) == 200, "never more than one by one"
    assert squash_bytes({1: (100,), 2: (10,)}, 4, MODEL) == 10, "weights that return do not make it shrink for ever"
