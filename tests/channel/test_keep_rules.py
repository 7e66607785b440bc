"""Rules that keep versions by number, calendar, pin and tag, as `restic forget`: what is kept stays reachable."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.channel.edge import Edge
from weightcast.channel.keys import ANCHORS, DELTAS
from weightcast.channel.retention import Inventory, Kept, Retention, collectable, kept_by_rule
from weightcast.channel.route import reachable

DAY = 86400.0
NOW = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
"""A Monday, at noon."""
NONE = Retention(window=0, grace=0, patience=0)


def inventory(ages: list[float], now: float = NOW) -> Inventory:
    """Versions of these ages, oldest first, with an anchor at version 0 and a delta for each other."""
    edges = [Edge("anchor", None, 0, 1000, f"{ANCHORS}0/")]
    edges += [Edge("delta", v - 1, v, 10, f"{DELTAS}{v}") for v in range(1, len(ages))]
    kept = tuple(Kept(edge, ages[edge.result]) for edge in edges)
    return Inventory(len(ages) - 1, dict(enumerate(ages)), kept, (), frozenset(), (), now=now)


def named(found: dict[int, tuple[str, ...]], kind: str) -> dict[int, str]:
    return {version: why for version, reasons in found.items() for why in reasons if why.startswith(kind)}


def test_no_rule_keeps_nothing() -> None:
    assert kept_by_rule(inventory([DAY] * 5), NONE) == {}


def test_last_counts_versions() -> None:
    assert set(kept_by_rule(inventory([DAY] * 5), replace(NONE, keep_last=2))) == {3, 4}
    assert set(kept_by_rule(inventory([DAY] * 5), replace(NONE, keep_last=99))) == {0, 1, 2, 3, 4}


def test_daily_keeps_the_newest_of_each_day_that_has_one() -> None:
    # Twice on the 10th, none on the 11th and 12th, once on the 13th, three times on the 16th.
    found = inventory([6.4 * DAY, 6.3 * DAY, 3 * DAY, 0.3 * DAY, 0.2 * DAY, 0.1 * DAY])
    daily = named(kept_by_rule(found, replace(NONE, keep_daily=3)), "daily")
    assert daily == {5: "daily 2026-11-16", 2: "daily 2026-11-13", 1: "daily 2026-11-10"}
    assert set(kept_by_rule(found, replace(NONE, keep_daily=2))) == {5, 2}


def test_weeks_begin_on_monday() -> None:
    sunday, monday = 0.51 * DAY, 0.49 * DAY  # around midnight before NOW's Monday
    found = inventory([20 * DAY, 8 * DAY, sunday, monday])
    weekly = named(kept_by_rule(found, replace(NONE, keep_weekly=9)), "weekly")
    assert weekly == {3: "weekly 2026-W47", 2: "weekly 2026-W46", 1: "weekly 2026-W45", 0: "weekly 2026-W44"}


def test_reasons_of_one_version_add_up() -> None:
    found = replace(inventory([DAY] * 3), pins=frozenset({2}), tags={2: ("a", "b")})
    policy = replace(NONE, keep_last=1, keep_daily=1)
    assert kept_by_rule(found, policy)[2] == ("pinned", "tag a, b", "last 1", "daily 2026-11-15")


@pytest.mark.parametrize("now", [0.0, 253_402_300_799.0])
def test_calendar_holds_at_its_ends(now: float) -> None:
    found = inventory([0.0], now)
    assert set(kept_by_rule(found, replace(NONE, keep_daily=1, keep_weekly=1))) == {0}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inventory, Retention]:
    gaps = draw(st.lists(st.sampled_from([0.0, 60.0, 3600.0, DAY, 3 * DAY, 10 * DAY]), min_size=1, max_size=40))
    ages = [sum(gaps[at:]) for at in range(len(gaps))]
    few = st.integers(0, 6)
    some = st.integers(0, len(ages) - 1)
    policy = Retention(
        draw(st.sampled_from([0.0, DAY])), 0, 0, keep_last=draw(few), keep_daily=draw(few), keep_weekly=draw(few)
    )
    tags = dict.fromkeys(draw(st.lists(some, max_size=2)), ("t",))
    return replace(inventory(ages), tags=tags, pins=frozenset(draw(st.lists(some, max_size=2)))), policy


@given(cases())
def test_version_kept_by_a_rule_stays_reachable_with_its_manifest(case: tuple[Inventory, Retention]) -> None:
    found, policy = case
    garbage = collectable(found, policy)
    left = [kept.edge for kept in found.edges if kept.edge not in garbage.edges]
    rules = kept_by_rule(found, policy)
    assert rules.keys() <= reachable(left)
    assert not rules.keys() & set(garbage.manifests)


@given(cases())
def test_every_version_is_deleted_or_kept_for_a_reason(case: tuple[Inventory, Retention]) -> None:
    found, policy = case
    garbage = collectable(found, policy)
    assert set(garbage.manifests) | garbage.kept.keys() == found.manifests.keys()
    assert not set(garbage.manifests) & garbage.kept.keys()
    assert all(garbage.kept.values())


@given(cases())
def test_rules_only_add(case: tuple[Inventory, Retention]) -> None:
    found, policy = case
    without = collectable(found, Retention(policy.window, 0, 0))
    assert set(collectable(found, policy).manifests) <= set(without.manifests)


@given(cases())
def test_rule_keeps_one_version_of_each_of_the_newest_periods(case: tuple[Inventory, Retention]) -> None:
    found, policy = case
    for kind, most, length in (("daily", policy.keep_daily, 1), ("weekly", policy.keep_weekly, 7)):
        kept = named(kept_by_rule(found, policy), kind)

        def period(version: int, length: int = length) -> int:
            day = int((found.now - found.manifests[version]) // DAY)
            return day if length == 1 else (day + 3) // 7  # 1 January 1970 was a Thursday

        newest = {period(version): version for version in sorted(found.manifests)}
        assert set(kept) == {newest[at] for at in sorted(newest, reverse=True)[:most]}
