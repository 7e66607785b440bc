"""Mirrors whose files another program changed: noticed, never passed on, repaired from the channel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from faults import Crash
from faulty_disk import FaultyDisk
from mirrors import edit, fetched, logged, shard_of
from worlds import World, follow, opened

import weightcast as wc
from weightcast.channel.policy import Pinned
from weightcast.disk.checkpoint import CHANGING, MIRROR
from weightcast.errors import (
    CheckpointError,
    InterruptedApplyError,
    ResultError,
    WeightcastError,
)
from weightcast.follow.subscriber import Subscriber
from weightcast.format.safetensors import FileSource, open_container
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.publish.publisher import Publisher
from weightcast.upkeep.squash import squash


@pytest.mark.parametrize("name", ["a", "b"])
def test_edit_is_noticed_when_the_mirror_is_opened(world: World, name: str) -> None:
    follow(world)
    edit(world, name)
    with opened(world) as mirror:
        assert mirror.version is None
        with pytest.raises(InterruptedApplyError):
            wc.Checkpoint(world.mirror)
    assert fetched(world) == ["a0", "d1", "d2", "d3", "d4"]
    world.check_mirror([4])


def test_touched_file_is_read_once_and_nothing_is_fetched(world: World) -> None:
    follow(world)
    shard_of(world, "a").touch()
    assert fetched(world) == []
    reads: list[str] = []
    with opened(world, report=lambda stage, done, total: reads.append(stage)) as mirror:
        assert mirror.version == 4
    assert reads == [], "the second time it is known to be right"


def test_files_of_an_older_version_are_updated_from_there(world: World) -> None:
    follow(world)
    for path in world.checkpoint(2).iterdir():
        shutil.copy(path, world.mirror)
    assert fetched(world) == ["d3", "d4"]
    world.check_mirror([4])


def test_tampered_log_costs_only_the_log(world: World) -> None:
    logged(world)
    patch = max((world.mirror / MIRROR / "log").iterdir())
    with FileSource(patch) as source:
        container = open_container(source)
    data = bytearray(patch.read_bytes())
    data[container.data_start + container.entries["a.values"].begin] ^= 1
    patch.write_bytes(data)
    with opened(world) as mirror:
        assert not mirror.examine()
        assert mirror.version == 2
    assert fetched(world) == ["d3", "d4"]
    world.check_mirror([4])


def test_edit_below_the_log_is_repaired_by_a_fold(world: World) -> None:
    """The log overwrites the edited element: the mirror's version is right, the files that others load are not."""
    logged(world)
    changed = next(i for i in range(300) if world.states[2].read("a")[i] != world.states[4].read("a")[i])
    path = shard_of(world, "a")
    with wc.Checkpoint(path, writable=True) as files:
        bits = files.read("a")
        bits[changed] ^= 7
        files.write("a", bits)
    assert fetched(world) == []
    assert world.check_files() == 4


def test_missing_or_short_file_is_fetched_again(world: World) -> None:
    for spoil in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])):
        follow(world)
        spoil(shard_of(world, "b"))
        assert "a0" in fetched(world)
        world.check_mirror([4])


def test_hidden_edit_is_noticed_when_its_tensor_is_folded(world: World) -> None:
    """Size and time are unchanged and no patch overwrites the element: only the whole tensor's bits show it."""
    follow(world)
    edit(world, hidden=True)
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        publisher.publish(weights=world.states[5]).result(30)
    follow(world)
    with opened(world) as mirror, pytest.raises(CheckpointError, match="changed by another program"):
        mirror.fold()
    with pytest.raises(InterruptedApplyError):
        wc.Checkpoint(world.mirror)
    assert follow(world) == 5
    world.check_mirror([5])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_edit_between_two_updates_is_repaired(world: World, hidden: bool, replaced: bool) -> None:
    """In place, or by another file of the same name, which open files do not show."""
    with Subscriber(world.store, world.mirror, Pinned(3), threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        if replaced:
            shutil.copytree(world.mirror, world.root / "copy")
            edit(world, folder=world.root / "copy", hidden=hidden)
            (world.root / "copy" / shard_of(world, "a").name).replace(shard_of(world, "a"))
        else:
            edit(world, hidden=hidden)
        subscriber.policy = wc.Newest()
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        if hidden:
            with pytest.raises(CheckpointError, match="changed by another program"):
                subscriber.fold()
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
        subscriber.fold()
        assert world.check_files() == 4
    world.check_mirror([4])


def test_fold_does_not_accept_foreign_bits(world: World) -> None:
    """Otherwise the fold would accept an edit of a tensor that the log does not touch."""
    logged(world)
    with opened(world) as mirror:
        edit(world, "d")
        with pytest.raises(CheckpointError, match="changed by another program"):
            mirror.fold()
        with pytest.raises(InterruptedApplyError):
            wc.Checkpoint(world.mirror)
    assert "a0" in fetched(world)
    assert world.check_files() == 4


def test_edit_after_an_interrupted_fold_is_noticed(world: World) -> None:
    logged(world)
    with FaultyDisk(world.root) as counting, opened(world):
        opening = len(counting.calls)
    with FaultyDisk(world.root, "die", opening + 8), pytest.raises(Crash), opened(world) as mirror:
        mirror.fold()
    assert (world.mirror / MIRROR / CHANGING).exists()
    edit(world, "d")
    assert "a0" in fetched(world)
    assert world.check_files() == 4


def test_idle_follower_notices_an_edit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        edit(world)
        polls = [subscriber.poll() for _ in range(40)]
        found = [staged for staged in polls if staged is not None]
        assert found
        subscriber.apply(found[-1])
    world.check_mirror([4])


def test_anchor_is_cut_from_verified_files_only(world: World) -> None:
    follow(world)
    edit(world, hidden=True)
    with opened(world) as mirror, pytest.raises(ResultError, match="changed by another program"):
        cut_anchor(world.chain, mirror)
    assert [edge.result for edge in world.chain.anchor_edges()] == [0]
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    assert [edge.result for edge in world.chain.anchor_edges()] == [0, 4]


@pytest.mark.parametrize("edited", [("base",), ("result",), ("base", "result")], ids=" and ".join)
def test_squash_is_cut_from_verified_folders_only(world: World, edited: tuple[str, ...]) -> None:
    scratch = world.root / "scratch"
    scratch.mkdir()
    for name, version in (("base", 0), ("result", 2)):
        follow(world, folder=scratch / f"2-{name}", policy=Pinned(version))
        if name in edited:
            edit(world, folder=scratch / f"2-{name}", hidden=True)
    with pytest.raises(WeightcastError):
        list(squash(world.chain, scratch, levels=(2,)))
    assert list(world.chain.squash_edges(0)) == []
    for _ in range(2):
        try:
            list(squash(world.chain, scratch, levels=(2,)))
        except WeightcastError:
            continue
    assert {(edge.base, edge.result) for edge in world.chain.squash_edges(0)} == {(0, 2), (2, 4)}
    world.check_readers([4])


def test_publishing_a_folder_notices_an_edited_mirror(world: World) -> None:
    follow(world)
    edit(world, hidden=True)
    assert publish(world.store, world.checkpoint(5), world.mirror).manifest.position.version == 5
    world.check_readers([5])
    world.check_mirror([5])
