"""Versions of several objects through gc and verify: all objects of a version stay together, and go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from channels import channel_of, small_model, train
from several import FOLDER, OTHER_FOLDER, publish_objects, put_objects, sizes_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.channel.retention import Retention
from weightcast.disk.checkpoint import save
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import collect
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify, verify_deep

KEEP_ALL = Retention(window=1e12, grace=0, patience=1e12)
KEEP_HEAD = Retention(0, 0, 0)


class Channel:
    """Version 1 is one object, version 2 several, and version 3 one again."""

    def __init__(self, *, interrupted: bool = False):
        self.store = MemoryStore("several")
        *_, model = channel_of(self.store, 1)
        self.chain = Chain.open(self.store)
        old = wc.Arrays.copy_of(model)
        train(model, 50, 0.2)
        self.left = put_objects(self.chain, old, model, OTHER_FOLDER) if interrupted else None
        self.several = publish_objects(self.chain, old, model)
        with wc.Publisher(self.store, model, threads=1) as publisher:
            train(model, 51)
            self.last = publisher.publish(weights=model).result(60)
        self.model = model

    @property
    def keys(self) -> set[str]:
        return {listed.key for listed in self.store.list("")}

    def add_anchor(self, folder: Path) -> None:
        folder.mkdir()
        save(self.model, folder)
        self.chain.put_anchor(self.last.position, {path.name: path for path in folder.iterdir()})


def keys_of(manifest: Manifest) -> set[str]:
    return {one.key for one in manifest.objects}


# -- gc ----------------------------------------------------------------------------------------------------------------


def test_objects_of_an_interrupted_attempt_are_orphans() -> None:
    channel = Channel(interrupted=True)
    assert channel.left is not None
    before = channel.keys
    found = collect(channel.chain, KEEP_ALL)
    assert set(found.objects) == keys_of(channel.left) == before - channel.keys
    assert found.nbytes == channel.left.nbytes
    assert found.damage == ()


def test_objects_of_a_version_that_is_not_committed_yet_are_kept() -> None:
    channel = Channel()
    old = wc.Arrays.copy_of(channel.model)
    train(channel.model, 52)
    coming = put_objects(channel.chain, old, channel.model)
    assert collect(channel.chain, KEEP_ALL).objects == ()
    channel.chain.commit(coming)
    assert list(verify(channel.chain)) == []


def test_extra_objects_in_the_committed_folder_stay_until_the_version_goes(tmp_path: Path) -> None:
    channel = Channel()
    extra = channel.chain.put_delta(channel.several.position, b"the beginning of an object", FOLDER)
    assert collect(channel.chain, KEEP_ALL).objects == ()
    assert extra.key in channel.keys
    assert list(verify(channel.chain)) == []
    channel.add_anchor(tmp_path / "anchor")
    collect(channel.chain, KEEP_HEAD)
    collect(channel.chain, KEEP_HEAD)
    assert sizes_of(channel.chain, channel.several.key) == {}


def test_all_objects_of_a_collected_version_go(tmp_path: Path) -> None:
    channel = Channel()
    channel.add_anchor(tmp_path / "anchor")
    first = collect(channel.chain, KEEP_HEAD, dry_run=True)
    assert 2 in first.versions
    collect(channel.chain, KEEP_HEAD)
    collect(channel.chain, KEEP_HEAD)
    assert not keys_of(channel.several) & channel.keys
    assert list(verify(channel.chain)) == []


def test_objects_that_follow_a_grace_period_later_are_all_listed(tmp_path: Path) -> None:
    channel = Channel()
    channel.add_anchor(tmp_path / "anchor")
    found = collect(channel.chain, Retention(window=0, grace=1e-6, patience=0))
    doomed = keys_of(channel.several) & {*found.doomed, *found.objects}
    assert doomed == keys_of(channel.several)


def test_version_with_a_missing_object_is_damage() -> None:
    channel = Channel()
    missing = channel.several.objects[1].key
    channel.store.delete(missing)
    found = collect(channel.chain, KEEP_ALL)
    assert found.objects == ()
    assert any("2" in str(problem) for problem in found.damage)


# -- squash ------------------------------------------------------------------------------------------------------------


def test_squash_over_a_version_of_several_objects(tmp_path: Path) -> None:
    channel = Channel()
    assert len(list(squash(channel.chain, tmp_path / "squash", levels=(3,)))) == 1
    for one in channel.several.objects:
        channel.store.delete(one.key)
    with wc.Subscriber(channel.store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
        assert subscriber.weights is not None
        assert wc.diff(subscriber.weights, channel.model).tensors == ()


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(3))
def test_missing_object_of_several_is_found(number: int) -> None:
    channel = Channel()
    missing = channel.several.objects[number].key
    channel.store.delete(missing)
    (finding,) = verify(channel.chain)
    assert missing in str(finding)


def test_object_of_another_size_is_found() -> None:
    channel = Channel()
    key = channel.several.objects[2].key
    channel.store.put(key, channel.store.get(key)[:-1])
    (finding,) = verify(channel.chain)
    assert key in str(finding)


def test_deep_check_reads_every_object(tmp_path: Path) -> None:
    channel = Channel()
    assert set(dict(verify_deep(channel.chain, tmp_path / "good")).values()) == {None}
    key = channel.several.objects[1].key
    data = bytearray(channel.store.get(key))
    data[-1] ^= 1
    channel.store.put(key, bytes(data))
    found = dict(verify_deep(channel.chain, tmp_path / "bad"))
    assert found[channel.several.key] is not None


def test_model_of_the_tests_is_cut() -> None:
    """Otherwise nothing above is about boxes."""
    assert all(len(spec.shape) == 2 for spec in small_model().table)
