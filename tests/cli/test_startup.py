"""What the command imports before it works, and a signal meanwhile: real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.cli.verbs import VERBS

SCRIPT = Path(sys.executable).with_name("weightcast")
RATES = Path(__file__).parents[2] / "docs" / "guides" / "rates" / "h200.json"
SIGNAL_ON_IMPORT = Path(__file__).parents[1] / "support" / "signal_on_import"
MOMENTS = (
    "weightcast._startup",
    "weightcast.errors",
    "typer.core",
    "weightcast.format.workers",
    "weightcast.cli.text",
    "weightcast.cli.console",
)
"""Modules in the order in which the command imports them."""

HEAVY = {"numpy", "numba", "torch", "obstore", "huggingface_hub", "ssl", "rich", "pydantic"}
"""Each takes from 0.05 to several seconds to import."""

IMPORTED = re.compile(rb"import time: +\S+ \| +\S+ \| *(\S+)\n")


def imported_by(*command: str | Path) -> set[str]:
    """The modules that a command which succeeds imports."""
    told = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, capture_output=True, env=told, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name.decode() for name in IMPORTED.findall(done.stderr)}


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("channel")
    weights = wc.Arrays({"w": np.zeros(100, np.float32)})
    wc.init(url, weights)
    with wc.Publisher(url, weights) as publisher:
        weights.read("w")[7] = 1
        publisher.publish(step=1)
    return url


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("log", "URL"),
        ("log", "URL", "--json"),
        ("status", "URL"),
        ("plan", "URL", "--from", "nothing"),
        ("plan", "URL", "--from", "0"),
        ("pull", "--help"),
        ("estimate", "7B", "--rates", "RATES"),
    ],
    ids=" ".join,
)
def test_quick_verb_imports_nothing_heavy(channel: Path, arguments: tuple[str, ...]) -> None:
    places = {"URL": str(channel), "RATES": str(RATES)}
    named = [places.get(argument, argument) for argument in arguments]
    imported = imported_by(sys.executable, "-m", "weightcast", *named)
    assert "weightcast.cli.console" in imported
    assert not imported & (HEAVY - {"numpy", "numba"} if arguments[0] == "pull" else HEAVY)


def test_help_imports_no_verb() -> None:
    imported = imported_by(sys.executable, "-m", "weightcast", "--help")
    assert not {f"weightcast.cli.{name.replace('-', '_')}" for name in VERBS} & imported


def test_library_import_is_nearly_free() -> None:
    imported = imported_by(sys.executable, "-c", "import weightcast; weightcast.__version__")
    assert not imported & (HEAVY | {"typer", "logging", "weightcast.format.spec", "weightcast.store"})


def signalled(command: list[str | Path], moment: str, number: int) -> tuple[int, bytes, bytes]:
    """Run a command that signals itself when it has imported a module; its exit code and what it printed."""
    path = os.pathsep.join(filter(None, [str(SIGNAL_ON_IMPORT), os.environ.get("PYTHONPATH")]))
    told = {"PYTHONPATH": path, "SIGNAL_MOMENT": moment, "SIGNAL_NUMBER": str(int(number))}
    done = subprocess.run(command, capture_output=True, env=os.environ | told, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_the_command_starts_is_quiet(moment: str) -> None:
    assert signalled([SCRIPT, "--version"], moment, signal.SIGINT) == (130, b"", b"")


@pytest.mark.parametrize("moment", MOMENTS[1::3])
def test_ctrl_c_while_a_verb_starts_as_a_module_is_quiet(moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightcast", "log", tmp_path]
    assert signalled(command, moment, signal.SIGINT) == (130, b"", b"")


def test_termination_while_the_command_starts_is_quiet() -> None:
    assert signalled([SCRIPT, "log", "nowhere"], "typer.core", signal.SIGTERM) == (143, b"", b"")


def test_program_that_imports_the_library_keeps_its_own_signals() -> None:
    code = (
        "import signal, sys; before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
        "import weightcast\n"
        "assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_completing_the_name_of_a_verb_imports_no_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_WEIGHTCAST_COMPLETE", "complete_bash"), ("COMP_WORDS", "weightcast p"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    imported = imported_by(SCRIPT)
    assert not imported & (HEAVY | {f"weightcast.cli.{name.replace('-', '_')}" for name in VERBS})
