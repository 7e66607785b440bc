"""Ctrl-C while the command starts ends it at once and without a traceback.

Imports take from a tenth of a second to a second before `main` can install its signal handlers. Until then Python would
print a traceback from somewhere inside them. So the package's first import is this module, which does nothing in
processes other than the command.
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
