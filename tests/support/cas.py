"""Where Xet keeps contents, as a few routes: hf_xet uploads to it, and downloads from it, over http.

hf_xet's own `local:///` would do for one process; its database belongs to whoever opens it first, and a channel has
a trainer and followers. So shards and xorbs are taken apart here, as far as answering needs it.
"""

from __future__ import annotations

import re
import struct
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

EMPTY = "0" * 64
"""The hash of a file without bytes, which is never uploaded."""

_ROW, _CHUNK = 48, 8
_END = b"\xff" * 32
_VERIFIED, _EXTENDED = 1 << 31, 1 << 30


@dataclass(frozen=True)
class _Xorb:
    """Where each chunk begins, as stored and unpacked; one more at the end."""

    stored: list[int]
    unpacked: list[int]


@dataclass(frozen=True)
class _Segment:
    """Chunks of a xorb, from ``first`` to before ``last``, which are a part of a file."""

    xorb: str
    first: int
    last: int
    nbytes: int


@dataclass
class Contents:
    """Files by the hash of what is in them, below a folder."""

    folder: Path
    _xorbs: dict[str, _Xorb] = field(default_factory=dict)
    _files: dict[str, list[_Segment]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def size(self, file: str) -> int | None:
        """Of a file; None if it was never uploaded."""
        if file == EMPTY:
            return 0
        segments = self._files.get(file)
        return None if segments is None else sum(segment.nbytes for segment in segments)

    def add_xorb(self, xorb: str, data: bytes) -> None:
        path = self.folder / f"{xorb}.{threading.get_ident()}"
        path.write_bytes(data)
        path.replace(self.folder / xorb)
        with self._lock:
            self._xorbs[xorb] = _read_xorb(data)

    def add_shard(self, data: bytes) -> None:
        with self._lock:
            for file, segments in _read_shard(data):
                self._files[file] = segments

    def read_xorb(self, xorb: str, wanted: str) -> bytes:
        """The bytes of a xorb that a Range header asks for."""
        first, last = _range_of(wanted)
        with (self.folder / xorb).open("rb") as file:
            file.seek(first)
            return file.read(-1 if last is None else last + 1 - first)

    def reconstruction(self, file: str, wanted: str | None, url: str) -> dict[str, object] | None:
        """How to put a file, or a range of it, together; None if there is no such file or range."""
        first, last = _range_of(wanted)
        size = self.size(file)
        if not size or first >= size:
            return None
        end = size if last is None else min(last + 1, size)
        skipped, at, terms = 0, 0, []
        spans: dict[str, tuple[int, int]] = {}
        for segment in self._files[file]:
            begin, at = at, at + segment.nbytes
            if begin >= end or at <= first:
                continue
            unpacked = self._xorbs[segment.xorb].unpacked
            base = unpacked[segment.first] - begin
            low = bisect_right(unpacked, max(first, begin) + base) - 1
            high = bisect_right(unpacked, min(end, at) + base - 1)
            if not terms:
                skipped = max(first, begin) + base - unpacked[low]
            nbytes = unpacked[high] - unpacked[low]
            terms.append({"hash": segment.xorb, "unpacked_length": nbytes, "range": {"start": low, "end": high}})
            before = spans.get(segment.xorb, (low, high))
            spans[segment.xorb] = min(low, before[0]), max(high, before[1])
        # One range of a xorb for all terms: of several that overlap, hf_xet takes the wrong one.
        fetch = {xorb: [self._span(xorb, *span, url)] for xorb, span in spans.items()}
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetch}

    def _span(self, xorb: str, low: int, high: int, url: str) -> dict[str, object]:
        stored = self._xorbs[xorb].stored
        there = {"start": stored[low], "end": stored[high] - 1}
        return {"range": {"start": low, "end": high}, "url": f"{url}/xorb/{xorb}", "url_range": there}


def _read_xorb(data: bytes) -> _Xorb:
    stored, unpacked, at = [0], [0], 0
    while at < len(data):
        packed, whole = (int.from_bytes(data[i : i + 3], "little") for i in (at + 1, at + 5))
        at += _CHUNK + packed
        stored.append(at)
        unpacked.append(whole)
    return _Xorb(stored, list(accumulate(unpacked)))


def _read_shard(data: bytes) -> list[tuple[str, list[_Segment]]]:
    """The files that a shard tells of; what it says about xorbs beside that, we see for ourselves."""
    at, found = _ROW, []
    while data[at : at + 32] != _END:
        file, flags, count = _hash(data[at : at + 32]), *struct.unpack_from("<II", data, at + 32)
        rows = [at + _ROW * (1 + i) for i in range(count)]
        found.append((file, [_read_segment(data, row) for row in rows]))
        at += _ROW * (1 + count + count * bool(flags & _VERIFIED) + bool(flags & _EXTENDED))
    return found


def _read_segment(data: bytes, at: int) -> _Segment:
    _, nbytes, first, last = struct.unpack_from("<IIII", data, at + 32)
    return _Segment(_hash(data[at : at + 32]), first, last, nbytes)


def _hash(data: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", data))


def _range_of(wanted: str | None) -> tuple[int, int | None]:
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "bytes=0-")
    assert found is not None
    return int(found[1]), int(found[2]) if found[2] else None
