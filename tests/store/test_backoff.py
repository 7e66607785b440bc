"""Waits between attempts: doubled, limited, spread, and finite after any number of failures."""

from __future__ import annotations

import pytest

from weightcast.store.backoff import Backoff


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def test_waits_double_up_to_the_limit() -> None:
    backoff = Backoff(1.0, random=middle)
    assert [backoff.failed() for _ in range(8)] == pytest.approx([2, 4, 8, 16, 32, 60, 60, 60])


def test_success_starts_over() -> None:
    backoff = Backoff(1.0, random=middle)
    for _ in range(5):
        backoff.failed()
    backoff.succeeded()
    assert backoff.failed() == pytest.approx(2)


@pytest.mark.parametrize("every", [0.001, 1.0, 59.0])
def test_waits_stay_at_the_limit_after_many_thousand_failures(every: float) -> None:
    backoff = Backoff(every, random=middle)
    waits = [backoff.failed() for _ in range(5000)]
    assert waits[-1] == pytest.approx(60)


def test_interval_above_the_limit_is_kept() -> None:
    backoff = Backoff(300.0, random=middle)
    assert backoff.idle() == pytest.approx(300)
    assert backoff.failed() == pytest.approx(300)


def test_waits_are_spread_by_a_fifth() -> None:
    waits = [Backoff(1.0).idle() for _ in range(200)]
    assert 0.8 <= min(waits) < max(waits) <= 1.2
