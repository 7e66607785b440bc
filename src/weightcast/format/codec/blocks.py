"""Tensor ↔ blocks of at most 2**18 elements, for `gap` and `banded` alike (SPEC 6): one reader serves both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.errors import FormatError, UsageError
from weightcast.format.codec.coded import Coded
from weightcast.format.codec.ranks import BLOCKS_PER_TASK, SPAN, Ranks, keys_of, traits
from weightcast.format.kernels import cpu, reader, writer
from weightcast.format.kernels.bands import BLOCK, Traits
from weightcast.format.kernels.bitio import SLACK
from weightcast.format.patch import TensorPatch
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers

Bytes = npt.NDArray[np.uint8]

RAW = 0
"""First byte of a block that holds its elements' new bits as they are; else the number of bands."""

# Read only; not marked so, for which numba would compile everything a second time.
_ONE_BAND = np.zeros(BLOCKS_PER_TASK * BLOCK, np.uint8)

_PROBLEMS = {
    reader.ENDED: "a block ends before its codes do",
    reader.BANDS: "a block has impossible bands",
    reader.PARAMETER: "a block has an impossible Rice parameter",
    reader.RANK: "a block's gaps lead past its elements",
    reader.DISTANCE: "a block has an impossible distance",
    reader.TRAILING: "a block is longer than its codes",
    reader.EMPTY: "a block is there but changes nothing",
}


