"""Decoding on the GPU: from the coded blocks of a batch's tensors to what they change, against the batch's own bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightcast.format.codec.coded import Blocks
from weightcast.format.kernels.bands import BLOCK, MAX_BANDS
from weightcast.format.kernels.bitio import SLACK
from weightcast.format.tasks import traits
from weightcast.torch.batch import Batch
from weightcast.torch.kernels import triton as kernels
from weightcast.torch.kernels import triton_marking as marking
from weightcast.torch.kernels import triton_reading as reading
from weightcast.torch.kernels.blocks import Addresses, Cut, GpuFlips, running_sums, sums_by_tensor
from weightcast.torch.kernels.triton import SUB, TILE, launch


@dataclass(frozen=True, eq=False)
class GpuDecoded:
    """What the blocks of a batch change. It is in the batch's memory only once somebody writes it there."""

    flips: GpuFlips
    now: torch.Tensor
    """The new bits at the places of the flips."""
    gains: torch.Tensor
    """What the changes add to each tensor's digest."""
    errors: torch.Tensor
    """For each block of the cut 0, or an error of `weightcast.format.kernels.reader`; then it has no valid changes."""
    before: torch.Tensor
    """The changes before each block."""


@dataclass(frozen=True, eq=False)
class _Stream:
    """The bytes of all blocks on the device, and for each block of the cut where it begins and how many it has."""

    words: torch.Tensor
    begin: torch.Tensor
    nbytes: torch.Tensor
    banded: bool
    """Whether a block has several bands: the first byte says so."""


