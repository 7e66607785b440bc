"""What is printed: text from outside is shown, and does nothing to the terminal, whichever verb prints it."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.keys import manifest_key
from weightcast.cli import app
from weightcast.cli.console import code_of, fields_of, say, warn
from weightcast.cli.heat import heat_of
from weightcast.cli.progress import Bars
from weightcast.cli.text import Column, Table, Text, cells, printed
from weightcast.cli.verbs import VERBS
from weightcast.cli.wording import moment, one_line, span
from weightcast.disk.apply import write_patch
from weightcast.disk.checkpoint import save
from weightcast.estimate.rates import CODECS, PHASES, Rates, Work, dump
from weightcast.format.spec import TensorSpec, TensorTable

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J"
HOSTILE = f"w{TITLE}{CLEAR}\r\n\t\x9b31m\u202e\u200b\u2066\x85\u2028\x7f"
LAYER = f"model{CLEAR}.layers.0.q{TITLE}_proj\u202e.weight"
NAMES = (HOSTILE, LAYER, f"tower{CLEAR}.blocks.1.k\x9b.weight", "plain")


def is_harmless(text: str) -> bool:
    """Whether a terminal shows all of it and obeys none of it."""
    return all(character == "\n" or character.isprintable() for character in text)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# -- one line ----------------------------------------------------------------------------------------------------------


def test_every_character_is_printable_or_spelled_out() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        shown = one_line(character)
        assert shown.isprintable()
        assert shown == character or shown.startswith("\\")
    assert one_line("model.layers.0 [bold] äöü 模型 😀 \\n") == "model.layers.0 [bold] äöü 模型 😀 \\n"


@pytest.mark.parametrize(
    "character", ["\x1b", "\x9b", "\x00", "\n", "\r", "\x7f", "\u202e", "\u200b", "\u2066", "\ufeff"]
)
def test_terminal_control_characters_are_spelled_out(character: str) -> None:
    assert one_line(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"


@pytest.mark.parametrize("character", ["\u3164", "\u115f", "\u034f", "\ufe0f", "\udc80"])
def test_invisible_characters_are_spelled_out(character: str) -> None:
    assert one_line(character).startswith("\\")


# -- texts and tables --------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


def grid() -> Table:
    table = Table(HOSTILE, Column(HOSTILE, left=True, shortest=1))
    table.add(HOSTILE, Text(HOSTILE, "red"))
    return table


@pytest.mark.parametrize(
    "made",
    [
        lambda: HOSTILE,
        lambda: Text(HOSTILE),
        lambda: Text.assemble((HOSTILE, "red")),
        lambda: Text().append(HOSTILE),
        grid,
    ],
)
def test_nothing_printed_acts_on_the_terminal(made: Callable[[], str | Text | Table], screen: Screen) -> None:
    plain = printed(made(), io.StringIO())
    assert is_harmless(plain)
    assert r"\x1b]0;owned" in plain
    coloured = printed(made(), screen)
    assert is_harmless(re.sub("\x1b" + r"\[[0-9;]*m", "", coloured))


def test_styles_are_for_terminals_only(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text.assemble(("error:", "bold red"), " no")
    assert printed(text, screen) == "\x1b[1;31merror:\x1b[0m no"
    assert printed(text, io.StringIO()) == "error: no"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(text, screen) == "error: no"


def test_columns_are_as_wide_as_what_is_shown() -> None:
    table = Table(Column("name", left=True), "size")
    table.add("\x1b\x1b", "1")
    table.add("模型", Text("20", "red"))
    assert table.lines(colours=False) == ["name      size", r"\x1b\x1b     1", "模型        20"]
    assert {cells(line) for line in table.lines(colours=False)} == {14}


def test_only_columns_that_shrink_are_cut() -> None:
    table = Table("", Column(shortest=1), "", header=False)
    table.add("first", "a long writer's name", "last")
    assert table.lines(colours=False, width=20) == ["first  a long…  last"]
    assert table.lines(colours=False, width=3) == ["first  …  last"]
    assert table.lines(colours=False) == ["first  a long writer's name  last"]


def test_progress_bar_spells_out_control_characters(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen)
    bars = Bars(patience=0)
    bars.report(f"x{TITLE}[/]", 1, 2)
    bars.clear()
    assert TITLE not in screen.getvalue()
    assert r"x\x1b]0;own" in screen.getvalue()


def test_say_and_warn(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    warn(HOSTILE)
    said = capsys.readouterr()
    for stream in (said.out, said.err):
        assert is_harmless(stream)
        assert stream.count("\n") == 1
        assert r"\x1b[2J\r\n\t\x9b31m\u202e" in stream


# -- every verb --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A channel and checkpoints whose tensors and folders have hostile names."""

    home: Path
    url: Path
    old: Path
    new: Path
    patch: Path