def encode(patch: TensorPatch, old: Bits | None, found: Ranks, workers: Workers) -> Coded:
    """Code ``patch`` in the bands that were ``found`` in its blocks; ``old`` is for raw blocks, if it is at hand."""
    spec = patch.spec
    if patch.old is None:
        raise UsageError("only `plain` can carry a patch whose old bits are not known", tensor=spec.name)
    was, now, dtype = patch.old, patch.new, traits(spec.kind)

    def task(first: int) -> tuple[list[tuple[int, int]], Bytes]:
        size = min(SPAN, spec.elements - first)
        low, high = np.searchsorted(patch.indices, (first, first + size))
        if low == high:
            return [], np.empty(0, np.uint8)
        before, after = was[low:high].astype(np.uint64), now[low:high].astype(np.uint64)
        # Gaps sum up to no more than the elements: under 4 bits per element. A change takes at most 88 bits for its
        # distance and 4 for its direction and its place in the far set.
        out = np.empty(size // 2 + 12 * (high - low) + 4096, np.uint8)
        blocks = slice(first // BLOCK, -(-(first + size) // BLOCK))
        lengths = np.empty(blocks.stop - blocks.start, np.int64)
        used = writer.encode_span(
            size, patch.indices[low:high], found.ranks[low:high], before, after, first,
            found.bands[blocks], found.uppers[blocks], found.sizes[blocks],
            dtype, spec.kind.width // 8, old is not None, out, lengths,
        )  # fmt: skip
        coded = out[:used].copy()
        if (lengths < 0).any():
            coded = _put_raw(patch, old, first, coded, lengths)
        ordinals = np.flatnonzero(lengths)
        return [(first // BLOCK + int(i), int(lengths[i])) for i in ordinals], coded

    done = workers.map(task, range(0, spec.elements, SPAN)) if patch.changed else []
    sizes = tuple(size for task_sizes, _ in done for size in task_sizes)
    stream = np.concatenate([coded for _, coded in done]) if done else np.empty(0, np.uint8)
    return Coded(spec, patch.changed, patch.digest, {"blocks": stream}, sizes)


def _put_raw(patch: TensorPatch, old: Bits | None, first: int, coded: Bytes, lengths: npt.NDArray[np.int64]) -> Bytes:
    """Fill in the blocks marked -1 as raw ones; ``lengths`` is completed in place."""
    pieces, at = [], 0
    for i, length in enumerate(lengths):
        if length >= 0:
            pieces.append(coded[at : at + length])
            at += length
            continue
        low = first + i * BLOCK
        high = min(low + BLOCK, patch.spec.elements)
        a, b = np.searchsorted(patch.indices, (low, high))
        whole = np.empty(high - low, patch.new.dtype) if old is None else old[low:high].copy()
        whole[patch.indices[a:b] - low] = patch.new[a:b]
        pieces += [np.array([RAW], np.uint8), whole.view(np.uint8)]
        lengths[i] = 1 + whole.nbytes
    return np.concatenate(pieces)


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks to decode in one go, or a single raw one: ordinals ``first..last``, bytes from ``begin``."""

    first: int
    last: int
    begin: int
    lengths: tuple[int, ...]
    raw: bool


def _runs(coded: Coded, stream: Bytes) -> list[_Run]:
    runs: list[_Run] = []
    begin = 0
    for ordinal, length in coded.blocks:
        raw = stream[begin] == RAW
        run = runs[-1] if runs else None
        if run and not raw and not run.raw and ordinal - run.first < BLOCKS_PER_TASK:
            skipped = (0,) * (ordinal - run.last - 1)
            runs[-1] = _Run(run.first, ordinal, run.begin, (*run.lengths, *skipped, length), False)
        else:
            runs.append(_Run(ordinal, ordinal, begin, (length,), bool(raw)))
        begin += length
    return runs


def decode(coded: Coded, old: Bits | None, workers: Workers) -> TensorPatch:
    """Read the blocks against the ``old`` tensor; one-band blocks touch it only where it changed."""
    spec, dtype = coded.spec, traits(coded.spec.kind)
    if old is None or old.size != spec.elements:
        raise UsageError("these codecs are read against the old tensor", tensor=spec.name)
    stream = coded.streams["blocks"].view(np.uint8)

    def task(run: _Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = run.first * BLOCK
        mine = old[first : min((run.last + 1) * BLOCK, old.size)]
        data = stream[run.begin : run.begin + sum(run.lengths)]
        return _read_raw(data, mine, first) if run.raw else _read_coded(data, run.lengths, mine, first, dtype)

    empty = np.empty(0, np.int64), np.empty(0, old.dtype), np.empty(0, old.dtype)
    done = workers.map(task, _runs(coded, stream)) or [empty]
    indices, was, now = (np.concatenate([piece[i] for piece in done]) for i in range(3))
    return TensorPatch(spec, indices, now, was, coded.digest)


def _read_coded(
    data: Bytes, lengths: tuple[int, ...], old: Bits, first: int, dtype: Traits
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bands = data[offsets[:-1][np.diff(offsets) > 0]]
    keys = keys_of(old, dtype) if (bands > 1).any() else _ONE_BAND[: old.size]
    padded = np.concatenate([data, np.zeros(SLACK, np.uint8)])
    places = np.empty(old.size, np.int64)
    counts, resume = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    n = reader.decode_places(padded, offsets, keys, first, places, counts, resume)
    if n < 0:
        raise FormatError(_PROBLEMS[n])
    places = places[:n].copy()
    was, now = np.empty(n, np.uint64), np.empty(n, np.uint64)
    cpu.gather(old, places, first, was)
    wrong = reader.decode_steps(padded, offsets, keys, first, places, counts, resume, was, dtype, now)
    if wrong:
        raise FormatError(_PROBLEMS[wrong])
    return places, was.astype(old.dtype), now.astype(old.dtype)


def _read_raw(data: Bytes, old: Bits, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if data.size != 1 + old.nbytes:
        raise FormatError("a raw block has another size than its elements")
    new = data[1:].copy().view(old.dtype)
    indices, was, now = np.empty(old.size, np.int64), np.empty_like(old), np.empty_like(old)
    n = cpu.changes(old, new, first, indices, was, now)
    if n == 0:
        raise FormatError(_PROBLEMS[reader.EMPTY])
    return indices[:n].copy(), was[:n].copy(), now[:n].copy()
