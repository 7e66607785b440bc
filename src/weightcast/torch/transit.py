"""Changes on their way from a device: copied on a stream of their own, so that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from weightcast.format.codec.ranks import Ranks
from weightcast.format.kernels.bands import BLOCK, MAX_BANDS
from weightcast.format.scan import Change
from weightcast.format.tensors import Bits
from weightcast.torch.batch import Batch, Copied, change_of, replacement


@dataclass(frozen=True, eq=False)
class DeviceRanks:
    """`Ranks` of all tensors of a batch, one after the other, on a device."""

    ranks: torch.Tensor
    bands: torch.Tensor
    uppers: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceFlips:
    """Flips of all tensors of a batch: the t-th's are at ``bounds[t]:bounds[t + 1]``."""

    bounds: list[int]
    indices: torch.Tensor
    was: torch.Tensor


class Transit:
    """Tensors on their way into pinned memory. The device's memory is reused once they have arrived."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._event: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type != "cuda":
            self._there = [tensor.cpu() for tensor in tensors]
            return
        stream = _stream(device.index if device.index is not None else torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._there = _room(tensors)
            for there, tensor in zip(self._there, tensors, strict=True):
                there.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def arrays(self) -> list[np.ndarray]:
        """Wait for them to arrive."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._there]


def _room(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pinned memory for all of them in one allocation, since each allocation is slow."""
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    pieces = zip(whole.split(sizes), tensors, strict=True)
    return [piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for piece, tensor in pieces]


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Arriving:
    """Implements `Delivered` for flips that were found on a device."""

    def __init__(self, batch: Batch, flips: DeviceFlips, now: torch.Tensor, gains: Transit, ranks: DeviceRanks | None):
        self.gains = gains
        self._batch, self._bounds = batch, flips.bounds
        tensors = [flips.indices, flips.was, now]
        if ranks is not None:
            tensors += [ranks.ranks, ranks.bands, ranks.uppers, ranks.sizes]
        self._transit = Transit(tensors)

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        indices, was, now, *ranks = self._transit.arrays()
        (gains,) = self.gains.arrays()
        word = self._batch.kind.word
        blocks = [0, *accumulate(-(-size // BLOCK) for size in self._batch.sizes)]
        for i, spec in enumerate(self._batch.specs):
            if i in replaced:
                yield replacement(spec, *replaced[i])
                continue
            mine = slice(self._bounds[i], self._bounds[i + 1])
            if mine.start == mine.stop:
                continue
            found = None
            if ranks:
                b = slice(blocks[i], blocks[i + 1])
                uppers, sizes = (table.reshape(-1, MAX_BANDS)[b] for table in ranks[2:])
                found = Ranks(ranks[0][mine], ranks[1][b], uppers, sizes)
            places = indices[mine].astype(np.int64)
            change = change_of(spec, places, was[mine].view(word), now[mine].view(word), int(gains[i]), found)
            if change is not None:
                yield change


class PinnedCopy:
    """A copy of a batch's bits that stays in pinned memory, and is brought to the device for a scan."""

    def __init__(self, copied: Copied):
        self._batch = copied.batch
        self._chunks = [torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True) for chunk in copied.chunks]
        self._stored: torch.cuda.Event | None = None
        self.keep(copied)

    def keep(self, copied: Copied) -> None:
        """Store the updated bits, while the device goes on."""
        device = self._batch.device
        stream = _stream(device.index if device.index is not None else torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for here, there in zip(self._chunks, copied.chunks, strict=True):
                here.copy_(there, non_blocking=True)
                there.record_stream(stream)
            self._stored = torch.cuda.Event()
            self._stored.record(stream)

    def brought(self) -> Copied:
        """The copy on the device, for one scan."""
        assert self._stored is not None
        torch.cuda.current_stream(self._batch.device).wait_event(self._stored)
        chunks = [chunk.to(self._batch.device, non_blocking=True) for chunk in self._chunks]
        return Copied(self._batch, chunks)
