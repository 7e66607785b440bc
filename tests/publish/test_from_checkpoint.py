"""Publishing checkpoint folders against a mirror of the head."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import same_bits, write_folder
from channels import blank, channel_of, pull, small_model, train

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import (
    ChannelError,
    UsageError,
)
from weightcast.follow.mirror import Mirror
from weightcast.publish.from_checkpoint import publish
from weightcast.store.base import Store


def test_folder_is_published_against_a_mirror_of_the_head(store: Store, tmp_path: Path) -> None:
    model = small_model()
    write_folder(tmp_path / "step0", model)
    wc.init(store, tmp_path / "step0")
    for step in (1, 2, 3):
        train(model, step)
        write_folder(tmp_path / f"step{step}", model, shards=step)
        published = publish(store, tmp_path / f"step{step}", tmp_path / "mirror", step=step)
        assert (published.new, published.manifest.position.version) == (True, step)
    again = publish(store, tmp_path / "step3", tmp_path / "mirror", step=3)
    assert (again.new, again.manifest.position.version) == (False, 3)
    pull(store, tmp_path / "replica")
    chain = Chain.open(store)
    mirror = Mirror(tmp_path / "replica", chain.channel.id, chain.channel.table)
    mirror.fold()
    mirror.close()
    with wc.reading(tmp_path / "replica") as replica:
        assert same_bits(replica, model)
    assert (tmp_path / "replica" / "config.json").read_text() == '{"model_type": "test"}'


def test_edited_mirror_is_repaired_before_publishing(store: Store, tmp_path: Path) -> None:
    model = small_model()
    write_folder(tmp_path / "step0", model)
    wc.init(store, tmp_path / "step0")
    train(model, 1)
    write_folder(tmp_path / "step1", model)
    publish(store, tmp_path / "step1", tmp_path / "mirror")
    victim = next((tmp_path / "mirror").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    train(model, 2)
    write_folder(tmp_path / "step2", model)
    assert publish(store, tmp_path / "step2", tmp_path / "mirror").manifest.position.version == 2
    there = blank(model)
    pull(store, there)
    assert same_bits(there, model)


def test_folder_is_published_as_an_anchor_if_the_head_cannot_be_fetched(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 2)
    for listed in list(store.list("deltas/")):
        store.delete(listed.key)
    train(states[2], 5)
    write_folder(tmp_path / "saved", states[2])
    with pytest.raises(ChannelError, match="publish --anchor"):
        publish(store, tmp_path / "saved", tmp_path / "mirror")
    published = publish(store, tmp_path / "saved", tmp_path / "mirror", anchor=True)
    assert (published.manifest.position.version, published.manifest.base) == (3, None)
    there = blank(states[2])
    assert pull(store, there).version == 3
    assert same_bits(there, states[2])


def test_channel_without_a_version_is_refused_with_the_remedy(store: Store, tmp_path: Path) -> None:
    model = small_model()
    Chain.create(store, model.table)
    write_folder(tmp_path / "new", model)
    with pytest.raises(UsageError, match=r"no version yet.*weightcast init"):
        publish(store, tmp_path / "new", tmp_path / "mirror")
