"""`gap` and `banded`: a tensor as blocks of at most 2**18 elements (SPEC 6). One reader serves both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.errors import FormatError, UsageError
from weightcast.format.codec.coded import Coded
from weightcast.format.codec.ranks import BLOCKS_PER_TASK, SPAN, Ranks, keys_of, one_band, rank, traits
from weightcast.format.kernels import cpu, reader, writer
from weightcast.format.kernels.bands import BLOCK, Traits
from weightcast.format.kernels.bitio import SLACK
from weightcast.format.patch import TensorPatch
from weightcast.format.table import Row
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers

Bytes = npt.NDArray[np.uint8]

RAW = 0
"""The first byte of a block that holds its elements' new bits as they are; in other blocks, the number of bands."""

# Never written, but not marked read-only: numba would compile everything a second time for that.
_ONE_BAND = np.zeros(BLOCKS_PER_TASK * BLOCK, np.uint8)

_PROBLEMS = {
    reader.ENDED: "a block ends before its codes do",
    reader.BANDS: "a block has impossible bands",
    reader.PARAMETER: "a block has an impossible Rice parameter",
    reader.RANK: "a block's gaps run past its last element",
    reader.DISTANCE: "a block has an impossible distance",
    reader.TRAILING: "a block is longer than its codes",
    reader.EMPTY: "a block changes nothing",
}


def encode_gap(patch: TensorPatch, old: Bits | Ranks | None, workers: Workers) -> Coded:
    """One band per block, so the reader needs old bits only where something changed."""
    return _encode(patch, None if isinstance(old, Ranks) else old, one_band(patch.spec, patch.indices), workers)


def encode_banded(patch: TensorPatch, old: Bits | Ranks | None, workers: Workers) -> Coded:
    """Elements in bands of their old exponent, changes as ranks within a band.

    Small weights change far more often than large ones, since the bf16 step shrinks with the weight and Adam's does
    not. The reader holds the old weights, so every element's exponent costs nothing.
    """
    if isinstance(old, Ranks):
        return _encode(patch, None, old, workers)
    if old is None:
        hint = "Pass `old`, or use `gap`."
        raise UsageError("`banded` needs the whole old tensor", tensor=patch.spec.name, hint=hint)
    found = rank(patch.spec, patch.indices, _old_bits(patch), patch.new, old, workers)
    return _encode(patch, old, found, workers)


def _old_bits(patch: TensorPatch) -> Bits:
    if patch.old is None:
        hint = "Use `plain`."
        raise UsageError("`gap` and `banded` need the old bits of every change", tensor=patch.spec.name, hint=hint)
    return patch.old


def _encode(patch: TensorPatch, old: Bits | None, found: Ranks, workers: Workers) -> Coded:
    """Code ``patch`` in the bands that were ``found`` in its blocks; ``old``, if known, is for raw blocks."""
    spec = patch.spec
    was, now, dtype = _old_bits(patch), patch.new, traits(spec.kind)

    def task(first: int) -> tuple[list[tuple[int, int]], Bytes]:
        size = min(SPAN, spec.elements - first)
        low, high = np.searchsorted(patch.indices, (first, first + size))
        if low == high:
            return [], np.empty(0, np.uint8)
        before, after = was[low:high].astype(np.uint64), now[low:high].astype(np.uint64)
        # The gaps add up to at most the number of elements: under 4 bits per element. A change takes at most 88 bits
        # for its distance, and 4 for its direction and its place in the far set.
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
    return Coded(Row(spec, patch.changed, patch.digest, sizes), {"blocks": stream})


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
    """Consecutive blocks to decode together, or one raw block: ordinals ``first..last``, bytes from ``begin``."""

    first: int
    last: int
    begin: int
    lengths: tuple[int, ...]
    raw: bool


def _runs(coded: Coded, stream: Bytes) -> list[_Run]:
    runs: list[_Run] = []
    begin = 0
    for ordinal, length in coded.row.blocks:
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
    """Read the blocks against the ``old`` tensor; blocks of one band read it only where it changed."""
    spec, dtype = coded.row.spec, traits(coded.row.spec.kind)
    if old is None or old.size != spec.elements:
        hint = "Pass the weights that the patch was made from as `old`."
        raise UsageError("`gap` and `banded` cannot be decoded without the old tensor", tensor=spec.name, hint=hint)
    stream = coded.streams["blocks"]

    def task(run: _Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = run.first * BLOCK
        mine = old[first : min((run.last + 1) * BLOCK, old.size)]
        data = stream[run.begin : run.begin + sum(run.lengths)]
        return _read_raw(data, mine, first) if run.raw else _read_coded(data, run.lengths, mine, first, dtype)

    empty = np.empty(0, np.int64), np.empty(0, old.dtype), np.empty(0, old.dtype)
    done = workers.map(task, _runs(coded, stream)) or [empty]
    indices, was, now = (np.concatenate([piece[i] for piece in done]) for i in range(3))
    return TensorPatch(spec, indices, now, was, coded.row.digest)


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
        raise FormatError(f"a raw block has {data.size - 1} bytes, its elements have {old.nbytes}")
    new = data[1:].copy().view(old.dtype)
    indices, was, now = np.empty(old.size, np.int64), np.empty_like(old), np.empty_like(old)
    n = cpu.changes(old, new, first, indices, was, now)
    if n == 0:
        raise FormatError(_PROBLEMS[reader.EMPTY])
    return indices[:n].copy(), was[:n].copy(), now[:n].copy()
