"""docs/guides/channel.md: the commands and examples of each section run, on a channel as it would be by then."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_world import World, holds, make_world, run
from guides import Page, nothing, play

import weightcast as wc

PAGE = Page.of("channel.md")
PUBLISHING, FOLLOWING = PAGE.python
ADDRESS = "s3://bucket/run-42"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def world(here: Path) -> World:
    """A channel of ten versions, and the checkpoint of the next one."""
    return make_world(here.parent / "made")


def test_channel_begins_from_a_folder_or_from_the_hub(here: Path) -> None:
    pytest.importorskip("huggingface_hub")
    from cases import write_folder
    from cli_world import model
    from hub import OWNER, found

    write_folder(here / "checkpoint", model())
    with found(here.parent / "hub") as hub:
        name = hub.make_model("Qwen3-0.6B", here / "checkpoint")

        def by_name(words: list[str]) -> str:
            assert run("init", "named", "--from-hub", f"{name}@main").code == 0
            return ""

        def make_bucket(words: list[str]) -> str:
            hub.make_bucket("run-42")
            return ""

        instead = {f"weightcast init {ADDRESS} --from-hub": by_name, "hf auth": nothing, "hf buckets": make_bucket}
        places = {ADDRESS: here / "whole", "hf://buckets/me": f"hf://buckets/{OWNER}"}
        for section in ("Begin", "In a bucket of the Hub"):
            play(PAGE.section(section), places=places, instead=instead)
        for url in ("whole", "named", f"hf://buckets/{OWNER}/run-42"):
            assert run("pull", url, Path(f"replica-{url.rpartition('/')[2]}")).code == 0
    assert all(holds(folder, model()) for folder in here.glob("replica-*"))


def test_arrays_and_folders_are_published(world: World, here: Path) -> None:
    array = np.zeros(1000, np.uint16)

    def train(weights: wc.Arrays) -> None:
        weights.read("layer.weight")[7] += 1

    known: dict[str, Any] = {"array": array, "steps": 3, "train": train}
    exec(PUBLISHING.replace(ADDRESS, str(here / "channel")), known)
    assert known["receipt"].result().step == 3
    Path("checkpoint-120").symlink_to(world.checkpoints[-1])
    play(PAGE.section("Publish"), places={ADDRESS: world.url})
    assert run("pull", world.url, "replica").code == 0
    assert holds(here / "replica", world.states[-1])


def test_folders_and_arrays_follow(world: World, here: Path) -> None:
    play(PAGE.section("Follow"), places={ADDRESS: world.url, "curl -X POST localhost:8000/reload": "true"})
    assert holds(here / "replica", world.states[9])
    arrays = wc.Arrays.copy_of(world.states[0])

    def stop(position: wc.Position, *_: object) -> None:
        raise InterruptedError(position.version)

    assert run("publish", world.url, world.checkpoints[10], "--mirror", "mirror").code == 0
    example = FOLLOWING.replace(ADDRESS, str(world.url)).replace("subscriber.sync()", "subscriber.sync(); again()")
    newer = world.checkpoints[2], "--mirror", "mirror"
    known = {"wc": wc, "arrays": arrays, "print": stop, "again": lambda: run("publish", world.url, *newer)}
    with pytest.raises(InterruptedError, match="11"):  # else it goes on
        exec(example, known)


def test_files_of_a_mirror_are_copied_under_its_lock(world: World, here: Path) -> None:
    assert run("pull", world.url, "replica").code == 0
    (row,) = (row for row in PAGE.text.splitlines() if row.startswith("| a copy: "))
    assert subprocess.run(["bash", "-c", row.split("`")[1]]).returncode == 0
    assert holds(here / "snapshot", world.states[9])


def test_sessions_print_what_the_page_shows(world: World, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "98")
    label = ("--step", 100, "-m", "lr 3e-5 from here on")
    assert run("publish", world.url, world.checkpoints[10], *label).code == 0
    Path("run").symlink_to(world.url)
    play(PAGE.section("Inspect"), places={ADDRESS: world.url})
    play(PAGE.section("Keep it small and quick"), places={ADDRESS: world.url})
