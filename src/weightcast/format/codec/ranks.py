"""What encoding needs of the whole old tensor: the bands of each block, and each change's rank in its band."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from weightcast.format.kernels import cpu, ranks
from weightcast.format.kernels.bands import BLOCK, COST_SCALE, MAX_BANDS, Traits
from weightcast.format.kernels.lanes import LANES
from weightcast.format.spec import Dtype, TensorSpec
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers

BLOCKS_PER_TASK = 4
SPAN = BLOCKS_PER_TASK * BLOCK


@dataclass(frozen=True, eq=False)
class Ranks:
    """For each change its rank within its band; for each block the number of bands, their highest keys and sizes.

    The size of a band without changes is not used. With the ranks, changes can be coded after the old tensor is gone.
    """

    ranks: npt.NDArray[np.int32]
    bands: npt.NDArray[np.uint8]
    uppers: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int32]


def traits(dtype: Dtype) -> Traits:
    """What the kernels need of a dtype."""
    if dtype.mantissa is None:
        return Traits(dtype.width, np.uint64(0), np.uint64(0), 0, False)
    magnitude = np.uint64((1 << (dtype.width - 1)) - 1)
    return Traits(dtype.width, magnitude, np.uint64(dtype.mantissa), 896 if dtype.width == 64 else 0, True)


def keys_of(old: Bits, dtype: Traits) -> npt.NDArray[np.uint8]:
    """The band key of every element."""
    keys = np.empty(old.size + LANES, np.uint8)[: old.size]  # kernels read whole words
    cpu.band_keys(old, dtype.magnitude, dtype.shift, dtype.bias, keys)
    return keys


@cache
def band_cost() -> npt.NDArray[np.int64]:
    """n · log2(n) in `COST_SCALE`. Estimates from a sample can add up to twice a block."""
    n = np.arange(1, 2 * BLOCK + 64, dtype=np.float64)
    return np.concatenate([[0], np.rint(n * np.log2(n) * COST_SCALE)]).astype(np.int64)


def rank(spec: TensorSpec, indices: npt.NDArray[np.int64], was: Bits, now: Bits, old: Bits, workers: Workers) -> Ranks:
    """Rank changes at sorted flat ``indices`` of a tensor whose bits before them were ``old``."""
    dtype, cost = traits(spec.kind), band_cost()
    found = _room(spec, indices.size)

    def task(first: int) -> None:
        size = min(SPAN, spec.elements - first)
        low, high = np.searchsorted(indices, (first, first + size))
        if low == high:
            return
        blocks = slice(first // BLOCK, -(-(first + size) // BLOCK))
        before, after = was[low:high].astype(np.uint64), now[low:high].astype(np.uint64)
        ranks.rank_span(
            keys_of(old[first : first + size], dtype), indices[low:high], before, after, first, dtype, cost,
            found.ranks[low:high], found.bands[blocks], found.uppers[blocks], found.sizes[blocks],
        )  # fmt: skip

    workers.map(task, range(0, spec.elements, SPAN))
    return found


def one_band(spec: TensorSpec, indices: npt.NDArray[np.int64]) -> Ranks:
    """Each block as one band: a change's rank is its place, and the old tensor is not needed."""
    found = _room(spec, 0)
    found.bands[:] = 1
    found.uppers[:, 0] = 255
    found.sizes[:, 0] = np.minimum(BLOCK, spec.elements - np.arange(found.bands.size) * BLOCK)
    return Ranks((indices % BLOCK).astype(np.int32), found.bands, found.uppers, found.sizes)


def _room(spec: TensorSpec, changes: int) -> Ranks:
    blocks = -(-spec.elements // BLOCK)
    return Ranks(
        np.empty(changes, np.int32),
        np.zeros(blocks, np.uint8),
        np.zeros((blocks, MAX_BANDS), np.uint8),
        np.zeros((blocks, MAX_BANDS), np.int32),
    )
