"""A signal while the command starts: real processes, stopped at named moments of their imports."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("weightcast")
MOMENTS = (
    "weightcast._startup",
    "numpy",
    "llvmlite.binding",
    "numba.core.event",
    "weightcast.format.kernels.compile",
    "weightcast.store",
    "rich.console",
    "weightcast.cli.console",
)
"""Modules in the order in which the command imports them."""

IMPORTED = re.compile(rb"import time: +\S+ \| +\S+ \| *(\S+)\n")


def signalled(command: list[str | Path], moment: str, number: int) -> tuple[int, bytes, list[bytes]]:
    """Run a command until it has imported a module, and send it a signal; its exit code and what it printed.

    Python tells of every import on standard error. That pipe is made small, and not read behind the moment until the
    signal is sent: the process cannot have gone far.
    """
    told = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=told) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        fcntl.fcntl(child.stderr, fcntl.F_SETPIPE_SZ, 4096)
        line, kept = b"", []
        while True:
            byte = child.stderr.read(1)
            assert byte, f"{moment} was never imported"
            line += byte
            if byte == b"\n":
                found = IMPORTED.fullmatch(line)
                if found and found[1].decode() == moment:
                    break
                kept.append(line)
                line = b""
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
        lines = kept + err.splitlines(keepends=True)
        # The line that the signal interrupted may be incomplete.
        return child.returncode, out, [text for text in lines if not text.startswith(b"import time")][:20]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_the_command_starts_is_quiet(moment: str) -> None:
    code, out, said = signalled([SCRIPT, "--version"], moment, signal.SIGINT)
    assert (code, out) == (130, b"")
    assert not [line for line in said if b"Traceback" in line or b"KeyboardInterrupt" in line], said


@pytest.mark.parametrize("moment", MOMENTS[1::3])
def test_and_as_a_module_with_a_verb(moment: str, tmp_path: Path) -> None:
    code, out, said = signalled([sys.executable, "-m", "weightcast", "log", tmp_path], moment, signal.SIGINT)
    assert (code, out) == (130, b"")
    assert not [line for line in said if b"Traceback" in line or b"KeyboardInterrupt" in line], said


def test_termination_is_quiet_too() -> None:
    code, out, _ = signalled([SCRIPT, "log", "nowhere"], "numpy", signal.SIGTERM)
    assert (code, out) == (143, b"")


def test_a_program_that_imports_the_library_keeps_its_own_signals() -> None:
    code = (
        "import signal, sys; before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
        "import weightcast\n"
        "assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
