"""`cache`: the mirrors that `publish` and `attach` keep for a user."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cli_world import USAGE, VERSIONS, World, facts, refused, run, text

import weightcast as wc
from weightcast.disk.durable import locked
from weightcast.errors import BusyError
from weightcast.follow.mirror_reader import reading


def publish(world: World) -> Path:
    """A mirror in the cache, made by publishing."""
    facts("publish", world.url, world.checkpoints[VERSIONS])
    (mirror,) = facts("cache")["mirrors"]
    return Path(mirror["folder"])


def test_empty_cache(cache: Path) -> None:
    assert facts("cache") == {"cache": str(cache / "weightcast"), "mirrors": []}
    assert text("cache").startswith("no mirrors in ")


def test_publish_says_that_it_makes_a_mirror(world: World, cache: Path) -> None:
    made = text("publish", world.url, world.checkpoints[VERSIONS]).splitlines()
    assert made[1].startswith("made a mirror of ")
    assert str(cache) in made[1]
    assert text("publish", world.url, world.checkpoints[VERSIONS]) == f"version {VERSIONS} has these weights already\n"


def test_cache_lists_channel_version_size_and_last_use(world: World) -> None:
    folder = publish(world)
    (row,) = facts("cache", "list")["mirrors"]
    assert (row["channel"], row["version"], row["in_use"]) == (str(world.url), VERSIONS, False)
    assert row["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shown = text("cache")
    assert str(world.url) in shown
    assert "1 mirror, " in shown


def test_prune_by_age_or_all(world: World) -> None:
    folder = publish(world)
    assert facts("cache", "prune", "--older-than", "1h")["deleted"] == []
    long_ago = time.time() - 7200
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (long_ago, long_ago))
    assert facts("cache", "prune", "--older-than", "1h", "--dry-run")["deleted"] == [str(folder)]
    assert folder.is_dir()
    assert facts("cache", "prune", "--older-than", "1h")["deleted"] == [str(folder)]
    assert not folder.exists()
    folder = publish(world)
    assert text("cache", "prune", "--all").startswith("1 mirror deleted, ")
    assert list(folder.parent.iterdir()) == []


def test_mirror_in_use_is_never_deleted(world: World) -> None:
    folder = publish(world)
    with wc.Subscriber(world.url, folder):
        (row,) = facts("cache")["mirrors"]
        assert row["in_use"] is True
        pruned = facts("cache", "prune", "--all")
        assert (pruned["deleted"], pruned["in_use"]) == ([], [str(folder)])
        assert "kept, in use" in text("cache", "prune", "--all")
    assert facts("cache", "prune", "--all")["deleted"] == [str(folder)]


def test_look_at_the_cache_does_not_refuse_a_follower_that_starts(world: World) -> None:
    folder = publish(world)
    with ExitStack() as looking, ThreadPoolExecutor(1) as pool:
        looking.enter_context(locked(folder / ".weightcast" / "owner", shared=True))  # as `cache list` does
        started = pool.submit(wc.Subscriber, world.url, folder)
        with suppress(TimeoutError):
            started.result(0.1)
        looking.close()
        started.result(60).close()


def test_second_follower_is_refused_at_once(world: World) -> None:
    folder = publish(world)
    with wc.Subscriber(world.url, folder), pytest.raises(BusyError):
        wc.Subscriber(world.url, folder)


def test_mirror_that_is_being_read_is_never_deleted(world: World) -> None:
    folder = publish(world)
    with wc.Subscriber(world.url, folder) as subscriber:
        subscriber.fold()
    with reading(folder):
        assert facts("cache", "prune", "--all")["in_use"] == [str(folder)]


def test_prune_keeps_a_mirror_that_is_a_link(world: World, tmp_path: Path) -> None:
    folder = publish(world)
    folder.rename(tmp_path / "disk")
    folder.symlink_to(tmp_path / "disk")
    pruned = facts("cache", "prune", "--all")
    assert (pruned["deleted"], pruned["in_use"], pruned["links"]) == ([], [], [str(folder)])
    assert f"kept, a symbolic link: {folder}" in text("cache", "prune", "--all")
    assert (folder / ".weightcast").is_dir()


def test_prune_all_deletes_mirrors_from_the_future_and_what_a_killed_prune_left(world: World) -> None:
    folder = publish(world)
    left = folder.with_name(f".{folder.name}.pruned")
    shutil.copytree(folder, left)
    tomorrow = time.time() + 86400
    os.utime(folder, (tomorrow, tomorrow))
    assert facts("cache", "prune", "--all", "--dry-run")["deleted"] == [str(folder)]
    assert left.is_dir()
    assert facts("cache", "prune", "--older-than", "1h")["deleted"] == []
    assert not left.exists()
    assert facts("cache", "prune", "--all")["deleted"] == [str(folder)]
    assert list(folder.parent.iterdir()) == []


def test_other_folders_in_the_cache_are_left_alone(cache: Path) -> None:
    others = [cache / "weightcast" / name for name in ("precious", "0123456789abcdef" * 2)]
    for other in others:
        other.mkdir(parents=True)
    assert facts("cache")["mirrors"] == []
    assert facts("cache", "prune", "--all")["deleted"] == []
    assert all(other.is_dir() for other in others)


def test_prune_needs_to_know_what(tmp_path: Path) -> None:
    assert "--older-than" in refused(tmp_path, USAGE, "cache", "prune")
    refused(tmp_path, USAGE, "cache", "prune", "--all", "--older-than", "1d")
    refused(tmp_path, USAGE, "cache", "--all")
    assert run("cache", "frob").code == USAGE


def test_reset_names_the_mirror_it_leaves(world: World) -> None:
    folder = publish(world)
    left = facts("reset", world.url, "--yes")
    assert (left["mirror_left"], left["replicas_left"]) == (str(folder), [])
    assert folder.is_dir()
