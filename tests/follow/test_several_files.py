"""Followers of versions of several objects: they fetch several at once, resume, and refuse what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from channels import channel_of, train
from scripted_store import ScriptedStore
from several import FOLDER, OTHER_FOLDER, objects_of, publish_objects, put_objects

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.errors import NoRouteError, UnreachableError, WeightcastError
from weightcast.follow.mirror_reader import reading_held
from weightcast.store.memory import MemoryStore


class Following:
    """A follower at version 1 of a channel whose version 2 is several objects."""

    def __init__(self, folder: Path):
        self.store = ScriptedStore(MemoryStore("several"))
        *_, self.old = channel_of(self.store.store, 1)
        self.new = wc.Arrays.copy_of(self.old)
        train(self.new, 60, 0.2)
        self.chain = Chain.open(self.store.store)
        self.mirror = folder / "mirror"
        self.sync()

    def sync(self) -> wc.Position | None:
        with wc.Subscriber(self.store, self.mirror, threads=1) as subscriber:
            subscriber.sync()
            return subscriber.position

    def publish(self) -> Manifest:
        return publish_objects(self.chain, self.old, self.new)

    def holds(self, weights: wc.Arrays) -> bool:
        with reading_held(self.mirror, weights.table) as held:
            return wc.diff(held.weights, weights).tensors == ()

    def fetched(self) -> list[str]:
        return [key for verb, key in self.store.calls if verb.startswith("get") and key.startswith("deltas/")]


@pytest.fixture
def following(tmp_path: Path) -> Following:
    return Following(tmp_path)


def test_every_object_is_fetched_once(following: Following) -> None:
    committed = following.publish()
    del following.store.calls[:]
    assert following.sync() == committed.position
    assert sorted(following.fetched()) == sorted(one.key for one in committed.objects)


def test_interrupted_download_is_resumed(following: Following) -> None:
    """What arrived is not fetched again: one object at a time may be large."""
    committed = following.publish()
    last = committed.objects[-1].key
    with following.store.fail("get", last), pytest.raises(UnreachableError):
        following.sync()
    del following.store.calls[:]
    assert following.sync() == committed.position
    assert following.fetched() == [last]


def test_download_of_an_attempt_that_was_not_committed_is_discarded(following: Following) -> None:
    """The first attempt's folder is listed, but no manifest names it."""
    put_objects(following.chain, following.old, following.new, OTHER_FOLDER)
    committed = following.publish()
    del following.store.calls[:]
    assert following.sync() == committed.position
    assert all(key.startswith(committed.key) for key in following.fetched())


@pytest.mark.parametrize("number", range(3))
def test_damaged_object_of_several_is_refused(following: Following, number: int) -> None:
    committed = following.publish()
    key = committed.objects[number].key
    whole = following.store.get(key)
    following.store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WeightcastError):
        following.sync()
    assert following.holds(following.old)
    following.store.put(key, whole)
    assert following.sync() == committed.position
    assert following.holds(following.new)


def test_missing_object_of_several_is_refused(following: Following) -> None:
    committed = following.publish()
    following.store.hide(committed.objects[0].key)
    with pytest.raises(NoRouteError):
        following.sync()
    assert following.holds(following.old)


@pytest.mark.parametrize("which", [slice(0, 2), slice(1, 3)], ids=["without the last", "without the first"])
def test_manifest_that_leaves_an_object_out_leads_nowhere(following: Following, which: slice) -> None:
    """Each object is good, and they are not all of the patch."""
    whole = put_objects(following.chain, following.old, following.new)
    chain = following.chain
    refs = whole.objects[which]
    chain.commit(chain.draft(whole.position, whole.base, refs, "banded", whole.changed, None, "ranks"))
    with pytest.raises(WeightcastError):
        following.sync()
    assert following.holds(following.old)


def test_objects_of_two_patches_under_one_manifest_are_refused(following: Following) -> None:
    patch = wc.diff(following.old, following.new)
    other = wc.Arrays.copy_of(following.old)
    train(other, 61, 0.2)
    position = Position(2, patch.result)
    good = objects_of(patch, following.old)
    stranger = objects_of(wc.diff(following.old, other), following.old)
    refs = [following.chain.put_delta(position, data, FOLDER) for data in (*good[:2], stranger[2])]
    chain = following.chain
    head = chain.head()
    assert head is not None
    chain.commit(chain.draft(position, head.position, refs, "banded", patch.changed, None, "ranks"))
    with pytest.raises(WeightcastError):
        following.sync()
    assert following.holds(following.old)


def test_memory_target_follows_several_objects(following: Following) -> None:
    target = wc.Arrays.copy_of(following.old)
    committed = following.publish()
    with wc.Subscriber(following.store, target, threads=1) as subscriber:
        subscriber.sync()
        assert subscriber.position == committed.position
    assert wc.diff(target, following.new).tensors == ()
