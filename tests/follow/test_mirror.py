"""A mirror: made, adopted or refused; edited behind our back; shared with readers; short of room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cases import same_bits, write_folder
from faults import Crash, FaultyStore
from faulty_disk import FaultyDisk
from liars import tree
from worlds import World, follow, model_of, opened

import weightcast as wc
from weightcast.channel.keys import ANCHORS, DELTAS
from weightcast.channel.policy import Every, Pinned
from weightcast.disk.checkpoint import CHANGING, MIRROR
from weightcast.errors import (
    ChannelError,
    CheckpointError,
    InterruptedApplyError,
    ResultError,
    SpaceError,
    UnreachableError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber
from weightcast.format.safetensors import FileSource, open_container
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.upkeep.collect import reset
from weightcast.upkeep.squash import squash


@pytest.fixture
def world(ram: Path) -> World:
    return World.make(ram / "world").begin(4)


def fetched(world: World, folder: Path | None = None, version: int = 4) -> list[str]:
    """Follow, and say which objects that took, by the letter of their kind and their version."""
    calls = FaultyStore(world.store)
    assert follow(world, calls, folder) == version
    keys = {key for key in calls.asked("get") if key.endswith(".safetensors")}
    return sorted({key[0] + key.partition("/")[2][:12].lstrip("0").zfill(1) for key in keys})


def edit(world: World, name: str = "a", *, folder: Path | None = None, hidden: bool = False) -> None:
    """Flip a bit of a tensor, as another program would; ``hidden``: so that size and time of the file do not tell."""
    folder = folder or world.mirror
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    with wc.Checkpoint(folder, writable=True, interrupted=True) as files:
        bits = files.read(name)
        bits[-1] ^= 1
        files.write(name, bits)
    for path, when in times.items() if hidden else ():
        os.utime(path, ns=(when, when))


def shard_of(world: World, name: str) -> Path:
    """The file of the mirror that holds a tensor."""
    for path in world.mirror.glob("*.safetensors"):
        with wc.Checkpoint(path) as files:
            if name in files.table:
                return path
    raise AssertionError(name)


def logged(world: World) -> None:
    """Files at version 2, a log that leads to 4."""
    follow(world, policy=Pinned(2))
    follow(world)
    with opened(world) as mirror:
        assert (mirror.version, mirror.folded.version if mirror.folded else None) == (4, 2)


# -- make, adopt, refuse -----------------------------------------------------------------------------------------------


def test_a_mirror_is_made_where_there_is_nothing(world: World) -> None:
    assert fetched(world) == ["a0", "d1", "d2", "d3", "d4"]
    assert world.check_files() == 4
    assert (world.mirror / "config.json").read_text() == '{"model_type": "test"}'
    assert fetched(world) == []


def test_a_checkpoint_of_the_channel_is_adopted_and_only_what_is_missing_is_fetched(world: World) -> None:
    write_folder(world.mirror, world.states[2])
    assert fetched(world) == ["d3", "d4"]
    world.check_mirror([4])


@pytest.mark.parametrize("version", [5, None])
def test_other_weights_are_refused_and_left_as_they_are(world: World, version: int | None) -> None:
    other = world.states[version] if version else model_of({"a": np.ones(300, np.uint16)})
    write_folder(world.mirror, other)
    (world.mirror / "notes.txt").write_text("mine")
    before = tree(world.mirror)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"other weights than any version|another model"):
            follow(world)
        assert tree(world.mirror) == before
        assert not (world.mirror / MIRROR).exists()


def test_refused_after_a_kill_in_the_middle_of_being_refused(world: World) -> None:
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


def test_folders_that_are_no_checkpoints_are_refused(world: World) -> None:
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


def test_a_folder_made_in_vain_is_gone_again(world: World) -> None:
    chain = world.chain
    first = Mirror(world.mirror, chain.channel.id, chain.channel.table)
    first.close()
    assert not world.mirror.exists(), "it got nothing"
    write_folder(world.mirror, model_of({"a": np.ones(300, np.uint16)}))
    with pytest.raises(UsageError):
        Mirror(world.mirror, chain.channel.id, chain.channel.table)
    assert not (world.mirror / MIRROR).exists()


def test_two_followers_of_one_folder_are_one_too_many(world: World) -> None:
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


def test_who_is_refused_leaves_what_another_has_just_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_fresh_mirror_is_nobody_elses_checkpoint(world: World) -> None:
    """Once it holds what we brought, edits are put right, not respected."""
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


# -- edited behind our back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_edit_is_noticed_when_the_mirror_is_opened(world: World, name: str) -> None:
    follow(world)
    edit(world, name)
    with opened(world) as mirror:
        assert mirror.version is None
        with pytest.raises(InterruptedApplyError):
            wc.Checkpoint(world.mirror)
    assert fetched(world) == ["a0", "d1", "d2", "d3", "d4"]
    world.check_mirror([4])


def test_a_mere_touch_costs_a_look_and_nothing_more(world: World) -> None:
    follow(world)
    shard_of(world, "a").touch()
    assert fetched(world) == []
    reads: list[str] = []
    with opened(world, report=lambda stage, done, total: reads.append(stage)) as mirror:
        assert mirror.version == 4
    assert reads == [], "the second time it is known to be right"


def test_files_put_back_to_an_older_version_are_brought_forward_from_there(world: World) -> None:
    follow(world)
    for path in world.checkpoint(2).iterdir():
        shutil.copy(path, world.mirror)
    assert fetched(world) == ["d3", "d4"]
    world.check_mirror([4])


def test_a_log_that_was_tampered_with_costs_the_log_only(world: World) -> None:
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


def test_an_edit_below_the_log_is_put_right_by_folding(world: World) -> None:
    """The log overwrites the very element: what we hold is right, what others load is not."""
    logged(world)
    changed = next(i for i in range(300) if world.states[2].read("a")[i] != world.states[4].read("a")[i])
    path = shard_of(world, "a")
    with wc.Checkpoint(path, writable=True) as files:
        bits = files.read("a")
        bits[changed] ^= 7
        files.write("a", bits)
    assert fetched(world) == []
    assert world.check_files() == 4


def test_a_file_that_is_gone_or_short_is_fetched_again(world: World) -> None:
    for spoil in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])):
        follow(world)
        spoil(shard_of(world, "b"))
        assert "a0" in fetched(world)
        world.check_mirror([4])


def test_an_edit_that_hides_is_noticed_when_the_tensor_is_folded(world: World) -> None:
    """Size and time are as they were, and no patch overwrites the very element: only the whole tensor's bits tell."""
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
def test_an_edit_while_we_follow(world: World, hidden: bool, replaced: bool) -> None:
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


