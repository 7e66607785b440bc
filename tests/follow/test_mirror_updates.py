"""Updates of a mirror: anchors of other layouts, detours, disk space, errors and stale stages."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from cases import same_bits
from faults import Crash, FaultyStore
from faulty_disk import FaultyDisk
from liars import tree
from mirrors import edit, fetched
from scripted_store import ScriptedStore
from worlds import World, follow

import weightcast as wc
from weightcast.channel.keys import ANCHORS, DELTAS
from weightcast.channel.policy import Pinned
from weightcast.disk.checkpoint import MIRROR
from weightcast.errors import (
    CheckpointError,
    SpaceError,
    UnreachableError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.publisher import Publisher


def test_anchor_of_another_layout_replaces_all_files(world: World) -> None:
    """Shards with an index give way to one file, and the other way round; nothing of the old layout is left to load."""
    follow(world)
    assert (world.mirror / "model.safetensors.index.json").exists()
    for listed in list(world.store.list(ANCHORS)):
        world.store.delete(listed.key)
    with Publisher(world.store, wc.Arrays.copy_of(world.states[5]), threads=1) as publisher:
        assert publisher.position.version == 5
    shutil.rmtree(world.mirror / MIRROR / "log")
    edit(world)
    assert follow(world) == 5
    assert sorted(path.name for path in world.mirror.glob("model*")) == ["model.safetensors"]
    world.check_mirror([5])


def test_files_never_show_an_older_version_during_an_update(world: World) -> None:
    """The only route is an older anchor and its successors: readers must not load that older version meanwhile."""
    follow(world, policy=Pinned(2))
    world.store.delete(world.chain.manifest(3).objects[0].key)
    put_squash(world, 0, 4)
    copy = world.clone(world.root.parent / "copy")
    with FaultyDisk(copy.root) as counting:
        assert follow(copy) == 4
    seen = set()
    for at in range(1, len(counting.calls) + 1):
        spoilt = world.clone(world.root.parent / "spoilt")
        with FaultyDisk(spoilt.root, "die", at), pytest.raises(Crash):
            follow(spoilt)
        seen.add(spoilt.check_files())
        spoilt.check_mirror([2, 4])
        shutil.rmtree(spoilt.root)
    assert seen == {2, 4, None}


def put_squash(world: World, base: int, result: int) -> None:
    patch = wc.encode(wc.diff(world.states[base], world.states[result]), "banded", world.states[base])
    file = world.root / "squash"
    file.write_bytes(patch)
    world.chain.put_squash(base, world.chain.manifest(result).position, file)
    file.unlink()


def test_detour_may_begin_before_the_current_version(world: World) -> None:
    """At version 2 with the next delta lost: the anchor from before and a squash that passes by lead on."""
    follow(world, policy=Pinned(2))
    put_squash(world, 0, 4)
    world.store.delete(world.chain.manifest(3).objects[0].key)
    assert fetched(world) == ["a0", "s0"]
    world.check_mirror([4])


def test_space_is_checked_before_it_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = shutil.disk_usage, []

    def crowded(path: object) -> shutil._ntuple_diskusage:
        asked.append(path)
        usage = real(path)  # type: ignore[arg-type]
        return type(usage)(usage.total, usage.used, 100)

    follow(world, policy=Pinned(2))
    before = {name: data for name, data in tree(world.mirror).items() if "log" not in name}
    monkeypatch.setattr(shutil, "disk_usage", crowded)
    calls = FaultyStore(world.store)
    with pytest.raises(SpaceError, match="bytes are needed, 100 are free"):
        follow(world, calls)
    assert asked
    assert not calls.asked("get", DELTAS)
    assert {name: data for name, data in tree(world.mirror).items() if "log" not in name} == before
    monkeypatch.setattr(shutil, "disk_usage", real)
    assert follow(world) == 4


def test_interrupted_download_needs_room_for_the_rest_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, store = shutil.disk_usage, ScriptedStore(world.store)
    shards = {listed.key: listed.size for listed in store.list(ANCHORS) if listed.key.endswith(".safetensors")}
    last = max(shards)
    with store.fail("get", last), pytest.raises(UnreachableError):
        follow(world, store, policy=Pinned(0))

    def crowded(path: object) -> shutil._ntuple_diskusage:
        usage = real(path)  # type: ignore[arg-type]
        return type(usage)(usage.total, usage.used, sum(shards.values()) - 1)

    monkeypatch.setattr(shutil, "disk_usage", crowded)
    assert follow(world, store, policy=Pinned(0)) == 0
    assert store.count("get", tuple(shards.keys() - {last})) == len(shards) - 1


def test_failed_downloads_do_not_accumulate(world: World) -> None:
    """The head moves on while nothing can be applied: what was fetched for older heads goes."""
    follow(world, policy=Pinned(0))
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        sizes = []
        for round_ in range(6):
            publisher.publish(weights=world.states[5 + round_ % 3]).result(30)
            head = world.chain.head()
            assert head is not None
            with world.store.fail("get", head.objects[0].key), pytest.raises(UnreachableError):
                follow(world)
            sizes.append(len(list((world.mirror / MIRROR).rglob("*.safetensors*"))))
        assert sizes[-1] <= head.position.version + 1
    publisher.close()


def test_equal_patches_of_two_versions_are_kept_apart(world: World) -> None:
    """There and back again and there: versions 5 and 7 have the same object to the byte."""
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        for version in (5, 4, 5, 4, 5):
            publisher.publish(weights=world.states[version]).result(30)
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 9
        assert same_bits(subscriber.weights, world.states[5])  # type: ignore[arg-type]


def test_follower_recovers_from_an_error_during_an_update(world: World) -> None:
    """The disk fails at any one operation; the same process polls again and gets there."""
    follow(world, policy=Pinned(1))
    copy = world.clone(world.root.parent / "copy")

    def go(world: World, at: int) -> int:
        with Subscriber(world.store, world.mirror, threads=1) as subscriber:
            with FaultyDisk(world.root, "eio" if at else None, at) as disk:
                try:
                    staged = subscriber.poll()
                    assert staged is not None
                    subscriber.apply(staged)
                except WeightcastError:
                    pass
            if at:
                staged = subscriber.poll()
                if staged is not None:
                    subscriber.apply(staged)
            assert subscriber.position is not None
            assert subscriber.position.version == 4
            assert same_bits(subscriber.weights, world.states[4])  # type: ignore[arg-type]
        return len(disk.calls)

    for at in range(1, go(copy, 0) + 1):
        spoilt = world.clone(world.root.parent / "spoilt")
        go(spoilt, at)
        spoilt.check_mirror([4])
        shutil.rmtree(spoilt.root)


def test_half_written_arrays_are_examined_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` fails between two tensors: neither the old version nor the new one is held, and the next poll knows."""
    held = wc.Arrays.copy_of(world.states[0])

    class Failing(wc.Arrays):
        def overwrite(self, name: str, indices: np.ndarray, new: np.ndarray) -> None:
            if name == "b" and fails:
                fails.pop()
                raise OSError("a device is gone")
            super().overwrite(name, indices, new)

    fails = [True]
    target = Failing({s.name: held.read(s.name).reshape(s.shape) for s in held.table}, dict.fromkeys("abcd", "BF16"))
    with Subscriber(world.store, target, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        with pytest.raises(CheckpointError, match="a device is gone"):
            subscriber.apply(staged)
        assert subscriber.position is None
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert same_bits(target, world.states[4])


def test_update_staged_for_another_version_is_refused(world: World) -> None:
    with Subscriber(world.store, world.mirror, Pinned(1), threads=1) as subscriber:
        first = subscriber.poll()
        assert first is not None
        subscriber.apply(first)
        subscriber.policy = Pinned(2)
        second = subscriber.poll()
        subscriber.policy = wc.Newest()
        third = subscriber.poll()
        assert second is not None
        assert third is not None
        subscriber.apply(third)
        for stale in (first, second):
            with pytest.raises(UsageError, match="Poll again"):
                subscriber.apply(stale)
    world.check_mirror([4])


@pytest.mark.parametrize("memory", [True, False])
def test_second_poll_replaces_what_was_staged(world: World, memory: bool) -> None:
    held = wc.Arrays.copy_of(world.states[0])
    follow(world, policy=Pinned(0))
    with Subscriber(world.store, held if memory else world.mirror, threads=1) as subscriber:
        first = subscriber.poll()
        put_squash(world, 0, 4)
        second = subscriber.poll()
        assert first is not None
        assert second is not None
        assert (len(first.patches), len(second.patches)) == (4, 1)
        with pytest.raises(UsageError, match="Poll again"):
            subscriber.apply(first)
        assert subscriber.apply(second).version == 4
        assert same_bits(subscriber.weights, world.states[4])  # type: ignore[arg-type]
