"""Ctrl-C while the command starts ends it at once, and quietly.

The command's imports take a second, most of it numba's, before `main` can say what a signal does. Until then Python
would show a traceback from somewhere inside them. So the package's first import is this module, which touches nothing
in any other process than the command.
"""

import os
import signal
import sys
from types import FrameType


def _is_command() -> bool:
    """Whether this process is `weightcast …` or `python -m weightcast …`."""
    if sys.argv[:1] == ["-m"]:  # what Python puts there until it has found the module to run
        at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else -1
        return sys.orig_argv[at + 1 : at + 2] == ["weightcast"]
    return bool(sys.argv) and sys.argv[0].rpartition("/")[2] == "weightcast"


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if _is_command():
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _leave)
