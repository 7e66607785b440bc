"""safetensors files as a container: bounded reading of headers, bytes on request (SPEC 5.1)."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from weightcast.errors import CheckpointError, FormatError, WeightcastError, about
from weightcast.format.closing import Closing
from weightcast.format.json import parse_json
from weightcast.format.spec import MAX_ELEMENTS, MAX_RANK, dtype_named

MAX_HEADER = 100_000_000
"""The limit that safetensors' own readers have."""


class Source(Protocol):
    """Bytes that can be read from any offset."""

    name: str
    size: int

    def read_into(self, out: memoryview, at: int) -> None:
        """Fill ``out`` from byte ``at`` on; `FormatError` if there are not that many."""
        ...


class BytesSource:
    def __init__(self, data: bytes | memoryview, name: str = "patch"):
        self._data = memoryview(data).cast("B")
        self.name, self.size = name, len(self._data)

    def read_into(self, out: memoryview, at: int) -> None:
        if at + len(out) > self.size:
            raise FormatError("the data ends too early", file=self.name)
        out[:] = self._data[at : at + len(out)]


class FileSource(Closing):
    """A regular file; symbolic links are refused. One that is opened for writing is locked."""

    def __init__(self, path: Path, *, writable: bool = False):
        self.name = str(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.fd = os.open(path, flags)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # of the process or the system: nothing is wrong with it
                raise
            raise _cannot_open(path, error) from error
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.fd)
            folder = "It is a folder. In `apply PATCH TARGET` the patch comes first."
            hint = folder if stat.S_ISDIR(status.st_mode) else None
            raise CheckpointError("not a regular file", file=self.name, hint=hint)
        self.size = status.st_size
        if writable:
            self._lock()

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            hint = "Wait until it has finished and try again."
            raise CheckpointError("another process is writing this file", file=self.name, hint=hint) from None

    def read_into(self, out: memoryview, at: int) -> None:
        done = 0
        while done < len(out):
            got = os.preadv(self.fd, [out[done:]], at + done)
            if got == 0:
                raise FormatError("the file ends too early", file=self.name, hint="Copy or download it again.")
            done += got

    def write_from(self, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], at + done)

    def sync(self) -> None:
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class ReopenedSource:
    """A regular file that is open only while it is read: any number of them fits into a process's limit."""

    def __init__(self, path: Path):
        self._path = path
        with FileSource(path) as file:
            self.name, self.size, self._status = file.name, file.size, os.fstat(file.fd)

    def read_into(self, out: memoryview, at: int) -> None:
        with FileSource(self._path) as file:
            if file.size != self.size or not os.path.samestat(os.fstat(file.fd), self._status):
                raise FormatError("the file was replaced while it was read", file=self.name)
            file.read_into(out, at)


def _cannot_open(path: Path, error: OSError) -> WeightcastError:
    if error.errno == errno.ELOOP:
        hint = "Links are not followed: copy the files themselves, as `cp -rL` does."
        return CheckpointError("expected a file, found a symbolic link", file=str(path), hint=hint)
    hints = {errno.ENOENT: "Check the path.", errno.ENOTDIR: "Check the path.", errno.EACCES: "Check its permissions."}
    return CheckpointError(f"cannot open: {error.strerror}", file=str(path), hint=hints.get(error.errno or 0))


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: bytes ``begin..end`` after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


S = TypeVar("S", bound=Source)


@dataclass(frozen=True)
class Container(Generic[S]):
    """An open safetensors file with a checked header: entries cover the data without holes or overlaps."""

    source: S
    metadata: dict[str, str]
    entries: dict[str, Entry]
    data_start: int

    def read(self, entry: Entry) -> npt.NDArray[np.uint8]:
        """An entry's bytes, in memory of their own."""
        out = np.empty(entry.end - entry.begin, np.uint8)
        self.source.read_into(out.data, self.data_start + entry.begin)
        return out


def open_container(source: S) -> Container[S]:
    """Read and check a header; `FormatError` says what is wrong with it."""
    with about(file=source.name):
        return _open(source)


def _open(source: S) -> Container[S]:
    if source.size < 8:
        raise FormatError("too short for a safetensors file")
    prefix = np.empty(8, np.uint8)
    source.read_into(prefix.data, 0)
    length = int(prefix.view("<u8")[0])
    if (length > MAX_HEADER or 8 + length > source.size) and not _opens_a_header(source):
        hint = "Name a .safetensors file. If it is one, its first bytes are damaged: copy or download it again."
        raise FormatError("not a safetensors file", hint=hint)
    if length > MAX_HEADER:
        raise FormatError(f"the header is {length} bytes long, over the limit of {MAX_HEADER}")
    if 8 + length > source.size:
        raise FormatError("the file ends within its header", hint="Copy or download it again.")
    raw = np.empty(length, np.uint8)
    source.read_into(raw.data, 8)
    header = parse_json(raw.tobytes(), "header")
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("__metadata__ is not a map of strings")
    entries = {name: _entry(name, fields) for name, fields in header.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise FormatError("entries overlap or leave a hole", tensor=entry.name)
        end = entry.end
    if 8 + length + end != source.size:
        raise FormatError(
            f"the file has {source.size - 8 - length} bytes of data, its header describes {end}",
            hint="Copy or download it again.",
        )
    return Container(source, metadata, entries, 8 + length)


def _opens_a_header(source: Source) -> bool:
    """Whether a JSON object follows the length, as in every safetensors file; a file that ends there may have been one.

    The first eight bytes of any other file are read as a length too, usually an absurd one that would not help anybody.
    """
    if source.size == 8:
        return True
    first = np.empty(1, np.uint8)
    source.read_into(first.data, 8)
    return first.tobytes() == b"{"


def _entry(name: str, fields: Any) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError("a header entry must have exactly dtype, shape and data_offsets", tensor=name)
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _naturals(shape) or len(shape) > MAX_RANK or math.prod(shape) > MAX_ELEMENTS:
        raise FormatError("impossible shape", tensor=name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError("impossible data_offsets", tensor=name)
    with about(tensor=name):
        bits = math.prod(shape) * dtype_named(fields["dtype"]).per_value
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise FormatError("dtype, shape and offsets do not agree", tensor=name)
    return Entry(name, fields["dtype"], tuple(shape), *offsets)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def header_bytes(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """The bytes before the data: the same for the same input, padded so that the data is aligned."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
