"""The simulated fleet: small cases by hand, conservation, and that the project's own functions decide."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from fleet_sim import density_over, same_fleet, squash_bytes, trillion
from sim_fleet import Fleet, Group, Scenario
from sim_svg import plot

from weightcast.channel.retention import Retention

ALONE = Scenario(
    commits=((10.0, 200),),
    model_bytes=10_000,
    squash_bytes=lambda steps: 100 * steps,
    compute=lambda edge: 0.5,
    groups=(Group("here", 1, ("home",)),),
    capacities={"home": 1e9},
    up=100.0,
    upkeep=1e4,
    between=50.0,
    links=((1.0, 100.0),),
    horizon=60.0,
)
REGIONS = replace(
    ALONE,
    commits=tuple((10.0 * number, 200) for number in range(1, 60)),
    groups=(Group("here", 5, ("home",)), Group("there", 20, ("copy", "home"))),
    capacities={"home": 1e4, "copy": 1e4},
    horizon=900.0,
)


def ran(scenario: Scenario) -> Fleet:
    fleet = Fleet(scenario)
    fleet.run()
    return fleet


def moved(fleet: Fleet) -> float:
    """What all buckets sent."""
    return sum(bucket.server.bins.total for bucket in fleet.buckets.values())


def arrived(fleet: Fleet) -> float:
    return fleet.received + sum(copier.received for copier in fleet.copiers)


def test_one_version_takes_a_question_a_download_and_the_work() -> None:
    fleet = ran(ALONE)
    assert fleet.committed[1] == pytest.approx(12.0)  # 200 bytes at 100 a second
    (delay,) = fleet.delays
    assert 2.5 < delay <= 3.5  # a question within a second, 2 s of download, 0.5 s of work
    assert (fleet.home.asked["deltas"], fleet.home.served) == (1, {"delta": 200})


def test_reader_of_a_copy_waits_for_the_copy_too() -> None:
    fleet = ran(replace(ALONE, groups=(Group("there", 1, ("copy", "home")),), capacities={"home": 1e9, "copy": 1e9}))
    (delay,) = fleet.delays
    assert 6.5 < delay <= 8.5  # and a question of the copy's, and 4 s of its download
    assert fleet.home.served == fleet.buckets["copy"].served == {"delta": 200}


def test_every_byte_that_is_sent_arrives_once_and_all_reach_the_head() -> None:
    fleet = ran(replace(REGIONS, mean_life=200.0, restart=5.0, joins=((100.0, 3),), outages=(("copy", 200.0, 60.0),)))
    assert moved(fleet) == pytest.approx(arrived(fleet))
    calm = ran(replace(REGIONS, joins=((100.0, 3),), outages=(("copy", 200.0, 60.0),)))
    assert moved(calm) == pytest.approx(arrived(calm))
    assert {replica.at for replica in calm.replicas} == {59}


def test_home_sends_each_version_once_to_a_copy() -> None:
    fleet = ran(REGIONS)
    deltas = 59 * 200
    assert fleet.home.served["delta"] == deltas * (5 + 1)
    assert fleet.buckets["copy"].served["delta"] == deltas * 20


def test_readers_of_a_bucket_that_is_away_read_the_home_and_come_back() -> None:
    fleet = ran(replace(REGIONS, outages=(("copy", 200.0, 100.0),)))
    calm = ran(REGIONS)
    there, before = fleet.buckets["copy"], calm.buckets["copy"]
    assert fleet.home.served["delta"] > calm.home.served["delta"]
    assert 0 < there.served["delta"] < before.served["delta"]
    assert sum(there.server.bins.rates(900.0)[21:29]) == 0
    assert sum(there.server.bins.rates(900.0)[40:50]) > 0


def test_replica_that_lags_takes_the_planners_route_over_squashes() -> None:
    slow = replace(
        ALONE,
        commits=tuple((5.0 * number, 1000) for number in range(1, 100)),
        up=1e6,
        squash_every=5.0,
        horizon=1200.0,
    )
    fleet = ran(slow)  # a delta takes 10 s, and a version comes every 5 s
    assert fleet.home.served["squash"] > 0
    assert fleet.replicas[0].at == 99
    with_deltas = ran(replace(slow, squash_every=None))
    assert with_deltas.received == 99_000
    assert fleet.received < 0.7 * with_deltas.received


def test_replica_that_lost_its_disk_begins_at_the_newest_anchor() -> None:
    fleet = ran(replace(REGIONS, between=1e4, anchor_every=100.0, joins=((550.0, 1),)))
    (joined,) = fleet.joined
    assert 10_000 < joined.nbytes < 10_000 + 59 * 200 / 2


def test_retention_bounds_what_is_stored_and_leaves_all_reachable() -> None:
    kept = replace(REGIONS, commits=tuple((4.0 * number, 50) for number in range(1, 200)), squash_every=10.0)
    kept = replace(kept, anchor_every=100.0)
    everything = ran(kept)
    some = ran(replace(kept, collect_every=50.0, retention=Retention(window=100.0, grace=20.0, patience=400.0)))
    assert some.home.nbytes < everything.home.nbytes
    assert {replica.at for replica in some.replicas} == {199}


def test_run_depends_on_its_seed_alone() -> None:
    chance = replace(REGIONS, mean_life=100.0, links=((0.5, 100.0), (0.5, 1000.0)))
    first, again, other = ran(chance), ran(chance), ran(replace(chance, seed=2))
    assert (first.delays, first.behind) == (again.delays, again.behind)
    assert first.behind != other.behind


def test_copy_that_begins_empty_fetches_the_anchor_first() -> None:
    fleet = ran(replace(REGIONS, copies_are_begun=False))
    assert fleet.home.served["anchor"] == 10_000
    assert {replica.at for replica in fleet.replicas} == {59}


def test_real_run_is_simulated_by_its_times_and_sizes() -> None:
    times = {"followers start": 1.0, "followers begun": 21.0, "away": 60.0, "back": 90.0, "end": 150.0}
    found = {"times": times, "commits": [30.0, 40.0, 70.0], "delta_bytes": [100, 110, 120], "anchor_bytes": 5000}
    fleet = ran(same_fleet(found, 4))
    assert {replica.at for replica in fleet.replicas} == {3}
    assert sum(bucket.served["delta"] for bucket in fleet.buckets.values()) == (2 + 4) * 330
    assert fleet.home.served == {"anchor": 10_000, "delta": 660}


def test_trillion_parameters_run_for_a_while() -> None:
    scenario = replace(trillion(0.25, seed=1), horizon=900.0)
    fleet = ran(scenario)
    assert len(fleet.replicas) == 1000
    assert moved(fleet) == pytest.approx(arrived(fleet))
    assert squash_bytes(8) < 8 * scenario.commits[0][1]
    assert [density_over(steps) < density_over(2 * steps) for steps in (1, 8, 24, 100)] == [True] * 4


def test_plot_is_xml_with_a_line_for_each_name() -> None:
    served = {"home": [0.0, 2.0, 1.0], "<eu>": [1.0, 1.0, 1.0]}
    drawn = plot([("GB/s", 0.5, served), ("minutes", 1.0, {"all": [0.0, 0.0]})])
    root = ElementTree.fromstring(drawn)
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 3
    assert "<eu>" in [one.text for one in root.iter()]
