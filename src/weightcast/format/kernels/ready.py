"""Compile all kernels for given element widths, or load them from the cache."""

from collections.abc import Iterable

import numpy as np

from weightcast.format.kernels import cpu, places, ranks, reader, writer
from weightcast.format.kernels.bands import Traits
from weightcast.format.kernels.compile import expecting_compilation
from weightcast.format.kernels.tasks import TASK, TENSOR, diff_tasks, place_bytes, place_changes

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
    for places_type in (np.int32, np.int64):
        cpu.scatter(old, np.zeros(1, places_type), now)
    cpu.digest_runs(old, indices[:1])
    cpu.digest_change(indices, was, now)
    cpu.checksum(old, 0)
    cpu.checksum_change(indices, was, now)
    places.digest_places(old, 0, 0, _LOOP)


def _warm_codec() -> None:
    counters, tensors, tasks = np.zeros(2, np.int64), np.zeros(0, TENSOR), np.zeros(0, TASK)
    rooms, cost, room = (
        (np.empty(0, np.int64), *np.empty((2, 0), np.uint64)),
        np.zeros(1, np.int64),
        np.empty(0, np.uint8),
    )
    for kernel in (diff_tasks, place_changes, reader.decode_tasks):
        kernel(counters, tensors, tasks, *rooms)
    ranks.rank_tasks(counters, tensors, tasks, cost)
    writer.encode_tasks(counters, tensors, tasks, cost, room)
    place_bytes(counters, tensors, tasks, room)
    for places_type in (np.int32, np.int64):
        cpu.are_places(np.zeros(1, places_type), 1)
    cpu.narrow(np.zeros(1, np.uint32), 7, 8, np.empty(1, np.uint16))
    places.translate(np.arange(1), 0, 0, _LOOP, np.empty(1, np.int64), np.empty(1, np.int64))
