"""An engine behind a shell command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.errors import EngineError
from weightcast.follow.command import run_command


class CommandEngine:
    """Runs a command in the shell for each version: it has loaded the folder when it ends with exit code 0.

    The command gets ``WEIGHTCAST_FOLDER``, ``_VERSION``, ``_STEP`` and ``_DIGEST``. It is not asked which version the
    engine serves, so a restart of the engine behind it goes unnoticed.
    """

    def __init__(
        self,
        command: str,
        *,
        stdout: int | None = None,
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """The command writes to the descriptor ``stdout``, in place of ours; ``starting`` is around its start."""
        self.url = command
        self._stdout, self._starting = stdout, starting

    def version(self) -> None:
        """It cannot say."""

    def load(self, folder: Path, position: Position, step: int | None) -> None:
        code = run_command(self.url, folder, position, step, stdout=self._stdout, starting=self._starting)
        if code:
            hint = "It runs again for this version, or for a newer one."
            raise EngineError(f"the command ended with exit code {code}", url=self.url, hint=hint)
