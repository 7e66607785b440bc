"""A bucket in this process's memory: for tests, or for a trainer and an engine in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from weightcast.errors import MissingError
from weightcast.store.base import Data, Listed, check_key, check_prefix, check_range, open_data


class MemoryStore:
    """Objects in a dictionary, which live as long as the process."""

    def __init__(self, name: str = ""):
        self._name = name
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        found = self._objects.get(check_key(key))
        if found is None:
            raise MissingError("no such object", url=self.url, key=key)
        return found[0][start:] if length is None else found[0][start : start + length]

    def put(self, key: str, data: Data) -> None:
        content = _bytes_of(data)
        with self._lock:
            self._objects[check_key(key)] = content, time.time()

    def create(self, key: str, data: Data) -> bool:
        content = _bytes_of(data)
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._objects[key] = content, time.time()
            return True

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        check_prefix(prefix, after)
        with self._lock:
            found = [
                Listed(key, len(content), modified)
                for key, (content, modified) in self._objects.items()
                if key.startswith(prefix) and key > after
            ]
        return iter(sorted(found, key=lambda listed: listed.key))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)


def _bytes_of(data: Data) -> bytes:
    if isinstance(data, bytes | memoryview):
        return bytes(data)
    with open_data(data) as file:
        return file.read()


_named: dict[str, MemoryStore] = {}
_naming = threading.Lock()


def memory_named(name: str) -> MemoryStore:
    """The store of that name: one per process."""
    with _naming:
        return _named.setdefault(name, MemoryStore(name))
