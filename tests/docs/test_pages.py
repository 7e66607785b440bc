"""What runs the pages notices a page that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from guides import Page, play

SAYS = "$ printf 'two\\nlines of 3.5 kB\\n'"


def page(kind: str, *lines: str) -> Page:
    return Page("\n".join(["## Title", "", f"```{kind}", *lines, "```", ""]))


@pytest.mark.parametrize(
    "shown", [["two", "lines of 12 MB"], ["two", "..."], ["...", "lines of 1 B"], ["  two", "", "lines of 4 kB"]]
)
def test_page_that_shows_what_is_printed_passes(shown: list[str]) -> None:
    play(page("console", SAYS, *shown))


@pytest.mark.parametrize(
    "shown", [["two"], ["two", "lines"], ["two", "lines of 3.5 kB", "three"], ["lines of 1 B"], []]
)
def test_page_that_shows_something_else_fails(shown: list[str]) -> None:
    with pytest.raises(AssertionError, match="the page shows"):
        play(page("console", SAYS, *shown))


@pytest.mark.parametrize("command", ["false", "weightcast log nowhere", "weightcast lgo nowhere", "no-such-command"])
def test_command_that_fails_is_noticed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=command):
        play(page("sh", command))


def test_commands_are_of_their_section_and_may_have_several_lines_and_comments() -> None:
    whole = Page(
        page("sh", "echo a \\", "    b   # a comment").text + page("python", "## no title", "x = 1").text + "## B\n"
    )
    assert [command.words for command in whole.section("Title").commands] == [["echo", "a", "b"]]
    assert whole.python == ["## no title\nx = 1\n"]
    with pytest.raises(AssertionError, match="no commands"):
        play(whole.section("B"))
