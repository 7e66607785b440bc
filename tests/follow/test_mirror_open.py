"""Opening a mirror: created, adopted or refused; one owner; what killed processes left."""

from __future__ import annotations

import numpy as np
import pytest
from cases import same_bits, write_folder
from faults import Crash
from faulty_disk import FaultyDisk
from liars import tree
from mirrors import edit, fetched, logged
from worlds import World, follow, model_of, opened

import weightcast as wc
from weightcast.channel.policy import Pinned
from weightcast.disk.checkpoint import MIRROR, redo_path
from weightcast.errors import (
    ChannelError,
    CheckpointError,
    InterruptedApplyError,
    UsageError,
)
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.upkeep.collect import reset


def test_mirror_is_created_in_an_empty_place(world: World) -> None:
    assert fetched(world) == ["a0", "d1", "d2", "d3", "d4"]
    assert world.check_files() == 4
    assert (world.mirror / "config.json").read_text() == '{"model_type": "test"}'
    assert fetched(world) == []


def test_checkpoint_of_a_version_is_adopted_and_only_later_versions_are_fetched(world: World) -> None:
    write_folder(world.mirror, world.states[2])
    assert fetched(world) == ["d3", "d4"]
    world.check_mirror([4])


@pytest.mark.parametrize("version", [5, None])
def test_folder_with_other_weights_is_refused_and_left_unchanged(world: World, version: int | None) -> None:
    other = world.states[version] if version else model_of({"a": np.ones(300, np.uint16)})
    write_folder(world.mirror, other)
    (world.mirror / "notes.txt").write_text("mine")
    before = tree(world.mirror)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"other weights than any version|another model"):
            follow(world)
        assert tree(world.mirror) == before
        assert not (world.mirror / MIRROR).exists()


def test_folder_is_refused_again_after_a_kill_during_the_refusal(world: World) -> None:
    write_folder(world.mirror, world.states[5])
    before = tree(world.mirror)
    with FaultyDisk(world.root) as counting, pytest.raises(UsageError):
        follow(world)
    for at in range(1, len(counting.calls) + 1):
        with FaultyDisk(world.root, "die", at), pytest.raises(Crash):
            follow(world)
        with pytest.raises(UsageError, match="other weights"):
            follow(world)
        assert tree(world.mirror) == before


def test_folder_that_is_not_a_checkpoint_is_refused(world: World) -> None:
    world.mirror.mkdir()
    (world.mirror / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="neither empty nor a checkpoint"):
        follow(world)
    assert tree(world.mirror) == {"thesis.tex": b"mine"}
    (world.root / "file").write_text("mine")
    with pytest.raises(UsageError, match="needs a folder"):
        follow(world, folder=world.root / "file")
    with pytest.raises(UsageError, match="does not exist"):
        follow(world, folder=world.root / "no" / "mirror")


def test_folder_is_removed_if_no_version_was_fetched(world: World) -> None:
    chain = world.chain
    first = Mirror(world.mirror, chain.channel.id, chain.channel.table)
    first.close()
    assert not world.mirror.exists(), "it got nothing"
    write_folder(world.mirror, model_of({"a": np.ones(300, np.uint16)}))
    with pytest.raises(UsageError):
        Mirror(world.mirror, chain.channel.id, chain.channel.table)
    assert not (world.mirror / MIRROR).exists()


def test_second_follower_of_a_folder_is_refused(world: World) -> None:
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        before = tree(world.mirror)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="another follower of this mirror"):
                Subscriber(world.store, world.mirror, threads=1)
        assert tree(world.mirror) == before
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    world.check_mirror([4])