def _upload(batch: Batch, blocks: Sequence[Blocks]) -> _Stream:
    """Send everything in one copy."""
    firsts = [0, *accumulate(-(-size // BLOCK) for size in batch.sizes)]
    # Of an even length, so that both tables are aligned: otherwise Triton would compile the kernels anew.
    tables = np.zeros((2, firsts[-1] + firsts[-1] % 2), np.int64)
    starts = np.cumsum([0, *(one.stream.size for one in blocks)])
    for first, start, one in zip(firsts, starts, blocks, strict=False):
        pairs = np.array(one.sizes, np.int64).reshape(-1, 2)
        assert pairs[:, 1].sum() == one.stream.size
        there = first + pairs[:, 0]
        tables[0, there], tables[1, there] = start + np.cumsum(pairs[:, 1]) - pairs[:, 1], pairs[:, 1]
    size = -(-(int(starts[-1]) + SLACK) // 8)
    room = torch.empty(tables.size + size, dtype=torch.int64, pin_memory=batch.device.type == "cuda")
    filled: npt.NDArray[np.int64] = room.numpy()
    filled[: tables.size] = tables.reshape(-1)
    stream = filled[tables.size :].view(np.uint8)
    stream[starts[-1] :] = 0
    if blocks:
        np.concatenate([one.stream for one in blocks], out=stream[: starts[-1]])
    banded = bool((stream[tables[0, tables[1] > 0]] > 1).any())
    begin, nbytes, words = room.to(batch.device, non_blocking=True).split([tables.shape[1], tables.shape[1], size])
    return _Stream(words, begin, nbytes, banded)


class _Reading:
    """The tables of blocks while they are read, and the steps in their order."""

    def __init__(self, batch: Batch, cut: Cut, old: Addresses, blocks: Sequence[Blocks]):
        dtype = traits(batch.kind)
        self._batch, self._cut, self._old = batch, cut, old
        self._keys = {"MAGNITUDE": int(dtype.magnitude), "SHIFT": int(dtype.shift), "BIAS": dtype.bias}
        self._width = {"WIDTH": dtype.width}
        self._signed = {"SIGNED": dtype.signed_magnitude}
        self._stream = stream = _upload(batch, blocks)
        self._bytes = stream.begin, stream.nbytes
        self.errors = self._room(cut.blocks)
        self._bands, self._tallied = self._room(cut.blocks, torch.uint8), self._room(cut.blocks, torch.uint8)
        self._uppers = self._room(cut.blocks * MAX_BANDS, torch.uint8)
        self._band_of = self._room(cut.blocks * 256, torch.uint8)
        self._codes = self._room(cut.blocks * 2 * MAX_BANDS)
        self._positions = self._room(cut.blocks * reading.POSITIONS, torch.int64)
        self._starts, self._changes, self._fars = (self._room(cut.blocks * MAX_BANDS) for _ in range(3))
        self._far = torch.zeros(cut.tiles * (TILE // 32), dtype=torch.int32, device=batch.device)

    def _room(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._batch.device)

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        launch(kernel, programs, *arguments, **self._width, **options)

    def mark(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A bit for each element that changes, and how many there are in each tile."""
        cut, stream = self._cut, self._stream
        self._launch(
            reading.read_header, cut.blocks, *self._bytes, cut.block_size, stream.words, self._bands, self._tallied,
            self._uppers, self._band_of, self._codes, self._positions, self.errors, num_warps=1,
        )  # fmt: skip
        in_tile, in_sub, sizes = self._tally()
        listed = torch.zeros_like(self._far)
        launch(
            reading.read_lists, cut.blocks, *self._bytes, cut.block_size, cut.block_tile, stream.words, self._bands,
            self._codes, sizes, self._positions, self._starts, self._changes, self._fars, listed, self._far,
            self.errors, num_warps=1,
        )  # fmt: skip
        marks, counts = torch.empty_like(listed), self._room(cut.tiles)
        self._launch(
            marking.mark_listed, cut.tiles, self._old.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal,
            cut.tile_block, *self._bytes, cut.block_tile, cut.block_size, stream.words, self._bands, self._band_of,
            self._codes, self._starts, self.errors, in_tile, in_sub, listed, marks.view(torch.int64), counts,
            **self._keys, TILE=TILE, SUB=SUB, ALIGNED=self._old.aligned, num_warps=8,
        )  # fmt: skip
        return marks, counts

    def _tally(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The members of each band before each tile, before each part of a tile, and in all."""
        cut = self._cut
        sizes = self._room(cut.blocks * MAX_BANDS)
        if not self._stream.banded:
            return sizes, sizes.view(torch.int16), sizes  # nothing reads them
        in_tile = self._room(cut.tiles * MAX_BANDS)
        in_sub = self._room(cut.tiles * (TILE // SUB) * MAX_BANDS, torch.int16)
        self._launch(
            kernels.tally, cut.tiles, self._old.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal, cut.tile_block,
            self._tallied, self._band_of, in_tile, in_sub, **self._keys, TILE=TILE, SUB=SUB, ALIGNED=self._old.aligned,
        )  # fmt: skip
        launch(kernels.add_up, cut.blocks, cut.block_tile, cut.block_tiles, self._tallied, in_tile, sizes)
        return in_tile, in_sub, sizes

    def extract(self, marks: torch.Tensor, counts: torch.Tensor, most: int) -> GpuFlips:
        """The marked places, in order, and their old bits; blocks after the one that exceeds ``most`` are left out."""
        cut, batch = self._cut, self._batch
        ends = running_sums(counts)
        bounds: list[int] = ends[cut.first_tile].tolist()  # waits
        if bounds[-1] > most:
            before = ends[cut.block_tile]
            counts = counts.masked_fill((before > most)[cut.tile_block], 0)
            ends = running_sums(counts)
            bounds = ends[cut.first_tile].tolist()
        wide = max(batch.sizes, default=0) > 1 << 31
        indices = self._room(bounds[-1], torch.int64 if wide else torch.int32)
        was = self._room(bounds[-1], batch.word)
        self._launch(
            kernels.extract, cut.tiles, self._old.table, cut.tile_tensor, cut.tile_ordinal, marks, ends[1:], counts,
            indices, was, TILE=TILE, num_warps=1,
        )  # fmt: skip
        return GpuFlips(bounds, indices, was, counts, ends)

    def step(self, flips: GpuFlips) -> torch.Tensor:
        """The new bits at the places of the flips."""
        cut, words = self._cut, self._stream.words
        now, far_changes = torch.empty_like(flips.was), self._room(flips.bounds[-1])
        where = cut.block_tile, cut.block_tiles, flips.ends
        self._launch(
            marking.step, cut.blocks, self._stream.begin, *where, flips.indices, flips.was, words, self._bands,
            self._uppers, self._codes, self._changes, self._fars, self._positions, self._far, now, far_changes,
            **self._keys, **self._signed, STEP=128,
        )  # fmt: skip
        self._launch(
            reading.read_distances, cut.blocks, *self._bytes, *where, flips.was, words, self._bands, self._changes,
            self._fars, self._positions, now, far_changes, self.errors, **self._keys, **self._signed, num_warps=1,
        )  # fmt: skip
        return now

    def gain(self, flips: GpuFlips, now: torch.Tensor) -> torch.Tensor:
        """What the changes add to each tensor's digest."""
        gains = self._room(self._cut.tiles, torch.int64)
        self._launch(
            marking.gain, self._cut.tiles, flips.ends[1:], flips.counts, flips.indices, flips.was, now, gains,
            STEP=64, num_warps=2,
        )  # fmt: skip
        return sums_by_tensor(self._cut, gains)


def decode_blocks(batch: Batch, cut: Cut, old: Addresses, blocks: Sequence[Blocks], most: int) -> GpuDecoded:
    """Decode each tensor's blocks against its bits at the addresses in ``old``. Nothing is written there.

    ``most`` bounds the memory for any bytes: of the blocks that change more elements than that in all, the first is
    decoded, and those after it are left out. The host waits once, for the number of changes.
    """
    reading_ = _Reading(batch, cut, old, blocks)
    flips = reading_.extract(*reading_.mark(), most)
    now = reading_.step(flips)
    gains = reading_.gain(flips, now)
    return GpuDecoded(flips, now, gains, reading_.errors, flips.ends[cut.block_tile])
