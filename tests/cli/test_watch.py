"""`status --watch`: a view in a real terminal, and lines elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from cli_world import USAGE, World, ended, run
from commands import COMMAND

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import delete_heartbeat, put_heartbeat
from weightcast.channel.records import Heartbeat
from weightcast.store import open_store


def report(world: World, version: int, name: str = "rack-7", **more: Any) -> None:
    chain = Chain.open(open_store(world.url))
    put_heartbeat(chain, Heartbeat(name, chain.manifest(version).position, time.time(), **more))


def publish(world: World) -> None:
    folder = world.url.parent / "keeper"
    assert run("publish", world.url, world.checkpoints[10], "--step", 100, "--mirror", folder).code == 0


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *arguments: str | Path):
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            os.environ.update(COLUMNS="120", LINES="30", TERM="xterm")
            os.execv(sys.executable, [*COMMAND, *map(str, arguments)])
        self.raw = ""

    def draws(self, text: str) -> None:
        """Read until that is drawn."""
        seen = len(self.raw)
        while text not in plain(self.raw[seen:]):
            some = os.read(self._terminal, 1 << 16)
            self.raw += some.decode()

    def press_ctrl_c(self) -> int:
        """As a person does it; the exit code."""
        os.write(self._terminal, b"\x03")
        return self.end()

    def end(self) -> int:
        while True:
            try:
                self.raw += os.read(self._terminal, 1 << 16).decode()
            except OSError:
                break
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_view_follows_the_channel_and_ends_with_ctrl_c(world: World) -> None:
    report(world, 8, pause=0.0049, seconds={"fetch": 0.25, "apply": 0.002})
    terminal = Terminal("status", world.url, "--watch", "--every", "0.1")
    terminal.draws("fetch 250 ms, apply 2 ms")
    first = plain(terminal.raw)
    assert "version 9, step 90" in first
    assert re.search(r"writer +\S+, began", first)
    assert re.search(r"rack-7 +8 +1 +5 ms", first), first
    publish(world)
    terminal.draws("version 10, step 100")
    report(world, 10, pause=0.001, error="the disk\u3164is [blink]full[/]")
    terminal.draws("the disk\\u3164is [blink]full[/]")  # no markup of rich's
    assert re.search(r"rack-7 +10 +0 +1 ms", plain(terminal.raw))
    assert terminal.press_ctrl_c() == 0
    assert "Traceback" not in terminal.raw
    assert terminal.raw.count("\x1b[?25l") == terminal.raw.count("\x1b[?25h") > 0, "the cursor is there again"
    acts = set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", terminal.raw)) | set(re.findall(r"\x1b([^\[])", terminal.raw))
    assert acts <= set("mAKhl"), "colours, up, clear the line, the cursor: no title, no link, no other screen"


def test_view_outlives_a_bucket_that_is_away(world: World) -> None:
    terminal = Terminal("status", world.url, "--watch", "--every", "0.1")
    terminal.draws("no replica has reported")
    world.url.rename(away := world.url.with_name("away"))
    terminal.draws("error")
    assert "version 9, step 90" in plain(terminal.raw)
    away.rename(world.url)
    report(world, 9)
    terminal.draws("rack-7")
    assert terminal.press_ctrl_c() == 0


@contextmanager
def watching(world: World, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, "status", str(world.url), "--watch", "--every", "0.1", *more]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_changes_are_lines_where_there_is_no_terminal(world: World) -> None:
    report(world, 8, pause=0.0049, seconds={"fetch": 0.25})
    with watching(world) as child:
        assert re.fullmatch(r"\d\d:\d\d:\d\d  head     version 9, step 90, .* ago\n", line(child.stdout))
        assert "  writer   " in line(child.stdout)
        found = line(child.stdout)
        assert found[10:] == "replica  rack-7  version 8, 1 version behind  paused 5 ms  fetch 250 ms\n"
        publish(world)
        assert "  head     version 10, step 100" in line(child.stdout)
        assert "  writer   " in line(child.stdout)
        report(world, 10, error="full\u3164disk")  # a character that records allow, and nobody sees
        assert line(child.stdout)[10:] == "replica  rack-7  version 10, at the head  full\\u3164disk\n"
        delete_heartbeat(Chain.open(open_store(world.url)), "rack-7")
        assert line(child.stdout)[10:] == "replica  rack-7 reports no more\n"
        done = ended(child, signal.SIGINT)
    assert (done.code, done.out, done.err) == (0, "", "")


def test_changes_are_objects_for_programs(world: World) -> None:
    with watching(world, "--json") as child:
        head, writer = (json.loads(line(child.stdout)) for _ in range(2))
        assert (head["event"], head["version"], head["step"]) == ("head", 9, 90)
        assert (writer["event"], writer["pid"] > 0) == ("writer", True)
        report(world, 9, seconds={"fetch": 0.25})
        replica = json.loads(line(child.stdout))
        assert {key: replica[key] for key in ("event", "name", "version", "lag", "pause", "seconds", "error")} == {
            "event": "replica",
            "name": "rack-7",
            "version": 9,
            "lag": 0,
            "pause": None,
            "seconds": {"fetch": 0.25},
            "error": None,
        }
        assert ended(child, signal.SIGTERM).code == 0


def test_mirror_is_refused(world: World, tmp_path: Path) -> None:
    assert run("pull", world.url, tmp_path / "mirror").code == 0
    done = run("status", tmp_path / "mirror", "--watch")
    assert done.code == USAGE
    assert "--watch is for channels" in done.complaint


def test_channel_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert run("status", tmp_path / "nothing", "--watch").code == 9


@pytest.mark.parametrize("verb", ["publish", "pull"])
def test_events_of_a_verb_are_lines_in_a_file(world: World, tmp_path: Path, verb: str) -> None:
    file = tmp_path / "events.jsonl"
    if verb == "publish":
        arguments: tuple[str | Path, ...] = (world.url, world.checkpoints[10], "--mirror", tmp_path / "keeper")
    else:
        arguments = (world.url, tmp_path / "mirror")
    assert run(verb, *arguments, "--events", file).code == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    of_trainer = [(one["phase"], one["version"]) for one in lines if one["role"] == "trainer"]
    if verb == "publish":
        assert of_trainer == [("encode", 10), ("verify", 10), ("upload", 10), ("commit", 10)]
        assert {one["version"] for one in lines if one["role"] == "mirror"} == {9}
    else:
        assert {(one["role"], one["version"]) for one in lines} == {("replica", 9)}
        assert lines[-1]["phase"] == "apply"


def test_file_of_events_that_cannot_be_is_refused_before_anything(world: World, tmp_path: Path) -> None:
    done = run("pull", world.url, tmp_path / "mirror", "--events", tmp_path / "no" / "folder")
    assert done.code == USAGE
    assert "events cannot be written there" in done.complaint
    assert not (tmp_path / "mirror").exists()
