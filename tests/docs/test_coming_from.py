"""docs/guides/coming-from.md: its commands run, and lead to the same weights in every layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from foreign import content, read_history, read_slime, read_trl, states, write_history, write_slime, write_trl
from guides import Page, play

MADE = states(4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page's commands read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    write_history(here / "run", dict(zip((10, 20, 30), MADE[:3], strict=True)))
    write_history(here / "later", {40: MADE[3]})
    write_trl(here / "bucket", MADE)
    write_slime(here / "sync", MADE)
    shutil.move(here / "sync-base", here / "base")
    return here


def test_commands_print_what_the_page_shows(place: Path) -> None:
    play(Page.of("coming-from.md"))
    expected = dict(zip((10, 20, 30, 40), map(content, MADE), strict=True))
    assert read_history(place / "all") == expected
    assert list(read_trl(place / "back").values()) == list(expected.values())
    assert list(read_slime(place / "again").values()) == list(expected.values())
