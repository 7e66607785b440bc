"""Coding on the GPU: from the ranks of a batch's changes to the blocks of its tensors, in transit to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from weightcast.format.codec.coded import Blocks
from weightcast.format.kernels.bands import BLOCK, MAX_BANDS
from weightcast.format.tasks import traits
from weightcast.torch.batch import Batch
from weightcast.torch.kernels import triton_coding as coding
from weightcast.torch.kernels import triton_order as order
from weightcast.torch.kernels import triton_writing as writing
from weightcast.torch.kernels.device import DeviceFlips, DeviceRanks
from weightcast.torch.kernels.triton import launch
from weightcast.torch.transit import Transit, beside


@dataclass(frozen=True, eq=False)
class GpuFlips(DeviceFlips):
    """Also, for each tile: how many flips it has, and where the last one ends."""

    counts: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True, eq=False)
class Cut:
    """How a batch is cut into tiles and blocks: tables on its device."""

    tiles: int
    blocks: int
    sizes: torch.Tensor
    first_tile: torch.Tensor
    """One per tensor, and the end."""
    tile_tensor: torch.Tensor
    tile_ordinal: torch.Tensor
    tile_block: torch.Tensor
    block_tensor: torch.Tensor
    block_ordinal: torch.Tensor
    block_tile: torch.Tensor
    block_tiles: torch.Tensor
    block_size: torch.Tensor


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where the tensors of a batch are."""

    table: torch.Tensor
    aligned: bool
    """Whether the widest loads can be used."""


def running_sums(counts: torch.Tensor) -> torch.Tensor:
    """0, then the running sums; 64-bit integers wrap around."""
    ends = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=ends[1:])
    return ends


def sums_by_tensor(cut: Cut, sums: torch.Tensor) -> torch.Tensor:
    """Sums over tiles as sums over tensors, modulo 2**64."""
    ends = running_sums(sums)[cut.first_tile]
    return ends[1:] - ends[:-1]


def one_band(cut: Cut, flips: GpuFlips) -> DeviceRanks:
    """The ranks for `gap`: the places within the block."""
    places = (flips.indices & (BLOCK - 1)).to(torch.int32)
    bands = torch.ones(cut.blocks, dtype=torch.uint8, device=places.device)
    uppers = torch.full((cut.blocks * MAX_BANDS,), 255, dtype=torch.uint8, device=places.device)
    sizes = torch.zeros((cut.blocks, MAX_BANDS), dtype=torch.int32, device=places.device)
    sizes[:, 0] = cut.block_size
    return DeviceRanks(places, bands, uppers, sizes)


class ArrivingBlocks:
    """Implements `Arriving`. The sizes of the blocks come first; with them, their bytes can be allocated and written.

    That is done where the blocks are waited for: the thread that trains waits for nothing.
    """

    def __init__(self, batch: Batch, cut: Cut, flips: GpuFlips, now: torch.Tensor, ranks: DeviceRanks):
        dtype, device, changes = traits(batch.kind), batch.device, flips.bounds[-1]
        self._batch, self._blocks = batch, cut.blocks
        self._bands, self._sizes = (ranks.bands, ranks.uppers), ranks.sizes
        self._where = cut.block_tile, cut.block_tiles, flips.ends
        self._bits = flips.was, now
        self._width = {"WIDTH": dtype.width, "SIGNED": dtype.signed_magnitude}
        self._shape = {"MAGNITUDE": int(dtype.magnitude), "SHIFT": int(dtype.shift), "BIAS": dtype.bias} | self._width

        def room(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self._tallies, self._plan = room(cut.blocks * coding.TALLIES), room(cut.blocks * coding.PLAN)
        self._lists = room(changes), room(changes), room(changes)
        lengths, nbytes = room(cut.blocks * MAX_BANDS * coding.LENGTHS), room(cut.blocks)
        launch(
            order.arrange, cut.blocks, *self._where, *self._bits, ranks.ranks, *self._bands, self._tallies,
            *self._lists, **self._shape, STEP=128,
        )  # fmt: skip
        launch(
            coding.measure, cut.blocks * MAX_BANDS, *self._where, *self._bits, self._sizes, self._tallies, *self._lists,
            lengths, **self._shape, STEP=256, FAR_STEP=64,
        )  # fmt: skip
        launch(
            coding.lay_out, cut.blocks, self._sizes, cut.block_size, *self._where, *self._bands, self._tallies,
            lengths, self._plan, nbytes, WIDTH=dtype.width, num_warps=1,
        )  # fmt: skip
        self._begins = torch.cumsum(nbytes, 0, dtype=torch.int64) - nbytes
        self._nbytes = Transit([nbytes])

    def tensors(self) -> list[Blocks]:
        sizes = self._nbytes.arrays()[0].astype(np.int64)
        stream = self._write(int(sizes.sum()))
        ends = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        firsts = [0, *accumulate(-(-size // BLOCK) for size in self._batch.sizes)]
        return [
            Blocks(
                tuple((i, size) for i, size in enumerate(sizes[first:last].tolist()) if size),
                stream[ends[first] : ends[last]],
            )
            for first, last in pairwise(firsts)
        ]

    def _write(self, nbytes: int) -> np.ndarray:
        with beside(self._batch.device):
            words = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=self._batch.device)
            launch(
                writing.write_bands, self._blocks * MAX_BANDS, *self._where, *self._bits, self._sizes, self._tallies,
                *self._lists, self._plan, self._begins, words, **self._shape, STEP=128,
            )  # fmt: skip
            launch(
                writing.write_rest, self._blocks, self._sizes, *self._where, *self._bits, *self._bands, self._tallies,
                self._plan, self._begins, words, **self._width, ROWS=64,
            )  # fmt: skip
            written = Transit([words])
        return written.arrays()[0].view(np.uint8)