def test_folding_does_not_bless_what_somebody_else_wrote(world: World) -> None:
    """An edit of a tensor that the log does not touch would otherwise be signed for by the fold."""
    logged(world)
    with opened(world) as mirror:
        edit(world, "d")
        with pytest.raises(CheckpointError, match="changed by another program"):
            mirror.fold()
        with pytest.raises(InterruptedApplyError):
            wc.Checkpoint(world.mirror)
    assert "a0" in fetched(world)
    assert world.check_files() == 4


def test_an_edit_while_a_fold_was_interrupted_is_found_out(world: World) -> None:
    logged(world)
    with FaultyDisk(world.root) as counting, opened(world):
        opening = len(counting.calls)
    with FaultyDisk(world.root, "die", opening + 8), pytest.raises(Crash), opened(world) as mirror:
        mirror.fold()
    assert (world.mirror / MIRROR / CHANGING).exists()
    edit(world, "d")
    assert "a0" in fetched(world)
    assert world.check_files() == 4


def test_an_idle_follower_notices_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_anchor_is_cut_from_proven_files_only(world: World) -> None:
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
def test_a_squash_is_cut_from_proven_folders_only(world: World, edited: tuple[str, ...]) -> None:
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


def test_publishing_a_folder_notices_that_the_mirror_is_not_what_it_was(world: World) -> None:
    follow(world)
    edit(world, hidden=True)
    assert publish(world.store, world.checkpoint(5), world.mirror).manifest.position.version == 5
    world.check_readers([5])
    world.check_mirror([5])


