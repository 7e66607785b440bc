"""The model of rounding finds, from published bits alone, how a training was done and how large its updates were."""

from __future__ import annotations

import numpy as np
import pytest
from anatomies import DIRECT, MASTERS
from anatomy import recorded, steps_of
from cases import one
from hypothesis import given
from hypothesis import strategies as st

import weightcast as wc
from weightcast.analysis.anatomy import Anatomy, anatomy_of
from weightcast.analysis.rounding import KINDS, Kind, probability, verdict

WEIGHTS = 1 << 18


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def trained(kind: Kind, largest: float, steps: int = 4) -> Anatomy:
    """A population of bf16 weights under random updates, kept as float32 masters or rounded after each."""
    rng = np.random.default_rng(7)
    weights = (rng.standard_normal(WEIGHTS) * np.exp(rng.normal(-4, 1.5, WEIGHTS))).astype(np.float32)
    weights = weights if kind == "masters" else widened(wc.round_to("BF16", weights))
    states = [one(wc.round_to("BF16", weights))]
    for _ in range(steps):
        weights = (weights + rng.uniform(-largest, largest, WEIGHTS).astype(np.float32)).astype(np.float32)
        published = wc.round_to("BF16", weights)
        states.append(one(published))
        weights = weights if kind == "masters" else widened(published)
    return anatomy_of(steps_of(states))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [1e-6, 3e-5])
def test_kind_of_training_and_size_of_updates_are_found(kind: Kind, largest: float) -> None:
    (found,) = trained(kind, largest).dtypes
    best, other = found.fits
    assert best.kind == kind
    assert best.largest == pytest.approx(largest, rel=0.05)
    assert best.misplaced < 0.01 < 0.1 < other.misplaced
    assert verdict(found.fits) == kind


@pytest.mark.parametrize("kind", KINDS)
def test_updates_as_large_as_steps_do_not_tell_the_kind(kind: Kind) -> None:
    (found,) = trained(kind, 1e-2).dtypes
    assert verdict(found.fits) == "either"


def test_changes_that_are_no_small_updates_are_not_explained() -> None:
    """Every tenth weight is another, whatever its size."""
    rng = np.random.default_rng(1)
    old = wc.round_to("BF16", (rng.standard_normal(WEIGHTS) * 0.02).astype(np.float32))
    new = np.where(rng.random(WEIGHTS) < 0.1, old ^ np.uint16(1), old)
    (found,) = anatomy_of(steps_of([one(old), one(new)])).dtypes
    assert verdict(found.fits) == "neither"


@pytest.mark.parametrize(("trace", "kind"), [(MASTERS, "masters"), (DIRECT, "direct")])
def test_recorded_training_is_explained_by_one_number(trace: object, kind: Kind) -> None:
    """AdamW at a learning rate of 1e-6 moves no weight by much more in a step."""
    (found,) = anatomy_of(steps_of(recorded(trace))).dtypes  # type: ignore[arg-type]
    best, other = found.fits
    assert best.kind == kind
    assert best.misplaced < 0.02
    assert other.misplaced > 0.5
    assert 2e-7 < best.largest < 1.1e-6
    predicted = sum(row.predicted[kind] for row in found.rows)
    assert predicted == pytest.approx(found.flips.total, rel=0.02)


@given(st.floats(1e-9, 1e3), st.lists(st.floats(1e-12, 1e6), min_size=2, max_size=20))
def test_prediction_is_a_probability_that_falls_with_the_step(largest: float, ulps: list[float]) -> None:
    for kind in KINDS:
        found = probability(kind, largest, np.array(sorted(ulps)))
        assert ((found >= 0) & (found <= 1)).all()
        assert (np.diff(found) <= 1e-12).all()


@given(st.floats(0.01, 100))
def test_prediction_is_the_mean_over_updates(ulp: float) -> None:
    """Compared with a numerical mean over sizes spread evenly up to 1."""
    sizes = (np.arange(20_000) + 0.5) / 20_000
    masters, direct = np.minimum(1, sizes / ulp).mean(), (sizes > ulp / 2).mean()
    assert probability("masters", 1.0, np.array([ulp]))[0] == pytest.approx(masters, abs=1e-3)
    assert probability("direct", 1.0, np.array([ulp]))[0] == pytest.approx(direct, abs=1e-3)


def test_without_a_flip_there_is_no_fit() -> None:
    state = one(np.arange(100, dtype=np.uint16))
    (found,) = anatomy_of(steps_of([state, state])).dtypes
    assert found.fits == ()
    assert verdict(found.fits) is None
    assert all(row.predicted == {} for row in found.rows)


def test_infinities_and_nans_are_counted_and_not_explained() -> None:
    old = one(np.array([0x7F80, 0x7FC0, 0x3F80, 0x0000], np.uint16))
    new = one(np.array([0x7F81, 0x7FC0, 0x3F81, 0x0001], np.uint16))
    (found,) = anatomy_of(steps_of([old, new])).dtypes
    last = found.rows[-1]
    assert (last.field, last.weights, last.flips, last.predicted) == (255, 2, 1, {})


def test_flips_among_nans_alone_are_not_fitted() -> None:
    old, new = (one(np.array([bits, 0x3F80], np.uint16)) for bits in (0x7F80, 0x7F81))
    (found,) = anatomy_of(steps_of([old, new])).dtypes
    assert found.flips.total == 1
    assert found.fits == ()
