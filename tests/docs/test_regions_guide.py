"""docs/guides/regions.md: its commands and examples run, and its table is what the script computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_world import World, make_world, run
from guides import ROOT, Page, play

import weightcast as wc

PAGE = Page.of("regions.md")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_commands_print_what_the_page_shows(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    regions = {"s3://us/run-42": world.url, "s3://eu/run-42": tmp_path / "eu", "s3://ap/run-42": tmp_path / "ap"}
    play(PAGE, places=regions)


def test_examples_run(world: World, tmp_path: Path) -> None:
    reading, choosing = PAGE.python
    assert run("copy", world.url, tmp_path / "copy").code == 0
    there = {"wc": wc, "home": world.url, "copy": tmp_path / "copy", "folder": tmp_path / "replica"}
    exec(reading, there)
    assert there["update"].position.version == 9  # type: ignore[attr-defined]
    weights = wc.Arrays({"w": np.zeros(100, np.float32)})
    said: list[str | None] = []
    exec(choosing, {"wc": wc, "url": tmp_path / "auto", "weights": weights, "print": said.append})
    assert said == [None], "nothing has changed: the head is version 0, an anchor"


def test_break_even_is_what_the_script_prints() -> None:
    script = ROOT / "benchmarks" / "break_even.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert printed[printed.index("| |") :] in PAGE.text
