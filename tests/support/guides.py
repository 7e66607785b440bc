"""A page of the documentation as something that can be run: its commands and its examples, in their order.

What a fenced block is called says what it holds. ``console``: commands after `$ `, and what each prints; a line `...`
stands for any lines. ``sh``: commands that succeed, whatever they print. ``python``: an example. Others are not run.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commands import COMMAND, Done
from typer.testing import CliRunner

from weightcast.cli import app

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs/guides"
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_GOES_ON = ("--follow", "--watch")


@dataclass(frozen=True)
class Command:
    """A command of a page, and what it prints according to the page, if that is there."""

    text: str
    shown: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


@dataclass(frozen=True)
class Page:
    """A page, or one of its sections."""

    text: str

    @classmethod
    def of(cls, path: str) -> Page:
        """A page of docs/guides, or another one of the repository."""
        return cls((GUIDES / path if (GUIDES / path).exists() else ROOT / path).read_text())

    def section(self, title: str) -> Page:
        """What is below a heading, up to the next heading of any rank but the first."""
        found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##+ |\Z)", self.text, re.MULTILINE | re.DOTALL)
        assert found is not None, f"there is no section {title}"
        return Page(found[1])

    def blocks(self, kind: str) -> list[str]:
        return [textwrap.dedent(found[3]) for found in _BLOCK.finditer(self.text) if found[2] == kind]

    @property
    def code(self) -> str:
        """What is written as commands or code: of `console` blocks without what is printed, and code in the text."""
        shown = [f"$ {command.text}" for command in self.commands]
        blocks = [
            textwrap.dedent(found[3]) for found in _BLOCK.finditer(self.text) if found[2] not in ("console", "sh")
        ]
        return "\n".join([*shown, *blocks, *re.findall(r"`([^`\n]+)`", _BLOCK.sub("", self.text))])

    @property
    def python(self) -> list[str]:
        return self.blocks("python")

    @property
    def commands(self) -> list[Command]:
        """All of them, in their order."""
        return [command for found in _BLOCK.finditer(self.text) for command in _commands(found[2], found[3])]

    def table(self, head: str) -> list[list[str]]:
        """The rows of the table whose first column has that head."""
        found = re.search(rf"^\| {re.escape(head)} \|.*\n\|[-|:]+\n((?:\|.*\n?)+)", self.text, re.MULTILINE)
        assert found is not None, f"there is no table of {head}"
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in found[1].splitlines()]


def _commands(kind: str, block: str) -> Iterator[Command]:
    block = textwrap.dedent(block).replace("\\\n", " ")
    if kind == "console":
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            text, _, shown = part.partition("\n")
            yield Command(text, shown)
    elif kind == "sh":
        yield from (Command(line, None) for line in block.splitlines() if line.partition("#")[0].strip())


def play(
    page: Page,
    *,
    places: Mapping[str, str | Path] | None = None,
    instead: Mapping[str, Callable[[list[str]], str]] | None = None,
    codes: frozenset[int] = frozenset({0}),
) -> None:
    """Run a page's commands in the current folder, and check that they print what the page shows.

    ``places`` are addresses of the page, with what stands for them here. ``instead`` has the beginnings of commands
    that are not run as they are, with what is done in their place: it gets the words and returns what is printed, or
    is `nothing`.
    A command that goes on (`--follow`) is stopped when it has printed the page's lines but one, or names a version.
    """
    assert page.commands, "there are no commands here"
    for command in page.commands:
        words = command.words
        for name, path in (places or {}).items():
            words = [word.replace(name, str(path)) for word in words]
        act = next((act for begin, act in (instead or {}).items() if command.text.startswith(begin)), None)
        done = Done(0, act(words), "") if act else _done(words, command)
        assert done.code in codes, f"{command.text}\n{done.out}{done.err}"
        printed = done.out
        for name, path in (places or {}).items():
            printed = printed.replace(str(path), name)
        if command.shown is not None and act is not nothing:
            _assert_agree(command, printed.replace(f"{Path.cwd()}/", ""), command.shown)


def nothing(words: list[str]) -> str:
    """In place of a command that needs what is not here: a network, vLLM, a GPU."""
    return ""


def _done(words: list[str], command: Command) -> Done:
    """Run a command; what it prints and complains of is one text, as on a terminal."""
    if words[0] == "weightcast" and not any(word in _GOES_ON for word in words):
        result = CliRunner().invoke(app, words[1:])  # most of a process of its own is starting Python
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Done(result.exit_code, result.output, "")
    beside = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    if words[0] == "weightcast":
        return _stopped([*COMMAND, *words[1:]], environment, command.shown)
    line = ["bash", "-c", command.text]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    return Done(done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr, "")


def _stopped(command: list[str], environment: Mapping[str, str], shown: str | None) -> Done:
    """Stop a command that goes on; done, if it then ends as on Ctrl-C."""
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=merged, text=True) as child:
        assert child.stdout is not None
        begun = ""
        for line in child.stdout:
            begun += line
            if re.search(r"version \d", line) if shown is None else begun.count("\n") >= shown.count("\n") - 1:
                break
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=60)
    return Done(0 if child.returncode in (0, 128 + signal.SIGINT) else child.returncode, begun + rest, "")


def _assert_agree(command: Command, printed: str, shown: str) -> None:
    """The command printed what the page shows, but for what differs from run to run."""
    ours, its = shape(printed), shape(shown)
    pattern = "\n".join("(?:.*\n)*?.*" if line == "..." else re.escape(line) for line in its.split("\n"))
    assert re.fullmatch(pattern, ours), f"$ {command.text}\n{ours}\n-- the page shows\n{its}"


def shape(text: str) -> str:
    """Without sizes, times, ratios of sizes, and digests."""
    text = re.sub(r"\b[0-9a-f]{12,}\b", "HEX", text)
    text = re.sub(r"\d+:\d+:\d+", "TIME", text)
    text = re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)
    text = re.sub(r"1 : [\d.]+", "N", text)
    text = re.sub(r"\d[\d.,]* ?(ms|s|min|h|B|kB|MB|GB|bytes)\b", "N", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
