"""The commands of docs/guides/coming-from.md, and what they print."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_world import run
from foreign import content, read_history, read_slime, read_trl, states, write_history, write_slime, write_trl

PAGE = Path(__file__).parents[2] / "docs/guides/coming-from.md"
MADE = states(4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page's commands read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    here = tmp_path / "here"
    write_history(here / "run", dict(zip((10, 20, 30), MADE[:3], strict=True)))
    write_history(here / "later", {40: MADE[3]})
    write_trl(here / "bucket", MADE)
    write_slime(here / "sync", MADE)
    shutil.move(here / "sync-base", here / "base")
    return here


def blocks() -> list[list[tuple[str, str]]]:
    """Commands with what they print, by block."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
        found.append(list(zip(parts[1::2], parts[2::2], strict=True)))
    return found


def printed_by(command: str) -> str:
    words = shlex.split(command)
    if words[0] == "weightcast":
        done = run(*words[1:])
        assert done.code == 0, done.err
        return done.out + done.err
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def about(text: str) -> str:
    """Without sizes, which another zlib may change by a few bytes."""
    return re.sub(r" *[\d.,]+ k?B\b", " SIZE", text)


def test_commands_print_what_the_page_shows(place: Path) -> None:
    for block in blocks():
        for command, shown in block:
            assert about(printed_by(command)) == about(shown), command
    expected = dict(zip((10, 20, 30, 40), map(content, MADE), strict=True))
    assert read_history(place / "all") == expected
    assert list(read_trl(place / "back").values()) == list(expected.values())
    assert list(read_slime(place / "again").values()) == list(expected.values())
