"""Following through outages, damage, refusals and busy readers: what time or repair can cure ends no follower."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from cases import same_bits
from fake_clock import FakeClock
from scripted_store import ScriptedStore
from worlds import World, follow, nothing_like, opened

import weightcast as wc
from weightcast.channel import keys
from weightcast.channel.heartbeats import heartbeats, put_heartbeat
from weightcast.channel.keys import anchor_folder
from weightcast.channel.policy import AtLeast, Every, Pinned
from weightcast.channel.records import Anchor, Heartbeat, ObjectRef, anchor_to_json
from weightcast.errors import (
    AccessError,
    BusyError,
    CheckpointError,
    NoRouteError,
    WeightcastError,
)
from weightcast.follow.heartbeat_sender import default_replica
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.publisher import Publisher


@pytest.fixture
def world(ram: Path) -> World:
    return World.make(ram / "world").begin(4)


def damage(world: World, key: str) -> bytes:
    """Flip a bit of an object; returns what it was."""
    good = world.store.get(key)
    world.store.put(key, good[:-1] + bytes([good[-1] ^ 1]))
    return good


def delta_of(world: World, version: int) -> str:
    return world.chain.manifest(version).object.key


def publish_next(world: World) -> int:
    """Commit the next state; returns its version."""
    head = world.head()
    assert head is not None
    with Publisher(world.store, wc.Arrays.copy_of(world.states[head]), threads=1) as publisher:
        return publisher.publish(weights=world.states[head + 1]).result(30).position.version


# -- outages -----------------------------------------------------------------------------------------------------------


def test_a_follower_survives_a_day_without_the_bucket(world: World) -> None:
    clock, store = FakeClock(), ScriptedStore(world.store)
    held = wc.Arrays.copy_of(world.states[4])
    waits: list[float] = []
    with Subscriber(store, held, threads=1, clock=clock) as subscriber:

        def trouble(error: WeightcastError) -> None:
            waits.append(clock.time)
            if clock.time > 86_400:
                store.behave()

        rounds = subscriber.rounds(1.0, trouble)
        assert next(rounds) is None
        publish_next(world)
        store.fail("get")
        reached = next(update for update in rounds if update is not None)
    assert reached.position.version == 5
    assert same_bits(held, world.states[5])
    assert len(waits) > 1024
    assert max(after - before for before, after in pairwise(waits)) <= 60 * 1.2


# -- the newest version that can be reached ----------------------------------------------------------------------------


def test_a_damaged_head_leaves_a_late_replica_at_the_newest_version_before_it(world: World) -> None:
    damage(world, delta_of(world, 4))
    held = nothing_like(world.states[0])
    with Subscriber(world.store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert (staged.position.version, staged.short_of) == (3, world.chain.manifest(4).position)
        assert isinstance(staged.reason, NoRouteError)
        assert "version 4 cannot be reached" in str(staged.reason)
        subscriber.apply(staged)
    assert same_bits(held, world.states[3])


@pytest.mark.parametrize("at", [0, 1])
def test_damage_in_the_middle_is_gone_up_to(world: World, at: int) -> None:
    """Versions 3 and 4 hang on the delta that is bad: from wherever one comes, 2 is the newest."""
    follow(world, policy=Pinned(at))
    damage(world, delta_of(world, 3))
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 2
    world.check_mirror([2])


def test_an_object_that_is_gone_is_gone_up_to_as_well(world: World) -> None:
    world.store.delete(delta_of(world, 3))
    held = nothing_like(world.states[0])
    with Subscriber(world.store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert (staged.position.version, staged.short_of and staged.short_of.version) == (2, 4)


def test_whoever_is_at_the_newest_reachable_version_is_told_and_nothing_is_fetched_again_at_once(world: World) -> None:
    clock = FakeClock()
    bad = delta_of(world, 4)
    good = damage(world, bad)
    calls = ScriptedStore(world.store)
    with Subscriber(calls, world.mirror, threads=1, clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        before = calls.count("get", bad)
        assert before
        for _ in range(5):
            with pytest.raises(NoRouteError, match="version 4 cannot be reached"):
                subscriber.poll()
        assert calls.count("get", bad) == before
        world.store.put(bad, good)
        clock.time += 60.0 * 1.2
        staged = subscriber.poll()
        assert staged is not None
        assert staged.short_of is None
        assert subscriber.apply(staged).version == 4
    world.check_mirror([4])


def test_while_training_goes_on_behind_damage_it_is_not_fetched_for_every_version(world: World) -> None:
    clock, calls = FakeClock(), ScriptedStore(world.store)
    follow(world, policy=Pinned(3))
    bad = delta_of(world, 4)
    damage(world, bad)
    with Subscriber(calls, world.mirror, threads=1, clock=clock) as subscriber:
        for _ in range(3):
            with pytest.raises(NoRouteError):
                subscriber.poll()
            publish_next(world)
        assert calls.count("get", bad) == 1


def test_a_new_way_around_damage_is_taken_at_once(world: World) -> None:
    clock = FakeClock()
    follow(world, policy=Pinned(3))
    damage(world, delta_of(world, 4))
    with Subscriber(world.store, world.mirror, threads=1, clock=clock) as subscriber:
        with pytest.raises(NoRouteError):
            subscriber.poll()
        position = world.chain.manifest(4).position
        files = {path.name: path for path in world.checkpoint(4).iterdir()}
        world.chain.put_anchor(position, files)
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    world.check_mirror([4])


def test_a_pinned_version_that_cannot_be_reached_stays_an_error(world: World) -> None:
    damage(world, delta_of(world, 3))
    for version in (3, 4):
        with (
            Subscriber(world.store, nothing_like(world.states[0]), Pinned(version), threads=1) as subscriber,
            pytest.raises(NoRouteError, match=f"version {version} cannot be reached"),
        ):
            subscriber.poll()


@pytest.mark.parametrize(("policy", "reached"), [(Every(), 2), (AtLeast(1), 2), (AtLeast(3), None)])
def test_policies_decide_what_is_good_enough(world: World, policy: wc.Newest, reached: int | None) -> None:
    damage(world, delta_of(world, 3))
    with Subscriber(world.store, nothing_like(world.states[0]), policy, threads=1) as subscriber:
        if reached is None:
            with pytest.raises(NoRouteError):
                subscriber.poll()
        else:
            staged = subscriber.poll()
            assert staged is not None
            assert staged.position.version == reached


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_object_that_is_refused_is_planned_around(world: World) -> None:
    with opened(world) as mirror:
        assert mirror.version is None
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    store = ScriptedStore(world.store)
    anchor = next(edge for edge in world.chain.anchor_edges() if edge.result == 4)
    store.fail("get", anchor.key, AccessError)
    held = nothing_like(world.states[0])
    with Subscriber(store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    assert same_bits(held, world.states[4])


def test_where_nothing_else_leads_there_the_refusal_is_what_is_told(world: World) -> None:
    follow(world, policy=Pinned(3))
    store, key = ScriptedStore(world.store), delta_of(world, 4)
    store.fail("get", key, AccessError("access denied", url=store.url, key=key, hint="Ask for the permission."))
    with (
        Subscriber(store, world.mirror, threads=1) as subscriber,
        pytest.raises(AccessError, match=r"access denied.*Ask for the permission"),
    ):
        subscriber.poll()


def test_a_refused_heartbeat_is_tried_again_later(world: World) -> None:
    clock, store = FakeClock(), ScriptedStore(world.store)
    refused = store.fail("put", "replicas/", AccessError)
    with Subscriber(store, world.mirror, threads=1, replica="r", clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert heartbeats(world.chain) == []
        refused.end()
        subscriber.poll()
        assert heartbeats(world.chain) == [], "not at once"
        clock.time += 3600 * 1.2
        subscriber.poll()
        assert [found.position.version for found, _ in heartbeats(world.chain)] == [4]


# -- the local disk ----------------------------------------------------------------------------------------------------


def test_an_anchor_with_a_name_that_the_disk_cannot_have_is_planned_around(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems allow less than our limit; here the limit is raised above what the file system allows."""
    monkeypatch.setattr(keys, "MAX_FILE_NAME", 255)
    follow(world, policy=Pinned(0))
    position, data = world.chain.manifest(4).position, b"1"
    folder = anchor_folder(position, "f" * 64)
    ref = ObjectRef(f"{folder}{'x' * 238}.safetensors", 1, hashlib.sha256(data).hexdigest())
    world.store.put(ref.key, data)
    world.store.put(f"{folder}anchor.json", anchor_to_json(Anchor(world.chain.channel.id, position, (ref,))))
    assert follow(world) == 4
    world.check_mirror([4])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS])