# -- readers -----------------------------------------------------------------------------------------------------------


def test_a_reader_delays_a_fold_but_not_the_following(world: World) -> None:
    follow(world, policy=Pinned(1), fold_every=1)
    with reading(world.mirror) as files:
        for version in (2, 3):
            follow(world, policy=Pinned(version), fold_every=1)
            assert same_bits(files, world.states[1])
        with opened(world) as mirror:
            assert (mirror.version, mirror.folded.version if mirror.folded else None) == (3, 1)
            assert not mirror.fold(wait=False)
    assert follow(world) == 4
    assert world.check_files() == 4


def test_a_reader_never_stops_a_follower_and_the_log_is_folded_afterwards(world: World) -> None:
    follow(world, policy=Pinned(0), fold_every=1)
    release, loaded = threading.Event(), threading.Event()

    def load() -> None:
        with reading(world.mirror) as files:
            loaded.set()
            release.wait(30)
            assert same_bits(files, world.states[0])

    reader = threading.Thread(target=load)
    reader.start()
    loaded.wait(30)
    followed = threading.Thread(target=lambda: [follow(world, policy=Every(), fold_every=1) for _ in range(4)])
    followed.start()
    followed.join(30)
    assert not followed.is_alive()
    with opened(world) as mirror:
        assert (mirror.version, mirror.folded.version if mirror.folded else None) == (4, 0)
    release.set()
    reader.join(30)
    with opened(world) as mirror:
        mirror.fold()
    assert world.check_files() == 4


def test_a_fold_that_is_asked_for_waits_for_readers(world: World) -> None:
    logged(world)
    with opened(world) as mirror:
        with reading(world.mirror) as files:
            folding = threading.Thread(target=mirror.fold)
            folding.start()
            folding.join(0.3)
            assert folding.is_alive()
            assert same_bits(files, world.states[2])
        folding.join(30)
    assert world.check_files() == 4


def test_readers_are_kept_out_while_the_files_change(world: World) -> None:
    logged(world)
    with FaultyDisk(world.root) as counting, opened(world) as mirror:
        opening = len(counting.calls)
        copy = world.clone(world.root.parent / "copy")
    with FaultyDisk(copy.root) as counting, opened(copy) as mirror:
        mirror.fold()
    refused = 0
    for at in range(opening + 1, len(counting.calls) + 1):
        spoilt = world.clone(world.root.parent / f"spoilt-{at}")
        with FaultyDisk(spoilt.root, "die", at), pytest.raises(Crash), opened(spoilt) as mirror:
            mirror.fold()
        refused += spoilt.check_files() is None
    assert refused > 5


def test_folding_happens_every_few_versions(world: World) -> None:
    follow(world, policy=Pinned(0), fold_every=2)
    folded = []
    for _ in range(4):
        follow(world, policy=Every(), fold_every=2)
        folded.append(world.check_files())
    assert folded == [0, 2, 2, 4]


# -- new anchors -------------------------------------------------------------------------------------------------------


def test_a_mirror_takes_over_an_anchor_of_another_layout(world: World) -> None:
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


def test_files_never_go_back_on_the_way_forward(world: World) -> None:
    """The only way on is an older anchor and what follows it: nobody can load that older version meanwhile."""
    follow(world, policy=Pinned(2))
    world.store.delete(world.chain.manifest(3).object.key)
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


def test_a_way_around_may_begin_before_where_we_stand(world: World) -> None:
    """At version 2 with the next delta lost: the anchor from before and a squash that passes by lead on."""
    follow(world, policy=Pinned(2))
    put_squash(world, 0, 4)
    world.store.delete(world.chain.manifest(3).object.key)
    assert fetched(world) == ["a0", "s0"]
    world.check_mirror([4])


# -- room --------------------------------------------------------------------------------------------------------------


