"""Compile all kernels for given element widths, or load them from the cache."""

from collections.abc import Iterable

import numpy as np

from weightcast.format.kernels import cpu, places, ranks, reader, writer
from weightcast.format.kernels.bands import MAX_BANDS, Traits
from weightcast.format.kernels.compile import expecting_compilation

WIDTHS = (8, 16, 32, 64)
_LOOP = np.array([[1, 1, 1]], np.int64)
_BF16 = Traits(16, np.uint64(0x7FFF), np.uint64(7), 0, True)


def warm_up(widths: Iterable[int] = WIDTHS) -> None:
    """Make the kernels ready for elements of these bit widths: seconds the first time on a machine, then moments."""
    with expecting_compilation():
        _warm_codec()
        for width in widths:
            _warm_width(np.dtype(f"u{width // 8}"))


def _warm_width(word: np.dtype) -> None:
    old, new = np.zeros(65, word), np.ones(65, word)
    indices, was, now = np.empty(65, np.int64), np.empty_like(old), np.empty_like(new)
    cpu.changes(old, new, 0, indices, was, now)
    cpu.band_keys(old, _BF16.magnitude, _BF16.shift, _BF16.bias, np.empty(128, np.uint8)[:65])
    for out in (was, np.empty(65, np.uint64)):
        cpu.gather(old, indices, 0, out)
    cpu.scatter(old, indices, now)
    cpu.digest_runs(old, indices[:1])
    cpu.digest_change(indices, was, now)
    places.digest_places(old, 0, 0, _LOOP)


def _warm_codec() -> None:
    keys = np.zeros(128, np.uint8)[:65]
    indices, old, new = np.arange(65), np.zeros(65, np.uint64), np.ones(65, np.uint64)
    out, lengths = np.empty(8192, np.uint8), np.empty(1, np.int64)
    found, bands = np.empty(65, np.int32), np.zeros(1, np.uint8)
    uppers, sizes = np.zeros((1, MAX_BANDS), np.uint8), np.zeros((1, MAX_BANDS), np.int32)
    ranks.rank_span(keys, indices, old, new, 0, _BF16, np.zeros(256, np.int64), found, bands, uppers, sizes)
    writer.encode_span(65, indices, found, old, new, 0, bands, uppers, sizes, _BF16, 2, False, out, lengths)
    offsets, counts, resume = np.array([0, lengths[0]]), np.empty(1, np.int64), np.empty(1, np.int64)
    reader.decode_places(out, offsets, keys, 0, indices, counts, resume)
    reader.decode_steps(out, offsets, keys, 0, indices, counts, resume, old, _BF16, new)
    cpu.narrow(np.zeros(1, np.uint32), 7, 8, np.empty(1, np.uint16))
    places.translate(np.arange(1), 0, 0, _LOOP, np.empty(1, np.int64), np.empty(1, np.int64))