def test_a_follower_survives_what_the_local_disk_does(
    world: World, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real error of the system, at an operation that every version needs."""
    follow(world, policy=Pinned(3))
    clock, told = FakeClock(), []
    real, failing = os.replace, [True]

    def replace(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if failing[0] and "/log/" in str(target):
            raise OSError(number, os.strerror(number), str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with Subscriber(world.store, world.mirror, threads=1, clock=clock) as subscriber:

        def trouble(error: WeightcastError) -> None:
            told.append(error)
            failing[0] = len(told) < 3

        assert next(subscriber.follow(1.0, trouble)).position.version == 4
    assert len(told) == 3
    assert all(isinstance(error, CheckpointError) and error.hint and "/log/" in str(error.file) for error in told)
    world.check_mirror([4])


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def anchored(world: World) -> World:
    """A mirror at version 2, whose way on begins at an anchor."""
    follow(world, policy=Pinned(2))
    world.chain.put_anchor(
        world.chain.manifest(4).position, {path.name: path for path in world.checkpoint(4).iterdir()}
    )
    world.store.delete(delta_of(world, 3))
    return world


def test_a_reader_delays_a_new_anchor_and_the_follower_says_so(anchored: World) -> None:
    calls, told = ScriptedStore(anchored.store), []
    with (
        Subscriber(calls, anchored.mirror, threads=1, patience=0.1, clock=FakeClock()) as subscriber,
        reading(anchored.mirror) as files,
    ):
        rounds = subscriber.rounds(1.0, told.append)
        assert next(rounds) is None
        fetched = len(calls.calls)
        assert next(rounds) is None
        assert len(calls.calls) == fetched, "what was staged waits for the reader"
        assert [type(error) for error in told] == [BusyError, BusyError]
        assert "reads the mirror's files" in str(told[0])
        assert same_bits(files, anchored.states[2])
        files.close()
        assert subscriber.position is not None
        assert subscriber.position.version == 2
    world = anchored
    assert follow(world) == 4
    world.check_mirror([4])


def test_what_waited_for_a_reader_is_installed_once_it_has_finished(anchored: World) -> None:
    told: list[WeightcastError] = []
    with Subscriber(anchored.store, anchored.mirror, threads=1, patience=0.1, clock=FakeClock()) as subscriber:
        rounds = subscriber.rounds(1.0, told.append)
        with reading(anchored.mirror):
            assert next(rounds) is None
        reached = next(rounds)
        assert reached is not None
        assert reached.position.version == 4
    anchored.check_mirror([4])


def test_a_fold_that_is_asked_for_gives_up_on_a_reader_that_stays(world: World) -> None:
    follow(world, policy=Pinned(2))
    follow(world)
    with opened(world, patience=0.1) as mirror:
        with reading(world.mirror), pytest.raises(BusyError, match=r"did not finish within 0\.1 s"):
            mirror.fold()
        assert mirror.version == 4
        assert mirror.fold()
    assert world.check_files() == 4


# -- files and log -----------------------------------------------------------------------------------------------------


def test_after_a_clean_end_the_files_hold_the_newest_version(world: World) -> None:
    follow(world, policy=Pinned(1), fold=True)
    assert world.check_files() == 1
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert world.check_files() == 1
    assert world.check_files() == 4


def test_an_error_in_the_block_still_folds(world: World) -> None:
    follow(world, policy=Pinned(1))
    subscriber = Subscriber(world.store, world.mirror, threads=1)
    with suppress(KeyboardInterrupt), subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        raise KeyboardInterrupt
    assert world.check_files() == 4


def leave_edited(world: World, error: type[Exception] | None) -> None:
    """End a follower whose files somebody else has changed, so that they cannot be folded."""
    with Subscriber(world.store, world.mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        with wc.Checkpoint(world.mirror, writable=True) as files:
            files.write("d", files.read("d") ^ 1)
        if error is not None:
            raise error


def test_files_that_cannot_be_folded_at_the_end_are_an_error(world: World, caplog: pytest.LogCaptureFixture) -> None:
    follow(world, policy=Pinned(1))
    with pytest.raises(CheckpointError, match="changed by another program"):
        leave_edited(world, None)
    follow(world, policy=Pinned(1), fold=True)
    with pytest.raises(ZeroDivisionError):  # what ended the block comes first
        leave_edited(world, ZeroDivisionError)
    assert "the files could not be brought up to date" in caplog.text
    follow(world, fold=True)
    assert world.check_files() == 4


def test_a_reader_does_not_keep_a_follower_from_ending(world: World, caplog: pytest.LogCaptureFixture) -> None:
    follow(world, policy=Pinned(1))
    with reading(world.mirror) as files:
        follow(world, fold=True)
        assert same_bits(files, world.states[1])
    assert "the files lag the log" in caplog.text
    with opened(world) as mirror:
        assert mirror.version == 4
    follow(world, fold=True)
    assert world.check_files() == 4


def test_an_idle_follower_folds_unless_somebody_reads(world: World) -> None:
    follow(world, policy=Pinned(1))
    clock = FakeClock()
    with Subscriber(world.store, world.mirror, threads=1, clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        clock.time += 29
        subscriber.poll()
        assert world.check_files() == 1
        clock.time += 2
        with reading(world.mirror):
            subscriber.poll()
        assert world.check_files() == 1
        subscriber.poll()
        assert world.check_files() == 4


# -- names -------------------------------------------------------------------------------------------------------------


def test_two_folders_of_one_host_have_two_names(tmp_path: Path) -> None:
    names = {default_replica(tmp_path / name) for name in ("a", "b")} | {default_replica()}
    assert len(names) == 3
    assert default_replica(tmp_path / "a") == default_replica(tmp_path / "b" / ".." / "a")


def test_a_name_that_somebody_else_uses_is_warned_about(world: World, caplog: pytest.LogCaptureFixture) -> None:
    position = world.chain.manifest(1).position
    put_heartbeat(world.chain, Heartbeat("r", position, time.time(), instance="a" * 32))
    with caplog.at_level(logging.WARNING, "weightcast"):
        with Subscriber(world.store, world.mirror, threads=1, replica="r") as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
        assert caplog.text.count("another process reports as replica r, or did a moment ago") == 1


def test_a_replica_that_is_overwritten_notices(world: World, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with Subscriber(world.store, world.mirror, threads=1, replica="r", clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        for _ in range(3):
            clock.time += 31
            put_heartbeat(world.chain, Heartbeat("r", world.chain.manifest(1).position, 1.0, instance="b" * 32))
            subscriber.poll()
    assert caplog.text.count("another process reports as replica r, or did a moment ago") == 1


def test_a_replica_that_restarts_is_not_its_own_rival(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with Subscriber(world.store, world.mirror, threads=1, replica="r") as subscriber:
            staged = subscriber.poll()
            if staged is not None:
                subscriber.apply(staged)
    assert "another process" not in caplog.text


# -- linked files ------------------------------------------------------------------------------------------------------


def linked(source: Path, target: Path) -> None:
    """As `cp -al`."""
    target.mkdir()
    for path in source.iterdir():
        os.link(path, target / path.name)


def test_a_replica_made_of_hard_links_leaves_the_original_alone(world: World) -> None:
    base = world.checkpoint(1)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    linked(base, world.mirror)
    follow(world, fold=True)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert world.check_files() == 4
    world.check_mirror([4])


def test_a_snapshot_of_a_mirror_made_of_hard_links_stays_what_it_was(world: World) -> None:
    follow(world, policy=Pinned(1), fold=True)
    snapshot = world.root / "snapshot"
    snapshot.mkdir()
    for path in world.mirror.iterdir():
        if path.is_file():
            os.link(path, snapshot / path.name)
    follow(world, fold=True)
    with wc.Checkpoint(snapshot) as files:
        assert same_bits(files, world.states[1])
    assert world.check_files() == 4


def test_files_behind_symbolic_links_are_never_written(world: World) -> None:
    base = world.checkpoint(1)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    world.mirror.mkdir()
    for path in base.iterdir():
        (world.mirror / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        follow(world, fold=True)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
