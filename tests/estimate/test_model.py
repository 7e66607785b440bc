"""The phases of a sync: small cases by hand, and what must hold for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightcast.estimate.model import (
    METHODS,
    Fleet,
    Links,
    Model,
    Prices,
    broadcast_break_even,
    estimate,
    estimates,
    join,
    nbytes_of,
    sooner,
)
from weightcast.estimate.rates import CODECS, PHASES, Rates, Work
from weightcast.publish.codec_choice import Cost, break_even

MODEL = Model(1_000_000_000, 2, 0.01, 300)
LINKS = Links(up=1e8, down=2e8, between=5e7, fabric=1e10, latency=0.01)


def rates(**works: Work) -> Rates:
    """Of a machine that computes in no time but for these phases of every codec."""
    phases = dict.fromkeys(PHASES, Work()) | works
    return Rates("", 1, dict.fromkeys(CODECS, phases), copy=1e-10, digest=0.0, sha256=0.0, disk=0.0)


def test_broadcast_takes_as_long_as_one_copy_on_the_slowest_link() -> None:
    assert estimate("broadcast", MODEL, Fleet(replicas=9), LINKS, rates()).seconds == pytest.approx(0.2)
    assert estimate("broadcast", MODEL, Fleet(replicas=9, regions=3), LINKS, rates()).seconds == pytest.approx(40)


def test_full_copy_takes_both_links_and_a_load() -> None:
    found = estimate("full copies", MODEL, Fleet(every=2), LINKS, rates())
    assert found.phases == pytest.approx(
        {"copy": 0.2, "upload": 20.03, "commit": 0.05, "wait": 1, "find": 0.02, "fetch": 10.01, "load": 0.2}
    )
    assert found.pause == pytest.approx(0.2)


def test_work_is_by_element_change_and_tensor_and_shared_by_ranks() -> None:
    work = rates(detect=Work(1e-9, 1e-8, 1e-5), decode=Work(2e-9, 0, 0))
    found = estimate("banded", MODEL, Fleet(ranks=4, workers=2), LINKS, work)
    assert found.phases["detect"] == pytest.approx(0.25 + 0.025 + 0.003)
    assert found.phases["decode"] == pytest.approx(1.0)


def test_versions_of_several_ranks_go_up_one_link_together() -> None:
    alone, many = (estimate("banded", MODEL, Fleet(ranks=ranks), LINKS, rates()) for ranks in (1, 16))
    assert many.phases["upload"] == pytest.approx(alone.phases["upload"], rel=0.4)  # requests less, bytes the same


def test_only_other_regions_cost_egress() -> None:
    here = estimate("banded", MODEL, Fleet(replicas=30), LINKS, rates())
    there = estimate("banded", MODEL, Fleet(replicas=30, regions=3), LINKS, rates())
    assert here.egress == 0
    assert there.egress == 2 * there.nbytes
    assert there.money(Prices(egress=1.0)) == pytest.approx(2 * there.nbytes / 1e9)
    assert there.phases["copy to regions"] > there.nbytes / LINKS.between


def test_requests_of_a_version_are_those_that_were_counted() -> None:
    """RESULTS: 6 to publish and 3 to follow, where objects are small; another rank adds one."""
    small = replace(MODEL, parameters=1_000_000)
    publish = estimate("gap", small, Fleet(replicas=0), LINKS, rates()).requests
    assert publish == 6
    assert estimate("gap", small, Fleet(replicas=10), LINKS, rates()).requests == publish + 30
    assert estimate("gap", small, Fleet(ranks=4, replicas=0), LINKS, rates()).requests == publish + 3


def test_drafts_fetch_inside_the_pause_and_ours_before() -> None:
    found = estimates(MODEL, Fleet(), LINKS, rates(apply=Work(change=1e-9)))
    assert found["banded"].pause == found["banded"].phases["apply"]
    assert found["TRL's encoding"].pause > found["TRL's encoding"].phases["fetch"]


def test_break_even_of_a_broadcast_is_where_both_take_as_long() -> None:
    ours = estimate("banded", MODEL, Fleet(), LINKS, rates(apply=Work(change=1e-9)))
    live, pause = broadcast_break_even(MODEL, ours)
    assert estimate("broadcast", MODEL, Fleet(), replace(LINKS, fabric=live), rates()).seconds == pytest.approx(
        ours.seconds
    )
    assert estimate("broadcast", MODEL, Fleet(), replace(LINKS, fabric=pause), rates()).pause == pytest.approx(
        ours.pause
    )


def test_codec_that_is_sooner_changes_at_the_rate_that_publishers_use() -> None:
    """`codec="auto"` decides by `publish.codec_choice`: for a link that is alike up and down both say the same."""
    works = {"gap": Work(change=1e-8), "banded": Work(change=4e-8)}
    by_codec = {codec: dict.fromkeys(PHASES, Work()) for codec in CODECS}
    for codec, work in works.items():
        by_codec[codec] |= {"encode": work, "decode": work}
    given = Rates("", 1, by_codec, 0.0, 0.0, 0.0, 0.0)
    costs = {codec: Cost(nbytes_of(codec, MODEL, 1) / MODEL.changes, work.change) for codec, work in works.items()}  # type: ignore[arg-type]
    even = break_even(costs["banded"], costs["gap"], 0.0, int(MODEL.changes))
    for rate, best in ((0.99 * even, "banded"), (1.01 * even, "gap")):
        links = Links(rate, rate, rate, rate, latency=0.0)
        assert sooner(estimates(MODEL, Fleet(), links, given)).method == best


def test_replica_that_joins_waits_for_the_whole_model() -> None:
    assert join(MODEL, Fleet(), LINKS, rates()) == pytest.approx(10.05)


def test_every_method_is_finite_and_positive_at_the_ends() -> None:
    for model in (Model(1, 4, 1.0, 1), Model(10**15, 1, 1e-6, 10_000_000, "wire")):
        for fleet in (Fleet(), Fleet(10**6, 10**6, 10**7, 10**4)):
            for method, one in estimates(model, fleet, LINKS, rates()).items():
                assert method in METHODS
                assert 0 < one.seconds < float("inf")
                assert 0 <= one.pause <= one.seconds
