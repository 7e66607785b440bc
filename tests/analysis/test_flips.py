"""Flips are counted exactly: every number is compared with one counted element by element, in plain Python."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import reduce
from operator import add

import ml_dtypes
import numpy as np
import pytest
from anatomies import runs
from anatomy import steps_of
from cases import Bag, one
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.analysis.anatomy import anatomy_of
from weightcast.analysis.flips import flips_of, intervals
from weightcast.analysis.floats import layout_of
from weightcast.analysis.steps import Pair, Steps
from weightcast.format.spec import DTYPES
from weightcast.format.workers import Workers

NUMPY = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}


def columns(states: list[Bag], name: str) -> list[list[int]]:
    """Each element's bits at every version."""
    return [list(map(int, column)) for column in zip(*(state.read(name) for state in states), strict=True)]


@given(runs(), st.sampled_from([1, 3]))
@settings(max_examples=150)
def test_counts_are_those_of_a_count_element_by_element(states: list[Bag], threads: int) -> None:
    steps = steps_of(states)
    for spec in steps.table:
        with Workers(threads) as workers:
            found = flips_of([steps.history(spec)], workers)
        bits = columns(states, spec.name)
        changed = [sum(row[i] != row[i + 1] for row in bits) for i in range(steps.count)]
        assert list(found.changed) == changed
        returned = sum(row[i + 1] != row[i] and row[i + 1] in row[: i + 1] for row in bits for i in range(steps.count))
        assert found.returned == returned
        for each, union in found.unions.items():
            windows = [(first, first + each) for first in range(0, steps.count - each + 1, each)]
            assert union.windows == len(windows)
            assert union.changed == sum(row[a] != row[b] for row in bits for a, b in windows)
            assert union.touched == sum(len(set(row[a : b + 1])) > 1 for row in bits for a, b in windows)
        assert found.elements == spec.elements
        assert (found.exponents is None) == (spec.kind.mantissa is None)


@given(runs(tuple(NUMPY)))
@settings(max_examples=150)
def test_exponents_distances_and_directions_are_those_of_the_numbers(states: list[Bag]) -> None:
    steps = steps_of(states)
    for spec in steps.table:
        layout, found = layout_of(spec.dtype), flips_of([steps.history(spec)]).exponents
        assert layout is not None
        assert found is not None
        weights, flips, distances = Counter[int](), Counter[int](), Counter[int]()
        away = towards = across = 0
        for row in columns(states, spec.name):
            for old, new in itertools.pairwise(row):
                field = (old >> layout.mantissa) % layout.exponents
                weights[field] += 1
                if old == new:
                    continue
                flips[field] += 1
                before, after = (magnitude(bits, layout.sign) for bits in (old, new))
                distances[max(0, math.ceil(math.log2(max(1, abs(after - before)))))] += abs(after - before) < 2**40
                if (old ^ new) & layout.sign:
                    across += 1
                elif abs(after) > abs(before):
                    away += 1
                else:
                    towards += 1
        assert Counter(dict(enumerate(found.weights.tolist()))) == weights
        assert Counter(dict(enumerate(found.flips.tolist()))) == flips
        assert (found.away, found.towards, found.across) == (away, towards, across)
        near = Counter(dict(enumerate(found.distances.tolist()[:40])))
        assert near == Counter({at: number for at, number in distances.items() if at < 40})
        assert found.distances.sum() == flips.total()


def magnitude(bits: int, sign: int) -> int:
    """The place of a float on the line of all floats, by its bits."""
    return -(bits & (sign - 1)) if bits & sign else bits


@pytest.mark.parametrize("dtype", NUMPY)
def test_step_to_the_next_float_is_that_of_the_dtype(dtype: str) -> None:
    layout = layout_of(dtype)
    assert layout is not None
    rng, word = np.random.default_rng(0), DTYPES[dtype].word
    bits = np.frombuffer(rng.bytes(4000 * word.itemsize), word) % layout.sign
    with np.errstate(invalid="ignore"):  # signalling NaNs
        here, there = (some.view(NUMPY[dtype]).astype(np.float64) for some in (bits, bits + word.type(1)))
        apart = there - here
    fields = layout.field(bits)
    for i in np.flatnonzero(np.isfinite(apart)):
        field = int(fields[i])
        assert apart[i] == layout.ulp(field)
        assert layout.smallest(field) <= here[i] < layout.ulp(field) * 2 ** (layout.mantissa + 1)


@pytest.mark.parametrize("dtype", ["I32", "U8", "BOOL", "C64", "F8_E8M0", "F4"])
def test_dtype_without_a_mantissa_has_no_exponents(dtype: str) -> None:
    assert layout_of(dtype) is None


def test_distances_of_the_widest_floats_do_not_overflow() -> None:
    old = one(np.array([0xFFEFFFFFFFFFFFFF, 0, 5], np.uint64), "F64")
    new = one(np.array([0x7FEFFFFFFFFFFFFF, 1 << 63, 8], np.uint64), "F64")
    found = flips_of([Pair(old, new).history(next(iter(old.table)))]).exponents
    assert found is not None
    assert {at: int(n) for at, n in enumerate(found.distances) if n} == {0: 1, 2: 1, 64: 1}
    assert (found.across, found.away) == (2, 1)


@given(runs(["BF16"]))
@settings(max_examples=50)
def test_tensors_counted_together_are_the_sum_of_each_alone(states: list[Bag]) -> None:
    steps = steps_of(states)
    histories = [steps.history(spec) for spec in steps.table]
    together, alone = flips_of(histories), reduce(add, (flips_of([history]) for history in histories))
    assert (together.changed, together.returned, together.unions) == (alone.changed, alone.returned, alone.unions)
    assert together.exponents is not None
    assert alone.exponents is not None
    assert np.array_equal(together.exponents.flips, alone.exponents.flips)
    assert np.array_equal(together.exponents.weights, alone.exponents.weights)


@pytest.mark.parametrize("threads", [1, 3])
def test_tensor_of_many_spans_is_counted_whole(threads: int) -> None:
    old = np.arange(5_000_000, dtype=np.float64)
    new = np.where(np.arange(old.size) % 1000 == 7, -old, old)
    pair = Pair(*(one(state.view(np.uint64), "F64") for state in (old, new)))
    with Workers(threads) as workers:
        found = flips_of([pair.history(spec) for spec in pair.table], workers)
    assert (found.elements, found.changed) == (5_000_000, (5000,))
    assert found.exponents is not None
    assert (found.exponents.weights.sum(), found.exponents.across) == (5_000_000, 5000)


def test_intervals_are_powers_of_two_that_fit() -> None:
    assert [intervals(n) for n in (0, 1, 2, 5, 16)] == [(), (1,), (1, 2), (1, 2, 4), (1, 2, 4, 8, 16)]


@given(runs())
@settings(max_examples=40)
def test_two_checkpoints_are_one_step(states: list[Bag]) -> None:
    pair, patched = (anatomy_of(steps) for steps in (Pair(states[0], states[-1]), as_steps(states[0], states[-1])))
    assert pair.changed == patched.changed
    assert pair.sizes == patched.sizes
    assert [flips.unions for flips in pair.flips] == [flips.unions for flips in patched.flips]


def as_steps(old: Bag, new: Bag) -> Steps:
    return steps_of([old, new])
