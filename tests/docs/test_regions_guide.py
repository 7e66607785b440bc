"""docs/guides/regions.md: its commands run, and print what it says, but for sizes and times."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_world import World, ended, make_world, run
from commands import COMMAND

import weightcast as wc

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/regions.md").read_text()
TERM = 15


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def sessions() -> list[tuple[list[str], str]]:
    """Commands of the guide in their order, and what each prints."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL):
        for command, output in re.findall(r"^\$ weightcast (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
            found.append((command.split(), output))
    return found


def shape(text: str) -> str:
    """Without sizes and times, which differ from run to run."""
    text = re.sub(r"\d+:\d+:\d+", "TIME", text)
    text = re.sub(r"\d[\d.,]* (s|min|kB|B|MB)\b", r"N \1", text)
    return re.sub(r" +", " ", text)


def test_commands_of_the_guide_print_what_it_says(world: World, tmp_path: Path) -> None:
    regions = {"s3://us/run-42": str(world.url), "s3://eu/run-42": str(tmp_path / "eu")}
    regions |= {"s3://ap/run-42": str(tmp_path / "ap"), "replica": str(tmp_path / "replica")}
    commands = sessions()
    assert len(commands) == 4
    for command, output in commands:
        words = [regions.get(word, word) for word in command]
        if "--follow" in words:
            pipe = subprocess.PIPE
            with subprocess.Popen([*COMMAND, *words], stdout=pipe, stderr=pipe, text=True) as child:
                assert child.stdout is not None
                begun = child.stdout.readline() + child.stdout.readline()
                printed = begun + ended(child, TERM).out
        else:
            printed = run(*words).out
        for name, path in regions.items():
            printed = printed.replace(path, name)
        assert shape(printed) == shape(output)


def test_examples_of_the_guide_run(world: World, tmp_path: Path) -> None:
    reading, choosing = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert run("copy", world.url, tmp_path / "copy").code == 0
    there = {"wc": wc, "home": world.url, "copy": tmp_path / "copy", "folder": tmp_path / "replica"}
    exec(reading, there)
    assert there["update"].position.version == 9  # type: ignore[attr-defined]
    weights = wc.Arrays({"w": np.zeros(100, np.float32)})
    said: list[str | None] = []
    exec(choosing, {"wc": wc, "url": tmp_path / "auto", "weights": weights, "print": said.append})
    assert said == [None], "nothing has changed: the head is version 0, an anchor"


def test_break_even_in_the_guide_is_what_the_script_prints() -> None:
    script = ROOT / "benchmarks" / "break_even.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    table = printed[printed.index("| |") :]
    assert table in GUIDE
