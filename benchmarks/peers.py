"""What other systems' wire encodings cost, written from their published descriptions, only to be measured.

Each takes the old and new bits of a bf16 tensor and the changed indices, and gives the bytes it would ship.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightcast.format.patch import Indices
from weightcast.format.tensors import Bits


def _zstd(data: bytes, level: int = 1) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=level).compress(data))


def _gaps(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def _narrow(gaps: Indices) -> np.ndarray:
    return gaps.astype(np.uint16 if gaps.size == 0 or gaps.max() < 1 << 16 else np.uint32)


def _byte_gaps(gaps: Indices) -> bytes:
    """0..254 as they are, 255 means add 255 and read on."""
    more, rest = gaps // 255, gaps % 255
    out = np.full(gaps.size + int(more.sum()), 255, np.uint8)
    out[np.cumsum(more + 1) - 1] = rest
    return out.tobytes()


Encoding = Callable[[Bits, Bits, Indices], int]

ENCODINGS: dict[str, Encoding] = {
    # 32-bit indices and values
    "TRL raw": lambda old, new, i: 6 * i.size,
    # 16-bit gaps and values
    "TRL gap_delta": lambda old, new, i: _narrow(_gaps(i)).nbytes + 2 * i.size,
    # the same through zstd
    "PULSE, grail": lambda old, new, i: _zstd(_narrow(_gaps(i)).tobytes() + new[i].tobytes()),
    # the whole tensor, old xor new, through zstd
    "slime, SkyRL (xor)": lambda old, new, i: _zstd((old ^ new).tobytes()),
    # gaps as bytes and old xor new where changed, each through zstd
    "NeMo-RL (gaps, xor)": lambda old, new, i: _zstd(_byte_gaps(_gaps(i))) + _zstd((old[i] ^ new[i]).tobytes()),
}