def weights(value: float) -> wc.Arrays:
    return wc.Arrays({name: np.full(64, value, np.float32) for name in NAMES})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    home = tmp_path_factory.mktemp("world") / f"home{CLEAR}\u202e"
    home.mkdir()
    old, new, patch = (home / name for name in (f"old{TITLE}", "new", "patch"))
    for folder, value in ((old, 0.0), (new, 1.0)):
        folder.mkdir()
        save(weights(value), folder)
    with wc.Checkpoint(old) as before, wc.Checkpoint(new) as after:
        write_patch(before, after, patch)
    url = home / "channel"
    wc.init(url, old)
    with wc.Publisher(url, weights(0.0), writer="w") as publisher:
        publisher.publish(1, weights(1.0))
    return World(home, url, old, new, patch)


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def damaged(world: World, tmp_path: Path) -> Path:
    """A mirror in which the tensor with the hostile name has other bits."""
    folder = tmp_path / f"mirror{CLEAR}"
    assert run("pull", world.url, folder)[0] == 0
    with wc.Checkpoint(folder, writable=True) as files:
        files.write(HOSTILE, np.full(64, 7, np.uint32))
        files.write(LAYER, np.full(64, 7, np.uint32))
    return folder


def commands(world: World, tmp_path: Path) -> Iterator[tuple[object, ...]]:
    """Every verb that prints names, paths or addresses; those that fail name what they failed at."""
    url, gone = world.url, tmp_path / f"gone{TITLE}{CLEAR}"
    yield from (("inspect", world.patch), ("inspect", gone), ("inspect", world.old / "model.safetensors"))
    yield from (("show", url, 0), ("show", url, 1), ("show", url, 1, "--tensors"), ("show", url, 99), ("log", url))
    yield from (("status", url), ("plan", url, "--from", "nothing"), ("plan", url, "--from", world.new))
    yield from (("plan", url, "--from", gone), ("digest", world.old, "--tensors"), ("digest", gone))
    yield from (("diff", world.old, world.new, "-o", tmp_path / f"p{CLEAR}"), ("diff", world.old, gone, "-o", gone))
    yield from (("apply", world.patch, world.old, "-o", tmp_path / f"a{CLEAR}"), ("apply", world.patch, gone))
    yield from (("verify", url), ("verify", url, "--deep"), ("verify", world.new, url), ("verify", gone, url))
    yield ("verify", damaged(world, tmp_path), url)
    yield from (("pin", url, 1), ("pin", url, 99), ("unpin", url, 1), ("pin", gone, 1))
    yield from (("gc", url), ("gc", url, "--dry-run"), ("gc", gone), ("squash", url), ("squash", url, "--anchor"))
    yield from (("publish", url, world.new), ("publish", url, gone), ("publish", f"s4://{CLEAR}", world.new))
    yield from (("pull", url, tmp_path / f"r{CLEAR}"), ("pull", gone, tmp_path / "x"), ("pull", url, world.patch))
    yield from (("init", tmp_path / f"c{CLEAR}", world.old), ("init", tmp_path / "d", gone), ("init", url, world.old))
    yield from (("attach", url, "--engine", f"http://127.0.0.1:1/{CLEAR}", "--once"), ("reset", url), ("reset", gone))
    yield ("verify", url, "--engine", "http://127.0.0.1:1")
    yield from (("tag", url, 1, f"t{CLEAR}"), ("tag", url, 1, "release"), ("tag", url), ("tag", gone))
    yield from (("compare", url, 0, 1), ("compare", url, 0, 99), ("compare", gone, 0, 1), ("cache",))
    pair, page = (world.old, world.new), tmp_path / f"page{CLEAR}"
    yield from (("analyze", url), ("analyze", *pair), ("analyze", gone), ("analyze", *pair, "-o", page))
    yield from (("repair", url), ("repair", gone), ("forget", url, f"r{CLEAR}"), ("forget", gone, "r"))
    yield from (("copy", url, tmp_path / f"copy{CLEAR}"), ("copy", gone, tmp_path / "y"), ("copy", url, url))
    history, key = tmp_path / f"run{TITLE}{CLEAR}", tmp_path / f"key{CLEAR}"
    shutil.copytree(world.new, history / "checkpoint-1")
    yield from (("import", tmp_path / f"i{CLEAR}", history), ("import", url, gone), ("import", url, history))
    yield from (("export", url, tmp_path / f"e{CLEAR}"), ("export", gone, gone), ("export", url, gone, "--step", 99))
    yield from (("key", "new", key), ("key", "show", key), ("key", "show", gone), ("key", "new", key))
    yield from (("key", "show", url, "--trust", f"{key}.pub"), ("pull", url, tmp_path / "z", "--trust", CLEAR))
    yield ("key", "add", url, CLEAR, "--role", "writer", "--sign", key)
    yield from (("estimate", CLEAR, "--rates", gone), ("estimate", "1M", "--rates", gone))
    yield ("estimate", "1M", "--rates", hostile_rates(tmp_path))
    yield from (("report", url, "-o", tmp_path / f"page{CLEAR}"), ("report", gone, "-o", gone), ("dashboard", gone))
    yield from (("dashboard", url, "--listen", f"{TITLE}:1"), ("dashboard", url, "--events", gone))


