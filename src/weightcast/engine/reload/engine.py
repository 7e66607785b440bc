"""What an engine must offer that can only load a folder of weights: two methods and an address."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from weightcast.channel.keys import Position


class ReloadEngine(Protocol):
    """An engine that replaces its weights by those of a folder. For one of your own, write a class with these members.

    Both methods raise `EngineError` for what the engine answers, and `EngineGoneError` if it does not answer.
    """

    @property
    def url(self) -> str:
        """The engine's address, in messages and in the mirror's record: another one is another engine."""
        ...

    def version(self) -> str | None:
        """The name of the version that the engine serves now: after a `load`, ``str(position.version)``.

        Any other name is that of an engine which has restarted, or got its weights from elsewhere: it is loaded again.
        None if the engine cannot say; then a restart goes unnoticed.
        """
        ...

    def load(self, folder: Path, position: Position, step: int | None) -> None:
        """Have the engine serve the weights in ``folder``; return once it does. The files do not change meanwhile.

        ``position`` is their version, ``step`` the trainer's if it is known. An `EngineError` says that the load has
        failed, and that the engine does not read the files any more. An `EngineGoneError` leaves open whether it still
        does: the files stay as they are, and are loaded again, until a load has ended.
        """
        ...
