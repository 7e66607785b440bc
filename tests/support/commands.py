"""The command line, run in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "weightcast")


SCRIPT = Path(sys.executable).with_name("weightcast")


@dataclass(frozen=True)
class Done:
    """A finished process."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        assert self.code == 0, self.err
        return one_object(self.out)

    @property
    def error(self) -> dict[str, str]:
        """The fields of an error, which is the one JSON object on standard output."""
        found = one_object(self.out)
        assert found.keys() == {"error"}
        assert {"kind", "text"} <= found["error"].keys()
        return found["error"]

    @property
    def complaint(self) -> str:
        """The one line on standard error, standard output being empty."""
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        return self.err


def one_object(text: str) -> dict[str, Any]:
    assert text.count("\n") == 1
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def weightcast(*arguments: str | Path) -> Done:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def at_once(*commands: Sequence[str | Path]) -> list[Done]:
    """Several processes that do not write to the same place: most of a process is starting Python."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda command: weightcast(*command), commands))
