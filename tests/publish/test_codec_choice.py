"""`codec="auto"`: the codec with which versions arrive sooner, by what was measured."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Bag, same_bits
from channels import blank, pull, small_model, train
from hypothesis import given
from hypothesis import strategies as st
from ranks import whole
from sharded import followed
from sharded import train as train_ranks

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import UsageError
from weightcast.publish.codec_choice import Cost, Rates, break_even, ranking_seconds, sooner
from weightcast.store.memory import MemoryStore

MILLION = 1_000_000
BANDED, GAP = Cost(0.9, 2e-8), Cost(1.2, 1e-8)
"""Bytes and seconds for each change."""


def measured(link: float, encoded: int = 2) -> Rates:
    """A publisher that has tried both codecs; ranking changes in all weights takes 0.1 s."""
    return Rates(BANDED, GAP, link, 0.1, encoded)


def arrives(cost: Cost, link: float, changed: int, extra: float = 0.0) -> float:
    """Seconds to encode, upload, download and decode."""
    return 2 * changed * (cost.seconds + cost.nbytes / link) + extra


@given(st.floats(1e3, 1e12), st.integers(1, 10**9))
def test_the_codec_that_arrives_sooner_is_chosen(link: float, changed: int) -> None:
    banded, gap = arrives(BANDED, link, changed, 0.1), arrives(GAP, link, changed)
    if abs(banded - gap) > 1e-9 * gap:
        assert sooner(measured(link), changed) == ("banded" if banded < gap else "gap")


def test_slow_links_take_fewer_bytes_and_fast_ones_less_work() -> None:
    even = break_even(BANDED, GAP, 0.1, MILLION)
    assert even == pytest.approx(5 * MILLION)
    assert sooner(measured(0.9 * even), MILLION) == "banded"
    assert sooner(measured(1.1 * even), MILLION) == "gap"


@pytest.mark.parametrize(
    ("banded", "gap", "ranking", "even"),
    [
        (Cost(1.2, 2e-8), Cost(1.2, 1e-8), 0.1, 0.0),
        (Cost(1.3, 1e-9), Cost(1.2, 1e-8), 0.0, 0.0),
        (Cost(0.9, 1e-8), Cost(1.2, 1e-8), 0.0, float("inf")),
    ],
)
def test_codec_that_is_better_in_both_is_chosen_on_any_link(
    banded: Cost, gap: Cost, ranking: float, even: float
) -> None:
    assert break_even(banded, gap, ranking, MILLION) == even


def test_each_codec_is_tried_once_and_again_now_and_then() -> None:
    rates, chosen = Rates(), []
    for _ in range(200):
        codec = sooner(rates, MILLION)
        chosen.append(codec)
        cost = BANDED if codec == "banded" else GAP
        rates = rates.after_encoding(codec, MILLION, int(cost.nbytes * MILLION), cost.seconds * MILLION)
        rates = rates.after_upload(int(cost.nbytes * MILLION), cost.nbytes)
    assert chosen[:2] == ["banded", "gap"]
    assert 3 <= chosen.count("gap") <= 5, "one megabyte a second: banded, but for what is measured again"


def test_link_that_changes_is_noticed() -> None:
    rates = measured(1e6)
    for _ in range(20):
        rates = rates.after_upload(1_000_000, 0.001)
    assert sooner(rates, MILLION) == "gap"
    for _ in range(30):
        rates = rates.after_upload(1_000_000, 1.0)
    assert sooner(rates, MILLION) == "banded"


def test_empty_and_plain_versions_teach_nothing() -> None:
    rates = Rates()
    assert rates.after_encoding("banded", 0, 500, 0.1) == rates
    assert rates.after_encoding("plain", 10, 500, 0.1) == rates


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F4", "U8"])
def test_time_to_rank_is_measured_for_weights_of_any_dtype(dtype: wc.Dtype) -> None:
    spec = wc.TensorSpec("a", dtype, (64, 64))
    bits = np.random.default_rng(0).integers(0, 250, spec.elements).astype(spec.kind.word)
    with wc.Workers(1) as workers:
        assert ranking_seconds(Bag({spec: bits}), workers) > 0
        assert ranking_seconds(wc.Arrays({}), workers) == 0


def test_commit_says_which_codec_was_chosen_and_both_are_exact() -> None:
    store, model = MemoryStore(), small_model()
    codecs = []
    with wc.Publisher(store, model, codec="auto", threads=1) as publisher:
        for step in range(4):
            train(model, step)
            codecs.append(publisher.publish(step).result(60).codec)
            there = blank(model)
            pull(store, there)
            assert same_bits(there, model)
    assert codecs[:2] == ["banded", "gap"]
    assert {Chain.open(store).manifest(version).codec for version in (3, 4)} <= {"banded", "gap"}


def test_streams_choose_too() -> None:
    torch = pytest.importorskip("torch")
    store, codecs = MemoryStore(), []
    weights = {"w": torch.randn(64, 64)}
    with wc.StreamPublisher(store, codec="auto", dtype="BF16", threads=1) as publisher:
        publisher.send(weights.items()).result(60)
        for step in range(3):
            weights["w"][step] += 1
            codecs.append(publisher.send(weights.items(), step).result(60).codec)
    assert codecs[:2] == ["banded", "gap"]
    there = wc.Arrays({"w": torch.zeros(64, 64, dtype=torch.bfloat16).view(torch.uint16).numpy()}, {"w": "BF16"})
    pull(store, there)
    assert (there.read("w").reshape(64, 64) == weights["w"].bfloat16().view(torch.uint16).numpy()).all()


def test_ranks_take_the_choice_of_the_first() -> None:
    store = MemoryStore()
    train_ranks(store, 3, range(1, 5), codec="auto")
    chain = Chain.open(store)
    assert [chain.manifest(version).codec for version in (1, 2)] == ["banded", "gap"]
    assert all(wc.fingerprint(followed(store, version)) == wc.fingerprint(whole(version)) for version in range(5))


def test_unknown_codec_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="'plain', 'gap', 'banded'"):
        wc.Publisher(MemoryStore(), small_model(), codec="automatic")  # type: ignore[arg-type]
