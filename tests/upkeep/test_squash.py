"""Squashes lead where their deltas lead; a whole channel verifies, and damage is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import same_bits
from channels import channel_of, pull, small_model, train
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import SQUASHES
from weightcast.channel.retention import Retention
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import collect
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify, verify_deep


@pytest.fixture
def store() -> Store:
    return MemoryStore()


def test_squash_leads_where_its_deltas_lead(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 17)
    cut = list(squash(Chain.open(store), tmp_path / "scratch"))
    assert [(edge.base, edge.result) for edge in cut] == [(0, 8), (8, 16)]
    counting = ScriptedStore(store)
    there = wc.Arrays.copy_of(states[0])
    pull(counting, there)
    fetched = set(counting.asked("get", ("deltas/", SQUASHES)))
    assert len(fetched) == 3, "two squashes and the last delta"
    assert same_bits(there, states[17])
    assert list(squash(Chain.open(store), tmp_path / "scratch")) == []


def test_wide_squashes_are_made_of_narrow_ones(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 9)
    cut = list(squash(Chain.open(store), tmp_path / "scratch", levels=(2, 4, 8)))
    assert [(edge.base, edge.result) for edge in cut] == [(0, 2), (2, 4), (4, 6), (6, 8), (0, 4), (4, 8), (0, 8)]
    there = wc.Arrays.copy_of(states[0])
    pull(store, there)
    assert same_bits(there, states[9])
    assert [finding for _, finding in verify_deep(Chain.open(store), tmp_path / "walk") if finding] == []


def test_next_run_begins_where_the_last_one_ended(store: Store, tmp_path: Path) -> None:
    model = small_model()
    wc.init(store, model)
    for round_ in range(3):
        with wc.Publisher(store, model) as publisher:
            for step in range(4):
                train(model, 10 * round_ + step)
                publisher.publish().result(60)
        counting = ScriptedStore(store)
        cut = list(squash(Chain.open(counting), tmp_path / "scratch", levels=(4,)))
        assert [(edge.base, edge.result) for edge in cut] == [(4 * round_, 4 * round_ + 4)]
        anchors = [key for key in counting.asked("get") if key.endswith("model.safetensors")]
        assert bool(anchors) == (round_ == 0)


def test_intact_channel_verifies_and_every_kind_of_damage_is_found(store: Store, tmp_path: Path) -> None:
    channel_of(store, 9)
    chain = Chain.open(store)
    list(squash(chain, tmp_path / "scratch"))
    assert list(verify(chain)) == []
    for i, prefix in enumerate(("deltas/000000000005", "squashes/", "anchors/000000000000")):
        key = next(o.key for o in store.list(prefix) if o.key.endswith(".safetensors"))
        good = store.get(key)
        store.put(key, good[:-1] + bytes([good[-1] ^ 1]))
        findings = {f.key for _, f in verify_deep(chain, tmp_path / f"walk{i}") if f}
        assert any(key.startswith(found) for found in findings)
        store.put(key, good[:-1])
        if prefix != "squashes/":  # whose size no record states
            assert key in {finding.key for finding in verify(chain)}
        store.put(key, good)
    store.delete("manifests/000000000004.json")
    assert list(verify(chain)) == [], "a collected manifest is no damage"
    (untried,) = (f for _, f in verify_deep(chain, tmp_path / "walk9") if f)
    assert untried.problem.startswith("3 deltas could not be tried"), "nothing leads to 5, 6 and 7 any more"


def test_collected_versions_are_not_damage(store: Store, tmp_path: Path) -> None:
    channel_of(store, 6)
    chain = Chain.open(store)
    with wc.Subscriber(store, tmp_path / "mirror") as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        cut_anchor(chain, subscriber.mirror)
    for _ in range(2):
        collect(chain, Retention(0, 0, 0))
    assert list(verify(chain)) == []
    assert [finding for _, finding in verify_deep(chain, tmp_path / "walk") if finding] == []
