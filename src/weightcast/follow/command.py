"""Running a shell command for a version of a mirror: for `pull --exec`, and for engines that reload a folder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from weightcast.channel.keys import Position


def run_command(
    text: str,
    folder: Path,
    position: Position,
    step: int | None,
    *,
    stdout: int | None = None,
    starting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run a command in the shell with the version in its environment; its exit code.

    It has a session of its own, so that a signal to us reaches it through us, and it is waited for. No file of ours is
    open in it but standard error and output, or the descriptor ``stdout`` in its place. ``starting`` is around its
    start: a signal right after the fork would leave a child that is never waited for.
    """
    values = {
        "WEIGHTCAST_VERSION": str(position.version),
        "WEIGHTCAST_STEP": "" if step is None else str(step),
        "WEIGHTCAST_FOLDER": str(folder.absolute()),
        "WEIGHTCAST_DIGEST": position.digest,
    }
    child = None
    try:
        with starting():
            child = subprocess.Popen(
                text,
                shell=True,
                env=os.environ | values,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                start_new_session=True,
            )
        code = child.wait()
    except KeyboardInterrupt:
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
        raise
    return code if code >= 0 else 128 - code
