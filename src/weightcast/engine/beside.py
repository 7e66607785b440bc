"""A mirror that follows beside an engine: what is live does not wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.errors import WeightcastError
from weightcast.follow.subscriber import Subscriber


class Beside:
    """Lets the subscriber of a mirror sync on a thread. Whoever uses the subscriber otherwise calls `wait` before."""

    def __init__(self, subscriber: Subscriber, objects: Path):
        """``objects`` is where the engine's objects are: the mirror need not fetch them again."""
        self._subscriber, self._objects = subscriber, objects
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def begin(self) -> None:
        """Sync once, unless that is going on."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._sync, name="weightcast-mirror", daemon=True)
        self._thread.start()

    def _sync(self) -> None:
        try:
            self._subscriber.mirror.beside = self._objects
            self._subscriber.sync()
        except BaseException as error:  # noqa: BLE001 -- raised, or returned, by the agent's thread
            self._failed = error

    def wait(self) -> WeightcastError | None:
        """Wait until no sync is going on; the error of the last one, if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.take_error()

    def take_error(self) -> WeightcastError | None:
        """The error of the last sync, once; one that is not ours is raised."""
        failed, self._failed = self._failed, None
        if failed is not None and not isinstance(failed, WeightcastError):
            raise failed
        return failed

    def is_at(self, position: Position | None) -> bool:
        """Whether the mirror holds that version, and no sync is going on."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and self._subscriber.position == position
