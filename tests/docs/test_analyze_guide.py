"""docs/guides/analyze.md: its commands print what it says, on the recorded training."""

from __future__ import annotations

from pathlib import Path

import pytest
from anatomies import DIRECT, MASTERS, publish
from anatomy import recorded
from guides import Page, play


def test_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "masters", recorded(MASTERS))
    publish(tmp_path / "direct", recorded(DIRECT))
    play(Page.of("analyze.md"))
    assert (tmp_path / "page.html").exists()