def test_room_is_asked_for_before_it_is_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = shutil.disk_usage, []

    def crowded(path: object) -> shutil._ntuple_diskusage:
        asked.append(path)
        usage = real(path)  # type: ignore[arg-type]
        return type(usage)(usage.total, usage.used, 100)

    follow(world, policy=Pinned(2))
    before = {name: data for name, data in tree(world.mirror).items() if "log" not in name}
    monkeypatch.setattr(shutil, "disk_usage", crowded)
    calls = FaultyStore(world.store)
    with pytest.raises(SpaceError, match="bytes are needed and 100 are free"):
        follow(world, calls)
    assert asked
    assert not calls.asked("get", DELTAS)
    assert {name: data for name, data in tree(world.mirror).items() if "log" not in name} == before
    monkeypatch.setattr(shutil, "disk_usage", real)
    assert follow(world) == 4


def test_downloads_that_came_to_nothing_do_not_pile_up(world: World) -> None:
    """The head moves on while nothing can be applied: what was fetched for older heads goes."""
    follow(world, policy=Pinned(0))
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        sizes = []
        for round_ in range(6):
            publisher.publish(weights=world.states[5 + round_ % 3]).result(30)
            head = world.chain.head()
            assert head is not None
            with world.store.fail("get", head.object.key), pytest.raises(UnreachableError):
                follow(world)
            sizes.append(len(list((world.mirror / MIRROR).rglob("*.safetensors*"))))
        assert sizes[-1] <= head.position.version + 1
    publisher.close()


def test_equal_patches_of_different_versions_do_not_get_in_each_others_way(world: World) -> None:
    """There and back again and there: versions 5 and 7 have the same object to the byte."""
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        for version in (5, 4, 5, 4, 5):
            publisher.publish(weights=world.states[version]).result(30)
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 9
        assert same_bits(subscriber.weights, world.states[5])  # type: ignore[arg-type]


# -- resets and leftovers ----------------------------------------------------------------------------------------------


def test_a_channel_that_was_started_over_is_followed(world: World) -> None:
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
        assert staged.folder is None, "what is held is version 0 of the new channel: a delta is enough"
        assert subscriber.apply(staged).version == 1
        assert same_bits(subscriber.weights, world.states[6])  # type: ignore[arg-type]


def test_a_log_of_a_channel_that_was_started_over_is_of_no_use(world: World) -> None:
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


def test_a_channel_of_another_model_is_refused_and_the_mirror_stays(world: World) -> None:
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


def test_an_install_cut_short_and_then_a_reset_leaves_nothing_to_load(world: World) -> None:
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


def test_what_kills_leave_behind_is_swept_when_the_mirror_is_opened(world: World) -> None:
    follow(world)
    inner = world.mirror / MIRROR
    before = tree(inner)
    for name in ("position.json.123.partial", "publish-abc/patch", "anchor/x", "ahead/y", "squash", "staged/z"):
        (inner / name).parent.mkdir(exist_ok=True)
        (inner / name).write_bytes(b"left behind")
    with opened(world):
        pass
    assert tree(inner) == before


def test_an_error_in_the_middle_leaves_the_follower_able_to_go_on(world: World) -> None:
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


def test_arrays_half_written_are_not_taken_for_what_they_were(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_was_staged_before_is_not_applied_on_top_of_something_else(world: World) -> None:
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
def test_what_was_staged_gives_way_to_what_is_staged_next(world: World, memory: bool) -> None:
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


LOADER = """
import sys, time
from pathlib import Path
import weightcast as wc
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
end, loads, refusals = time.monotonic() + seconds, 0, 0
positions = set()
while time.monotonic() < end:
    try:
        with wc.reading(folder) as files:
            positions.add(wc.fingerprint(files).digest)
            loads += 1
    except wc.WeightcastError:
        refusals += 1
print(loads, *sorted(positions))
"""


def test_a_reader_in_another_process_sees_versions_only(world: World) -> None:
    follow(world, policy=Pinned(0), fold_every=1)
    command = [sys.executable, "-c", LOADER, str(world.mirror), "3"]
    loader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    version = 0
    while loader.poll() is None:
        version = 4 - version
        follow(world, policy=Pinned(version), fold_every=1)
        with opened(world) as mirror:
            mirror.fold()
    loads, *positions = loader.communicate()[0].split()
    assert int(loads) > 3
    assert set(positions) <= {wc.fingerprint(world.states[version]).digest for version in (0, 4)}
