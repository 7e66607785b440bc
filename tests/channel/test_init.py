"""The first version of a channel, and what is refused as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import same_bits
from channels import blank, channel_of, pull, small_model, train

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.records import Reference
from weightcast.errors import (
    ChannelError,
    ConflictError,
    MissingError,
    UsageError,
)
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.verify import verify


@pytest.fixture
def store() -> Store:
    return MemoryStore()


def test_channel_begins_with_an_anchor(store: Store) -> None:
    model = small_model()
    manifest = wc.init(store, model, step=7)
    assert (manifest.position.version, manifest.base, manifest.step) == (0, None, 7)
    assert manifest.position.digest == wc.fingerprint(model).digest
    there = blank(model)
    assert pull(store, there) == manifest.position
    assert same_bits(there, model)


def test_second_channel_at_the_same_url_is_refused(store: Store) -> None:
    wc.init(store, small_model())
    with pytest.raises(ConflictError, match="a channel here already"):
        wc.init(store, small_model(1))


def test_interrupted_init_is_completed_by_the_next(store: Store) -> None:
    model = small_model()
    chain = Chain.create(store, model.table)
    manifest = wc.init(store, model)
    assert manifest.channel == chain.channel.id
    assert pull(store, blank(model)) == manifest.position


def test_anchor_by_reference_uploads_no_weights(store: Store, tmp_path: Path) -> None:
    model = small_model()
    manifest = wc.init(store, model, reference=Reference("org/model", "abc123"))
    assert not any(listed.key.endswith(".safetensors") for listed in store.list(""))
    here = wc.Arrays.copy_of(model)
    assert pull(store, here) == manifest.position
    with wc.Publisher(store, model) as publisher:
        train(model, 1)
        publisher.publish()
    assert pull(store, here).version == 1
    assert same_bits(here, model)
    with pytest.raises(ChannelError, match="Download org/model at abc123 into the replica's folder first"):
        pull(store, tmp_path / "empty")


def test_missing_version_is_an_error(store: Store) -> None:
    channel_of(store, 1)
    with pytest.raises(MissingError):
        Chain.open(store).manifest(9)


def test_exchanged_record_of_an_anchor_is_noticed(store: Store, tmp_path: Path) -> None:
    channel_of(store, 1)
    key = next(listed.key for listed in store.list("anchors/") if listed.key.endswith("anchor.json"))
    store.put(key, store.get(key).replace(b'"reference":null', b'"reference": null'))
    with pytest.raises(ChannelError, match="cannot be reached"):
        pull(store, tmp_path / "mirror")
    assert any("not the record that was committed" in finding.problem for finding in verify(Chain.open(store)))


def test_plain_dictionaries_are_refused_with_the_remedy(store: Store) -> None:
    arrays = {"w": np.zeros(3, np.float32)}
    wc.init(store, wc.Arrays(arrays))
    for attempt in (wc.init, wc.Publisher, wc.Subscriber):
        with pytest.raises(UsageError, match=r"wc\.Arrays"):
            attempt(store, arrays)  # type: ignore[operator]
