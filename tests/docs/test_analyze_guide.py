"""docs/guides/analyze.md: its commands print what it says, on the recorded training."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from anatomies import DIRECT, MASTERS, publish
from anatomy import recorded
from cli_world import run

GUIDE = Path(__file__).parents[2] / "docs/guides/analyze.md"


def sessions() -> list[tuple[list[str], str]]:
    """Commands of the guide in their order, and what each prints."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        command, _, printed = block.removeprefix("$ weightcast ").partition("\n")
        found.append((shlex.split(command), printed))
    return found


def shape(text: str) -> list[str]:
    """Lines without sizes, which another zlib may change by a few bytes."""
    return [re.sub(r" +", " ", re.sub(r"[\d.,]+ [kM]?B\b", "SIZE", line)).strip() for line in text.splitlines()]


def test_commands_of_the_guide_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "masters", recorded(MASTERS))
    publish(tmp_path / "direct", recorded(DIRECT))
    commands = sessions()
    assert len(commands) == 3
    for command, shown in commands:
        done = run(*command)
        assert done.code == 0, done.err
        printed, parts = shape(done.out), [shape(part) for part in shown.split("…\n")]
        if len(parts) == 1 and "-o" not in command:  # the guide shows where it begins
            printed = printed[: len(parts[0])]
        if len(parts) == 2:
            printed = printed[: len(parts[0])] + printed[-len(parts[1]) :]
        assert printed == [line for part in parts for line in part], command
    assert (tmp_path / "page.html").exists()
