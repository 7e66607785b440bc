"""Kernels for models on an NVIDIA or AMD GPU: Triton's, one launch for all tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from weightcast.format.codec import CodecName
from weightcast.format.codec.coded import Blocks
from weightcast.format.codec.ranks import band_cost
from weightcast.format.kernels.bands import BLOCK, MAX_BANDS
from weightcast.format.tasks import traits
from weightcast.torch.batch import Batch, Copied
from weightcast.torch.kernels import triton as kernels
from weightcast.torch.kernels.blocks import (
    Addresses,
    ArrivingBlocks,
    Cut,
    GpuFlips,
    one_band,
    running_sums,
    sums_by_tensor,
)
from weightcast.torch.kernels.decoding import GpuDecoded, decode_blocks
from weightcast.torch.kernels.device import Arriving, DeviceKernels, DeviceRanks
from weightcast.torch.kernels.parts import DeviceChanges
from weightcast.torch.kernels.triton import SUB, TILE, launch
from weightcast.torch.strided import Strided

_NARROW = {None: 0, "BF16": 1, "F16": 2}


class _Tables:
    """How a batch is cut into tiles and blocks: kept on the host, and on the device only during work."""

    def __init__(self, batch: Batch):
        sizes = np.array(batch.sizes, np.int64)
        tiles, blocks = -(-sizes // TILE), -(-sizes // BLOCK)
        first_tile, first_block = (np.concatenate([[0], np.cumsum(counts)]) for counts in (tiles, blocks))
        tile_tensor, block_tensor = np.repeat(np.arange(sizes.size), tiles), np.repeat(np.arange(sizes.size), blocks)
        tile_ordinal = np.arange(tile_tensor.size) - first_tile[tile_tensor]
        block_ordinal = np.arange(block_tensor.size) - first_block[block_tensor]
        per_block = BLOCK // TILE
        self.tiles, self.blocks = tile_tensor.size, block_tensor.size
        wide = [sizes, first_tile]
        narrow = [
            tile_tensor,
            tile_ordinal,
            first_block[tile_tensor] + tile_ordinal // per_block,
            block_tensor,
            block_ordinal,
            first_tile[block_tensor] + block_ordinal * per_block,
            np.minimum(tiles[block_tensor] - block_ordinal * per_block, per_block),
            np.minimum(sizes[block_tensor] - block_ordinal * BLOCK, BLOCK),
        ]
        parts = [*(part.view(np.int32) for part in wide), *(part.astype(np.int32) for part in narrow)]
        self._sizes = [part.size for part in parts]
        # Each begins at a multiple of 16 bytes: for another alignment, Triton would compile the kernels anew.
        padded = [np.pad(part, (0, -part.size % 4)) for part in parts]
        self._cuts = np.cumsum([part.size for part in padded])[:-1].tolist()
        self._packed = torch.from_numpy(np.concatenate(padded))
        if batch.device.type == "cuda":
            self._packed = self._packed.pin_memory()

    def on_device(self, device: torch.device) -> Cut:
        packed = self._packed.to(device, non_blocking=True)
        pieces = zip(packed.tensor_split(self._cuts), self._sizes, strict=True)
        sizes, first_tile, *narrow = (piece[:size] for piece, size in pieces)
        wide = sizes.view(torch.int64), first_tile.view(torch.int64)
        return Cut(self.tiles, self.blocks, *wide, *narrow)


def _addresses(places: list[int], device: torch.device) -> Addresses:
    table = np.array(places, np.int64)
    # So few bytes are copied without a wait, pinned or not.
    return Addresses(torch.from_numpy(table).to(device, non_blocking=True), not (table % 16).any())


class GpuKernels(DeviceKernels[GpuFlips]):
    """Kernels in Triton. All work is queued on the current stream; only `differ` waits, for the number of flips."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[Batch, _Tables] = WeakKeyDictionary()
        self._cuts: WeakKeyDictionary[Batch, Cut] = WeakKeyDictionary()
        self._live: WeakKeyDictionary[Batch, tuple[list[int], Addresses]] = WeakKeyDictionary()
        self._copies: WeakKeyDictionary[Copied, Addresses] = WeakKeyDictionary()
        self._costs: dict[torch.device, torch.Tensor] = {}

    def take(self, batch: Batch) -> Copied:
        copied = Copied.room(batch)
        cut, source, target = self._cut(batch), self._sources(batch), self._copy(copied)
        launch(
            kernels.take, cut.tiles, source.table, target.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal,
            **self._widths(batch), TILE=TILE, ALIGNED=source.aligned and target.aligned,
        )  # fmt: skip
        return copied

    def differ(self, batch: Batch, old: Copied) -> GpuFlips:
        cut, source, before = self._cut(batch), self._sources(batch), self._copy(old)
        aligned = before.aligned and source.aligned
        marks = torch.empty(cut.tiles * (TILE // 32), dtype=torch.int32, device=batch.device)
        counts = torch.empty(cut.tiles, dtype=torch.int32, device=batch.device)
        launch(
            kernels.mark, cut.tiles, before.table, source.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal, marks,
            counts, **self._widths(batch), TILE=TILE, ALIGNED=aligned,
        )  # fmt: skip
        ends = running_sums(counts)
        bounds: list[int] = ends[cut.first_tile].tolist()  # waits
        indices = torch.empty(bounds[-1], dtype=_index(batch), device=batch.device)
        was = torch.empty(bounds[-1], dtype=batch.word, device=batch.device)
        launch(
            kernels.extract, cut.tiles, before.table, cut.tile_tensor, cut.tile_ordinal, marks, ends[1:], counts,
            indices, was, TILE=TILE, WIDTH=batch.kind.width, num_warps=1,
        )  # fmt: skip
        return GpuFlips(bounds, indices, was, counts, ends)

    def _flips(self, batch: Batch, bounds: list[int], indices: torch.Tensor, was: torch.Tensor) -> GpuFlips:
        cut = self._cut(batch)
        sizes = torch.tensor(bounds, device=batch.device).diff()
        tiles = cut.first_tile[:-1].repeat_interleave(sizes, output_size=bounds[-1]) + indices // TILE
        counts = torch.bincount(tiles, minlength=cut.tiles).to(torch.int32)
        return GpuFlips(bounds, indices.to(_index(batch)), was, counts, running_sums(counts))

    def _put(self, copied: Copied, flips: GpuFlips, values: torch.Tensor) -> None:
        cut = self._cut(copied.batch)
        launch(
            kernels.put, cut.tiles, self._copy(copied).table, cut.tile_tensor, flips.ends[1:], flips.counts,
            flips.indices, values, STEP=64, WIDTH=copied.batch.kind.width, num_warps=2,
        )  # fmt: skip

    def _gather(self, batch: Batch, flips: GpuFlips) -> tuple[torch.Tensor, torch.Tensor]:
        cut = self._cut(batch)
        now = torch.empty_like(flips.was)
        sums = torch.empty(cut.tiles, dtype=torch.int64, device=batch.device)
        launch(
            kernels.gather, cut.tiles, self._sources(batch).table, cut.tile_tensor, flips.ends[1:], flips.counts,
            flips.indices, flips.was, now, sums, **self._widths(batch), STEP=64, num_warps=2,
        )  # fmt: skip
        return now, sums_by_tensor(cut, sums)

    def _rank(self, batch: Batch, old: Copied, flips: GpuFlips, now: torch.Tensor) -> DeviceRanks:
        cut, device, before = self._cut(batch), batch.device, self._copy(old)
        dtype = traits(batch.kind)
        shape = {
            "WIDTH": dtype.width, "MAGNITUDE": int(dtype.magnitude), "SHIFT": int(dtype.shift), "BIAS": dtype.bias,
        }  # fmt: skip
        bands = torch.zeros(cut.blocks, dtype=torch.uint8, device=device)
        uppers = torch.zeros(cut.blocks * MAX_BANDS, dtype=torch.uint8, device=device)
        band_of = torch.empty(cut.blocks * 256, dtype=torch.uint8, device=device)
        sizes = torch.zeros(cut.blocks * MAX_BANDS, dtype=torch.int32, device=device)
        in_tile = torch.empty(cut.tiles * MAX_BANDS, dtype=torch.int32, device=device)
        in_sub = torch.empty(cut.tiles * (TILE // SUB) * MAX_BANDS, dtype=torch.int16, device=device)
        ranks = torch.empty(flips.bounds[-1], dtype=torch.int32, device=device)
        launch(
            kernels.choose, cut.blocks, before.table, cut.sizes, cut.block_tensor, cut.block_ordinal, cut.block_tile,
            flips.ends[1:], flips.counts, flips.was, now, self._cost(device), bands, uppers, band_of, **shape,
            SIGNED=dtype.signed_magnitude, TILE=TILE, STEP=1024,
        )  # fmt: skip
        launch(
            kernels.tally, cut.tiles, before.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal, cut.tile_block,
            bands, band_of, in_tile, in_sub, **shape, TILE=TILE, SUB=SUB, ALIGNED=before.aligned,
        )  # fmt: skip
        launch(kernels.add_up, cut.blocks, cut.block_tile, cut.block_tiles, bands, in_tile, sizes)
        launch(
            kernels.rank, cut.tiles, before.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal, cut.tile_block,
            flips.ends[1:], flips.counts, flips.indices, flips.was, uppers, band_of, in_tile, in_sub, ranks, **shape,
            TILE=TILE, SUB=SUB, STEP=8, ALIGNED=before.aligned, num_warps=1,
        )  # fmt: skip
        return DeviceRanks(ranks, bands, uppers, sizes)

    def _prepare(
        self, batch: Batch, flips: GpuFlips, now: torch.Tensor, codec: CodecName, ranks: DeviceRanks | None
    ) -> Arriving | None:
        if codec == "plain":
            return None
        cut = self._cut(batch)
        return ArrivingBlocks(batch, cut, flips, now, ranks or one_band(cut, flips))

    def decode(self, batch: Batch, blocks: Sequence[Blocks], most: int) -> GpuDecoded:
        """Decode blocks against the batch as it is now: one entry for each of its tensors; see `decode_blocks`."""
        return decode_blocks(batch, self._cut(batch), self._sources(batch), blocks, most)

    def stage(self, batch: Batch, decoded: GpuDecoded, targets: Sequence[Strided]) -> DeviceChanges:
        """What was decoded, ready to be written: the batch's tensors are boxes of others, at one target each."""
        return DeviceChanges(batch, self._cut(batch), decoded, targets)

    def digests(self, batch: Batch) -> torch.Tensor:
        cut, source = self._cut(batch), self._sources(batch)
        sums = torch.empty(cut.tiles, dtype=torch.int64, device=batch.device)
        widths = self._widths(batch)
        launch(
            kernels.digest, cut.tiles, source.table, cut.sizes, cut.tile_tensor, cut.tile_ordinal, sums, TILE=TILE,
            BITS=widths["BITS"], NARROW=widths["NARROW"], ALIGNED=source.aligned,
        )  # fmt: skip
        return sums_by_tensor(cut, sums)

    def rest(self, batch: Batch) -> None:
        self._cuts.pop(batch, None)
        self._live.pop(batch, None)
        self._costs.clear()

    def _cut(self, batch: Batch) -> Cut:
        if batch not in self._tables:
            self._tables[batch] = _Tables(batch)
        if batch not in self._cuts:
            self._cuts[batch] = self._tables[batch].on_device(batch.device)
        return self._cuts[batch]

    def _copy(self, copied: Copied) -> Addresses:
        if copied not in self._copies:
            self._copies[copied] = _addresses(copied.addresses(), copied.batch.device)
        return self._copies[copied]

    def _sources(self, batch: Batch) -> Addresses:
        """Addresses of the model's tensors. They seldom move, so the table is usually on the device already."""
        places = [slot.address() for slot in batch.slots]
        known = self._live.get(batch)
        if known is None or known[0] != places:
            known = self._live[batch] = places, _addresses(places, batch.device)
        return known[1]

    def _cost(self, device: torch.device) -> torch.Tensor:
        if device not in self._costs:
            self._costs[device] = _pinned_cost(device.type).to(device, non_blocking=True)
        return self._costs[device]

    def _widths(self, batch: Batch) -> dict[str, Any]:
        bits = 32 if batch.narrow else batch.kind.width
        return {"BITS": bits, "WIDTH": batch.kind.width, "NARROW": _NARROW[batch.narrow]}


def _index(batch: Batch) -> torch.dtype:
    """Of flat indices in the tensors of a batch."""
    return torch.int64 if max(batch.sizes, default=0) > 1 << 31 else torch.int32


@cache
def _pinned_cost(kind: str) -> torch.Tensor:
    cost = torch.from_numpy(band_cost())
    return cost.pin_memory() if kind == "cuda" else cost
