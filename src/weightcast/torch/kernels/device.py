"""What the kernel sets for devices share: flips and ranks as tensors, and how they are delivered to the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from weightcast.format.codec.ranks import Ranks
from weightcast.format.kernels.bands import BLOCK, MAX_BANDS
from weightcast.format.scan import Change
from weightcast.format.tensors import Bits
from weightcast.torch.batch import Batch, Copied, Kernels, Ledger, Sums, replacement, without_undone
from weightcast.torch.transit import Transit, sums_in_transit


class DeviceRanks(NamedTuple):
    """`Ranks` of all tensors of a batch, one after the other, on a device."""

    ranks: torch.Tensor
    bands: torch.Tensor
    uppers: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceFlips:
    """Flips of all tensors of a batch: those of tensor t are at ``bounds[t]:bounds[t + 1]``."""

    bounds: list[int]
    indices: torch.Tensor
    was: torch.Tensor


F = TypeVar("F", bound=DeviceFlips)


class DeviceKernels(Kernels[F]):
    """The part of `Kernels` that all sets for devices share."""

    def count(self, flips: F) -> int:
        return flips.bounds[-1]

    def put(self, copied: Copied, flips: F) -> None:
        self._put(copied, flips, flips.was)

    def deliver(
        self, batch: Batch, flips: F, ranked: bool, shadow: Copied | None, ledger: Ledger | None = None
    ) -> DeviceDelivered:
        now, sums = self._gather(batch, flips)
        gains = sums_in_transit(sums)  # before the ranks, which nothing waits for
        ranks = None
        if ranked and flips.bounds[-1]:
            old = shadow
            if old is None:
                old = self.take(batch)
                self.put(old, flips)
            ranks = self._rank(batch, old, flips, now)
        if shadow is not None:
            self._put(shadow, flips, now)
        return DeviceDelivered(batch, flips, now, gains, ranks)

    @abstractmethod
    def _put(self, copied: Copied, flips: F, values: torch.Tensor) -> None:
        """Write ``values`` to the places of ``flips`` in a copy."""

    @abstractmethod
    def _gather(self, batch: Batch, flips: F) -> tuple[torch.Tensor, torch.Tensor]:
        """The bits that are now at the places of ``flips``, and what each tensor's digest gains."""

    @abstractmethod
    def _rank(self, batch: Batch, old: Copied, flips: F, now: torch.Tensor) -> DeviceRanks: ...


class DeviceDelivered:
    """Implements `Delivered` for flips that were found on a device."""

    def __init__(self, batch: Batch, flips: DeviceFlips, now: torch.Tensor, gains: Sums, ranks: DeviceRanks | None):
        self.gains = gains
        self._batch, self._bounds = batch, flips.bounds
        self._transit = Transit([flips.indices, flips.was, now, *(ranks or ())])

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        indices, was, now, *ranks = self._transit.arrays()
        gains = self.gains()
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
            change = Change(spec, places, was[mine].view(word), now[mine].view(word), int(gains[i]), found)
            kept = without_undone(change)
            if kept is not None:
                yield kept