def hostile_rates(folder: Path) -> Path:
    """A file of rates of a machine with a hostile name."""
    path = folder / "rates.json"
    works = dict.fromkeys(PHASES, Work())
    path.write_text(dump(Rates(HOSTILE, 1, dict.fromkeys(CODECS, works), 0.0, 0.0, 0.0, 0.0)))
    return path


def test_no_verb_lets_text_from_outside_act_on_the_terminal(world: World, tmp_path: Path) -> None:
    seen, spelled = set(), 0
    for command in commands(world, tmp_path):
        _, out, err = run(*command)
        assert is_harmless(out), command
        assert is_harmless(err), command
        assert out or err, command
        seen.add(command[0])
        spelled += r"\x1b" in out + err
    assert VERBS.keys() - seen <= {"warm-up"}, "a new verb: feed it, too"
    assert spelled > 25, "the hostile names were shown"


def test_json_holds_the_names_exactly(world: World) -> None:
    for command in (("inspect", world.patch, "--json"), ("show", world.url, 1, "--json")):
        _, out, _ = run(*command)
        assert is_harmless(out)
        assert {row["name"] for row in json.loads(out)["tensors"]} == set(NAMES)


def test_hostile_names_do_not_act_on_a_terminal(world: World) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weightcast", "inspect", world.patch]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as child:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            said += part
        assert child.wait(60) == 0
    os.close(ours)
    assert b"\x1b[" in said, "it is styled"
    assert TITLE.encode() not in said
    assert CLEAR.encode() not in said
    assert rb"\x1b]0;owned" in said


def test_answers_of_an_engine_are_printed_as_text(tmp_path: Path, world: World) -> None:
    class Rude(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error": {"message": HOSTILE}, "detail": HOSTILE}).encode()
            self.send_response(500, "no")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the base class's way of naming

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Rude)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        code, out, err = run("verify", world.url, "--engine", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert code != 0
    assert err
    assert is_harmless(out)
    assert is_harmless(err)


def test_logged_messages_are_made_visible(tmp_path: Path) -> None:
    """A library's warnings reach standard error where nobody set up logging."""
    script = f"""
import logging, sys
from weightcast.cli import app, main
@app.command()
def shout():
    logging.getLogger("anything").warning({HOSTILE!r})
sys.argv = ["weightcast", "shout"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.startswith("warning: w\\x1b]0;owned")
    assert is_harmless(done.stderr)


# -- times and sizes ---------------------------------------------------------------------------------------------------


def test_any_time_can_be_shown() -> None:
    assert moment(0) == "1970-01-01 00:00:00 UTC"
    assert moment(1.8e9) == "2027-01-15 08:00:00 UTC"
    assert [moment(when) for when in (9e11, 1e300, -1e18)] == [
        "900000000000 s since 1970",
        "1e+300 s since 1970",
        "-1e+18 s since 1970",
    ]
    assert [moment(when) for when in (float("nan"), float("inf"))] == ["nan s since 1970", "inf s since 1970"]
    assert [span(age) for age in (-1e12, float("nan"), 1e12)] == ["0.0 s", "0.0 s", "11,574,074 d"]


@pytest.mark.parametrize("when", [253402300800.0, 999_999_999_999.0])
def test_commit_in_the_far_future_is_shown(world: World, tmp_path: Path, when: float) -> None:
    """Such a time is refused when a record is read, or shown: never a crash."""
    url = Path(shutil.copytree(world.url, tmp_path / "channel"))
    commit = url / manifest_key(1)
    fields = json.loads(commit.read_text())
    commit.write_text(json.dumps(fields | {"time": when}, separators=(",", ":"), sort_keys=True))
    for verb in (("show", url, 1), ("log", url), ("status", url)):
        code, out, err = run(*verb)
        assert code in (0, 4), (verb, err)
        assert out or err


def test_names_that_make_an_empty_grid_are_listed() -> None:
    """A table of 3,000 tensors could ask for a grid of nine million places."""
    table = TensorTable.of(TensorSpec(f"m.{i}.k{i}", "F32", (1,)) for i in range(3000))
    heat = heat_of(table, {"m.7.k7": 1})
    assert heat.stacks == ()
    assert (len(heat.others), heat.others["m.7.k7"].changed) == (3000, 1)


# -- errors of the system ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOENT])
def test_system_error_has_a_remedy(number: int) -> None:
    fields = fields_of(OSError(number, os.strerror(number), "/some/where"))
    assert fields["hint"].endswith(".")
    assert fields["text"].endswith(f"(file /some/where). {fields['hint']}")
    assert code_of(OSError(number, "")) == (11 if number == errno.ENOSPC else 1)
