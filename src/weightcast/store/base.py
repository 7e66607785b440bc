"""The protocol of a bucket: an address and five methods, which every kind of store has, and two optional groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from weightcast.errors import UsageError

Data = bytes | memoryview | Path
"""The content of an object: bytes, or a file, which is streamed."""


@dataclass(frozen=True)
class Listed:
    """An object as a listing shows it; ``modified`` is in seconds since 1970 by the store's own clock."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """A bucket, or a folder of one. Keys are relative to it: parts joined by `/` (`is_key`).

    An object appears whole or not at all. Errors are `WeightcastError`s: `MissingError` where a key is not there,
    `UnreachableError` if another attempt may succeed, `AccessError` for credentials and permissions.
    """

    @property
    def url(self) -> str:
        """The address, for messages; without secrets."""
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The object's bytes from ``start`` on, at most ``length`` of them; fewer where the object ends earlier."""
        ...

    def put(self, key: str, data: Data) -> None:
        """Write an object, replacing one that is there. It is durable when this returns."""
        ...

    def create(self, key: str, data: Data) -> bool:
        """Write an object, durably, unless there is one of that name: False, and nothing changed, if there is."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys begin with ``prefix`` and sort after ``after``, in the order of their keys' bytes."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        ...


Stored = Callable[[str], None]


@runtime_checkable
class Batching(Protocol):
    """A store that writes or deletes many objects with few requests."""

    def put_all(self, objects: Mapping[str, Data], stored: Stored) -> None:
        """`put` for each of ``objects``, in any order; ``stored`` is called with the key of each that is durable."""
        ...

    def delete_all(self, keys: Collection[str]) -> None:
        """`delete` for each of ``keys``, in any order."""
        ...


def put_all(store: Store, objects: Mapping[str, Data], stored: Stored = lambda key: None) -> None:
    """`put` each of ``objects``, with as few requests as the store allows."""
    if isinstance(store, Batching):
        store.put_all(objects, stored)
        return
    for key, data in objects.items():
        store.put(key, data)
        stored(key)


def delete_all(store: Store, keys: Collection[str]) -> None:
    """`delete` each of ``keys``, with as few requests as the store allows."""
    if isinstance(store, Batching):
        store.delete_all(keys)
        return
    for key in keys:
        store.delete(key)


@runtime_checkable
class Littered(Protocol):
    """A store in which an upload that was interrupted leaves bytes that `Store.list` does not show."""

    def debris(self) -> Iterator[Listed]:
        """Unfinished uploads, in any order; ``modified`` is when bytes were last added, by the store's own clock.

        Running uploads are among them: only ``modified`` distinguishes them from abandoned ones.
        """
        ...

    def discard_debris(self, keys: Collection[str]) -> None:
        """Remove these unfinished uploads, by the keys that `debris` gave; one that is gone is no error."""
        ...


def debris(store: Store) -> list[Listed]:
    """The store's unfinished uploads, running ones included; empty for a store that keeps none or cannot list them."""
    return list(store.debris()) if isinstance(store, Littered) else []


def discard_debris(store: Store, keys: Collection[str]) -> None:
    """Remove unfinished uploads that `debris` listed. A running one fails, with an error that says why."""
    if isinstance(store, Littered):
        store.discard_debris(keys)


_MAX_PART, _MAX_KEY = 255, 900
"""Bytes: the limit of file systems, and what a folder of a bucket leaves of S3's 1024."""


def is_key(key: str) -> bool:
    """Whether every kind of store can hold an object of that name."""
    return all(map(_is_part, key.split("/"))) and len(key.encode()) <= _MAX_KEY


def _is_part(part: str) -> bool:
    return part.isprintable() and "\\" not in part and part[:1] not in ("", ".") and len(part.encode()) <= _MAX_PART


def check_key(key: str) -> str:
    """The key, if it is one; `UsageError` otherwise."""
    if not is_key(key):
        hint = "A key is made of parts joined by `/`; none is empty, begins with a dot, or has control characters."
        raise UsageError(f"not the key of an object: {key[:100]!r}", hint=hint)
    return key


def check_prefix(prefix: str, after: str = "") -> str:
    """The prefix, if a key can begin with it, and with ``after``; `UsageError` otherwise."""
    for beginning in (prefix, after):
        if not is_key(beginning) and not is_key(beginning + "_"):
            raise UsageError(f"not the beginning of a key: {beginning[:100]!r}", hint="List by the beginning of a key.")
    return prefix


_MAX_RANGE = (1 << 63) - 1
"""The largest offset of a file."""


def check_range(start: int, length: int | None) -> None:
    """`UsageError` unless the range counts from the beginning, and no further than an object can be long."""
    if not 0 <= start <= _MAX_RANGE or not 0 <= (length or 0) <= _MAX_RANGE:
        hint = "Start and length are at least 0 and below 2^63."
        raise UsageError(f"not a range of bytes: {start} and {length} from there", hint=hint)


def open_data(path: Path) -> BinaryIO:
    """The file to upload, open for reading; `UsageError` if it cannot be read."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise UsageError(f"cannot read the file to store: {error.strerror}", file=str(path)) from error


def size_of(data: Data) -> int:
    """How many bytes there are to store."""
    if not isinstance(data, Path):
        return memoryview(data).nbytes
    with open_data(data) as file:
        return file.seek(0, 2)
