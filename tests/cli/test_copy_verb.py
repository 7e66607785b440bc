"""`weightcast copy`"""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cli_world import CONFLICT, FORMAT, USAGE, World, ended, facts, flip, holds, make_world, objects, refused, run, text
from commands import COMMAND


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_copy_serves_replicas_as_its_source_does(world: World, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    said = text("copy", world.url, copy)
    assert said.startswith("10 versions, 1 squash, 2 anchors, 1 tag, ")
    assert said.endswith("; the copy is at version 9\n")
    assert text("copy", world.url, copy) == "the copy is at version 9\n"
    assert run("verify", copy, "--deep").code == 0
    assert run("pull", copy, tmp_path / "replica", "--version", "best").code == 0
    assert holds(tmp_path / "replica", world.states[4])
    told = facts("copy", world.url, copy)
    assert (told["version"], told["versions"], told["bytes"], told["problems"]) == (9, 0, 0, [])


def test_pull_reads_a_near_copy_and_goes_on_without_the_home(world: World, tmp_path: Path) -> None:
    home, copy, far = tmp_path / "home", tmp_path / "copy", tmp_path / "far"
    shutil.copytree(world.url, home)
    shutil.copytree(world.url, copy)
    objects(copy, "squashes")[0].unlink()
    assert run("pull", home, tmp_path / "replica", "--version", 3, "--near", far, "--near", copy).code == 0
    home.rename(tmp_path / "away")
    done = run("pull", home, tmp_path / "replica", "--near", far, "--near", copy)
    assert done.code == 0
    assert done.out.startswith("version 9 ")
    assert holds(tmp_path / "replica", world.states[9])
    run("init", far, world.checkpoints[1])
    (tmp_path / "away").rename(home)
    assert f"this is not a copy of {home}" in refused(tmp_path, USAGE, "pull", home, tmp_path / "r", "--near", far)


def test_damage_at_the_source_is_named_and_decides_the_exit_code(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.url, tmp_path / "channel")
    damaged = objects(tmp_path / "channel", "deltas")[5]
    flip(damaged)
    done = run("copy", tmp_path / "channel", tmp_path / "copy")
    assert done.code == FORMAT
    assert "left out: the object's SHA-256 is" in done.err
    assert damaged.name in done.err
    assert "the copy is at version 9" in done.out, "a squash leads past it"


def test_impossible_copies_are_refused(world: World, tmp_path: Path) -> None:
    run("init", tmp_path / "other", world.checkpoints[1])
    assert "another channel" in refused(tmp_path, CONFLICT, "copy", world.url, tmp_path / "other")
    assert "the same bucket" in refused(world.url, USAGE, "copy", world.url, world.url)


def test_following_copies_each_version_as_it_comes(world: World, tmp_path: Path) -> None:
    channel, copy = tmp_path / "channel", tmp_path / "copy"
    shutil.copytree(world.url, channel)
    command = [*COMMAND, "copy", channel, copy, "--follow", "--every", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = iter(child.stdout)
        assert "which has no version yet" in next(lines)
        assert "version 9: 10 versions, 1 squash, 1 anchor, 1 tag" in next(lines)
        assert "version 9: 1 anchor, " in next(lines)
        assert run("publish", channel, world.checkpoints[10], "--mirror", tmp_path / "mirror").code == 0
        assert "version 10: 1 version, " in next(lines)
        done = ended(child, signal.SIGTERM)
    assert (done.code, done.err) == (0, "")
    assert done.out == "stopped at version 10\n"
    assert run("pull", copy, tmp_path / "replica").code == 0
    assert holds(tmp_path / "replica", world.states[10])