def test_refused_follower_keeps_the_folder_of_a_faster_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin in an empty folder: the one makes .weightcast, the other is quicker to lock it."""
    chain = world.chain
    world.mirror.mkdir()
    make = MirrorFolder.make
    others: list[Mirror] = []

    def made_then_overtaken(place: MirrorFolder) -> None:
        make(place)
        monkeypatch.setattr(MirrorFolder, "make", make)
        others.append(Mirror(world.mirror, chain.channel.id, chain.channel.table))

    monkeypatch.setattr(MirrorFolder, "make", made_then_overtaken)
    with pytest.raises(CheckpointError, match="another follower"):
        Mirror(world.mirror, chain.channel.id, chain.channel.table)
    assert (world.mirror / MIRROR / "log").is_dir()
    others[0].close()
    assert fetched(world)


def test_edited_mirror_is_repaired_not_refused(world: World) -> None:
    """Once it holds a version of ours, edits are repaired, not refused."""
    with Subscriber(world.store, world.mirror, Pinned(3), threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        edit(world)
        subscriber.policy = wc.Newest()
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert (world.mirror / MIRROR).is_dir()
    world.check_mirror([4])


def test_mirror_follows_a_channel_that_was_reset(world: World) -> None:
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        reset(world.store)
        init(world.store, world.states[4])
        with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
            publisher.publish(weights=world.states[6]).result(30)
        for _ in range(40):
            staged = subscriber.poll()
            if staged is not None:
                break
        assert staged is not None
        assert staged.anchor is None, "what is held is version 0 of the new channel: a delta is enough"
        assert subscriber.apply(staged).version == 1
        assert same_bits(subscriber.weights, world.states[6])  # type: ignore[arg-type]


def test_log_of_a_channel_that_was_reset_is_dropped(world: World) -> None:
    """Versions have the same numbers and the same bits to begin with, and then other ones."""
    logged(world)
    bits = world.states
    reset(world.store)
    init(world.store, bits[0])
    with Publisher(world.store, wc.Arrays.copy_of(bits[0]), threads=1) as publisher:
        for state in (1, 2, 5):
            publisher.publish(weights=bits[state]).result(30)
    world.states[3] = bits[5]
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        assert subscriber.poll() is not None  # finds out that the files are version 2, and is gone before it goes on
    world.check_mirror([2])
    assert follow(world) == 3
    world.check_mirror([3])


def test_reset_to_another_model_is_refused_and_the_mirror_kept(world: World) -> None:
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        reset(world.store)
        init(world.store, model_of({"other": np.ones(300, np.uint16)}))
        for _ in range(2):
            with pytest.raises((UsageError, ChannelError)):
                [subscriber.poll() for _ in range(40)]
        assert subscriber.weights is not None
    with reading(world.mirror) as files:
        assert same_bits(files, world.states[4])


def test_interrupted_install_and_a_reset_leave_nothing_to_load(world: World) -> None:
    """Half of the files are of one version and half of another, and the channel that knew is gone."""
    follow(world)
    copy = world.clone(world.root.parent / "copy")
    with FaultyDisk(copy.root) as counting:
        follow(copy, policy=Pinned(0))
    moves = [i for i, call in enumerate(counting.calls, 1) if call.startswith("replace mirror/model-")]
    with FaultyDisk(world.root, "die", moves[-1]), pytest.raises(Crash):
        follow(world, policy=Pinned(0))
    reset(world.store)
    init(world.store, world.states[6])
    chain = world.chain
    Mirror(world.mirror, chain.channel.id, chain.channel.table).close()
    with pytest.raises(InterruptedApplyError):
        wc.Checkpoint(world.mirror)
    assert follow(world) == 0
    with reading(world.mirror) as files:
        assert same_bits(files, world.states[6])


def test_leftovers_of_kills_are_swept_when_the_mirror_is_opened(world: World) -> None:
    follow(world)
    inner = world.mirror / MIRROR
    before = tree(inner)
    for name in ("position.json.123.partial", "publish-abc/patch", "anchor/x", "ahead/y", "squash", "staged/z"):
        (inner / name).parent.mkdir(exist_ok=True)
        (inner / name).write_bytes(b"left behind")
    with opened(world):
        pass
    assert tree(inner) == before


def test_folder_with_an_interrupted_apply_is_no_mirror_until_it_is_finished(world: World) -> None:
    folder = world.checkpoint(1)
    redo_path(folder).write_bytes(b"")
    before = tree(folder)
    with pytest.raises(CheckpointError, match=r"interrupted here.*apply --resume"):
        follow(world, folder=folder)
    assert {name: data for name, data in tree(folder).items() if not name.startswith(f"{MIRROR}/")} == before
