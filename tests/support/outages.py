"""A clock that only passes while somebody waits, and a store that refuses what it is told to refuse."""

from __future__ import annotations

import threading

from channels import Counting

from weightcast.errors import (
    StoreError,
)
from weightcast.store.backoff import Clock
from weightcast.store.base import Data, Store


class FakeClock(Clock):
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, stopped: threading.Event, seconds: float) -> None:
        self.time += seconds


class Selective(Counting):
    """A store that answers requests for some objects with an error."""

    def __init__(self, store: Store):
        super().__init__(store)
        self.reading: dict[str, StoreError] = {}
        """By the beginning of a key."""
        self.writing: dict[str, StoreError] = {}

    @staticmethod
    def _refuse(key: str, errors: dict[str, StoreError]) -> None:
        for prefix, error in errors.items():
            if key.startswith(prefix):
                raise error

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._refuse(key, self.reading)
        return super().get(key, start, length)

    def put(self, key: str, data: Data) -> None:
        self._refuse(key, self.writing)
        super().put(key, data)
