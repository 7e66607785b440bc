"""Parts of tensors on a GPU: digested and written through the loops that lead from a tensor to memory, many at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weightcast.format.digest import MODULUS
from weightcast.torch.batch import Batch
from weightcast.torch.kernels import triton_parts as kernels
from weightcast.torch.kernels.blocks import Cut, running_sums, sums_by_tensor
from weightcast.torch.kernels.decoding import GpuDecoded
from weightcast.torch.kernels.triton import TILE, launch
from weightcast.torch.strided import Loops, Strided


class _Kind(NamedTuple):
    """Parts of one kind share a launch."""

    device: torch.device
    bits: int
    loops: int
    """0 for a run."""
    wide: bool
    aligned: bool

    @classmethod
    def of(cls, part: Strided) -> _Kind:
        words, loops = part.words, 0 if part.is_run else len(part.loops)
        return cls(words.device, 8 * words.element_size(), loops, part.elements >= 1 << 31, part.address % 16 == 0)


class PartDigests:
    """The digests of parts, as often as they are asked for. The parts stay where they are meanwhile."""

    def __init__(self, parts: Sequence[Strided]):
        alike: dict[_Kind, list[int]] = defaultdict(list)
        for i, part in enumerate(parts):
            if part.elements:
                alike[_Kind.of(part)].append(i)
        self._groups = [_Group(kind, members, [parts[i] for i in members]) for kind, members in alike.items()]
        self._count = len(parts)

    def read(self) -> list[int]:
        """Those of the bits that are there now, one per part."""
        found = [0] * self._count
        launched = [(group, group.sums()) for group in self._groups]
        for group, sums in launched:
            for i, value in zip(group.members, sums.tolist(), strict=True):
                found[i] = value % MODULUS
        return found


class _Group:
    def __init__(self, kind: _Kind, members: Sequence[int], parts: Sequence[Strided]):
        self._kind, self.members = kind, members
        tiles = np.array([-(-part.elements // TILE) for part in parts])
        firsts = np.concatenate([[0], np.cumsum(tiles)])
        part_of = np.repeat(np.arange(len(parts)), tiles)

        def there(values: object, dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, dtype)).to(kind.device)

        self._tiles = int(firsts[-1])
        self._part, self._ordinal = there(part_of, np.int32), there(np.arange(self._tiles) - firsts[part_of], np.int32)
        self._first_tile = there(firsts, np.int64)
        columns = [part.address for part in parts], [part.source for part in parts], [part.elements for part in parts]
        self._columns = [there(column, np.int64) for column in columns]
        self._loops = _table([part.loops for part in parts], max(1, kind.loops), kind.device)

    def sums(self) -> torch.Tensor:
        """One 64-bit sum per part, on the device."""
        kind = self._kind
        sums = torch.empty(self._tiles, dtype=torch.int64, device=kind.device)
        launch(
            kernels.digest_parts, self._tiles, *self._columns, self._loops, self._part, self._ordinal, sums, TILE=TILE,
            BITS=kind.bits, LOOPS=kind.loops, WIDE=kind.wide, ALIGNED=kind.aligned,
        )  # fmt: skip
        ends = running_sums(sums)[self._first_tile]
        return ends[1:] - ends[:-1]


class DeviceChanges:
    """New bits of elements of many parts, on their device: one launch writes them.

    The tensors of ``batch`` are boxes of others, each with its elements in memory at one of ``targets``.
    """

    def __init__(self, batch: Batch, cut: Cut, decoded: GpuDecoded, targets: Sequence[Strided]):
        flips, device = decoded.flips, batch.device
        self._width, self._tiles = batch.kind.width, cut.tiles
        self._where = cut.tile_tensor, flips.ends[1:], flips.counts, flips.indices
        self._targets = tuple(targets)
        """Keeps the memory."""
        self._values = decoded.now
        self._firsts = torch.tensor([target.address for target in targets], dtype=torch.int64, device=device)
        self._depth = max((len(target.loops) for target in targets), default=1)
        self._loops = _table([target.loops for target in targets], self._depth, device)
        self.gains = decoded.gains
        """What the changes add to the digests of the tensors of which the batch's are boxes."""
        if not all(target.is_whole for target in targets):
            self.gains = self._gains(cut, flips.was)

    def _gains(self, cut: Cut, was: torch.Tensor) -> torch.Tensor:
        device = was.device
        sources = torch.tensor([target.source for target in self._targets], dtype=torch.int64, device=device)
        gains = torch.empty(self._tiles, dtype=torch.int64, device=device)
        launch(
            kernels.gain_in_boxes, self._tiles, *self._where, was, self._values, sources, self._loops, gains,
            STEP=64, WIDTH=self._width, LOOPS=self._depth, num_warps=2,
        )  # fmt: skip
        return sums_by_tensor(cut, gains)

    @property
    def nbytes(self) -> int:
        tables = self._firsts, self._loops, *self._where
        return self._values.nbytes + sum(table.nbytes for table in tables)

    def apply(self) -> None:
        launch(
            kernels.put_in_parts, self._tiles, *self._where, self._values, self._firsts, self._loops,
            STEP=64, WIDTH=self._width, LOOPS=self._depth, num_warps=2,
        )  # fmt: skip


def _table(tables: Sequence[Loops], depth: int, device: torch.device) -> torch.Tensor:
    """Loops for kernels: innermost first, those of each part filled up with loops of one element."""
    found = np.zeros((len(tables), depth, 3), np.int64)
    found[:, :, 0] = 1
    for row, table in zip(found, tables, strict=True):
        row[: len(table)] = table[::-1]
    return torch.from_numpy(found).to(device)
