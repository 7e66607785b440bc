"""What the ranks of a sharded training need to publish together: a way for bytes, and what a message is."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.uint64]


class Peers(Protocol):
    """A way for bytes between the ranks. All of them call the same methods in the same order.

    A rank that is gone, or does not come within the group's timeout, is a `PeerError` with its number: after all others
    have been served, and at once in every later call that needs that rank. Other ranks may not notice: the publisher
    tells them.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes] | None:
        """Send bytes to rank 0, which gets those of all ranks in their order; None elsewhere."""
        ...

    def share(self, data: bytes | None) -> bytes:
        """Get the bytes that rank 0 passes. The others wait twice as long: rank 0 may be waiting for a late one."""
        ...

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[i]`` to rank ``i``; returns what each rank has sent to this one, in the order of ranks."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Message:
    """What a rank says, or what rank 0 answers: a few facts, and at most one array of 64-bit sums."""

    facts: dict[str, Any] = field(default_factory=dict)
    sums: Sums | None = None

    def pack(self) -> bytes:
        text = zlib.compress(json.dumps(self.facts, separators=(",", ":")).encode(), 1)
        return struct.pack("<Q", len(text)) + text + (b"" if self.sums is None else self.sums.astype("<u8").tobytes())

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        (length,) = struct.unpack_from("<Q", data)
        sums = np.frombuffer(data, "<u8", offset=8 + length) if len(data) > 8 + length else None
        return cls(json.loads(zlib.decompress(data[8 : 8 + length])), sums)
