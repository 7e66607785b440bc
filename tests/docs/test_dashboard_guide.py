"""docs/guides/dashboard.md: its commands serve and write the page of a channel."""

from __future__ import annotations

import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from cli_world import make_world
from commands import COMMAND
from guides import Page, play


def test_commands_serve_and_write_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    world, served = make_world(tmp_path / "made"), []
    Path("step-100").symlink_to(world.checkpoints[-1])

    def visit(words: list[str]) -> str:
        """Open the page that the command serves, and stop it."""
        with subprocess.Popen([*COMMAND, *words[1:]], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            with urllib.request.urlopen(child.stdout.readline().strip(), timeout=60) as answer:
                served.append(answer.read().decode())
            child.send_signal(signal.SIGINT)
        assert child.returncode == 0
        return ""

    play(Page.of("dashboard.md"), places={"s3://bucket/run-42": world.url}, instead={"weightcast dashboard": visit})
    assert len(served) == 2
    assert all("<html" in page for page in [*served, Path("run-42.html").read_text()])
