"""What encoding needs of the whole old tensor: the bands of each block, and each change's rank in its band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.kernels import ranks
from weightcast.format.kernels.bands import BLOCK, COST_SCALE, MAX_BANDS
from weightcast.format.spec import TensorSpec
from weightcast.format.tasks import (
    Listed,
    Records,
    address,
    refuse_unsorted,
    run,
    set_changes,
    tasks_of_blocks,
    tensor_records,
)
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers


@dataclass(frozen=True, eq=False)
class Ranks:
    """For each change its rank within its band; for each block the number of bands, their highest keys and sizes.

    The size of a band without changes is not used. With the ranks, changes can be coded after the old tensor is gone.
    """

    ranks: npt.NDArray[np.int32]
    bands: npt.NDArray[np.uint8]
    uppers: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int32]

    def refuse_others(self, spec: TensorSpec, changes: int) -> None:
        """`UsageError` unless these are the ranks of so many changes of a tensor."""
        blocks = -(-spec.elements // BLOCK)
        shapes = self.ranks.shape, self.bands.shape, self.uppers.shape, self.sizes.shape
        words = [array.itemsize for array in (self.ranks, self.bands, self.uppers, self.sizes)]
        table = (blocks, MAX_BANDS)
        if shapes != ((changes,), (blocks,), table, table) or words != [4, 1, 1, 4]:
            raise UsageError("the ranks are those of other changes", tensor=spec.name)


@cache
def band_cost() -> npt.NDArray[np.int64]:
    """n · log2(n) in `COST_SCALE`. Estimates from a sample can add up to twice a block."""
    costs = np.zeros(2 * BLOCK + 64, np.int64)
    for part in np.array_split(np.arange(1, costs.size), 32):  # so that it takes little more memory than it has
        n = part.astype(np.float64)
        costs[part] = np.rint(n * np.log2(n) * COST_SCALE)
    return costs


def rank_tensors(
    specs: Sequence[TensorSpec], changes: Sequence[Listed], olds: Sequence[Bits], workers: Workers
) -> list[Ranks]:
    """Rank the changes of tensors whose bits before them were ``olds``."""
    found = [_room(spec, indices.size) for spec, (indices, _, _) in zip(specs, changes, strict=True)]
    tensors, tasks = tensor_records(specs), tasks_of_blocks([spec.elements for spec in specs])
    tensors["old"] = [address(old) for old in olds]
    set_changes(specs, tensors, changes)
    set_ranks(tensors, found)
    run(ranks.rank_tasks, workers, tensors, tasks, band_cost())
    refuse_unsorted(specs, tasks)
    return found


def set_ranks(tensors: Records, found: Sequence[Ranks | None]) -> None:
    """Say where the ranks of tensors are, to read or to fill in."""
    for name in ("ranks", "bands", "uppers", "sizes"):
        tensors[name] = [0 if one is None else address(getattr(one, name)) for one in found]


def _room(spec: TensorSpec, changes: int) -> Ranks:
    blocks = -(-spec.elements // BLOCK)
    return Ranks(
        np.empty(changes, np.int32),
        np.zeros(blocks, np.uint8),
        np.zeros((blocks, MAX_BANDS), np.uint8),
        np.zeros((blocks, MAX_BANDS), np.int32),
    )
