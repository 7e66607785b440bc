"""What the kernel sets for devices share: flips and ranks as tensors, and how they are delivered to the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, TypeVar

import torch

from weightcast.format.codec import CodecName
from weightcast.format.codec.coded import Parts, Prepared
from weightcast.format.codec.ranks import Ranks
from weightcast.format.coding import Coding
from weightcast.format.kernels.bands import BLOCK, MAX_BANDS
from weightcast.format.scan import Change
from weightcast.format.tensors import Bits
from weightcast.format.workers import ONE
from weightcast.torch.batch import Batch, Copied, Kernels, Ledger, Sums, replacement, without_undone
from weightcast.torch.kernels.boxes import AT_ONCE, CutTensor, flips_in, old_boxes, parts_of
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
        self, batch: Batch, flips: F, coding: Coding, shadow: Copied | None, ledger: Ledger | None = None
    ) -> DeviceDelivered:
        now, sums = self._gather(batch, flips)
        gains = sums_in_transit(sums)  # before what follows, which nothing waits for
        prepared = None
        parts: list[ArrivingParts] = []
        if flips.bounds[-1]:
            before = self._before(batch, flips, shadow) if coding.is_banded else None
            ranks = None if before is None else self._rank(batch, before, flips, now)
            prepared = self._prepare(batch, flips, now, coding.codec, ranks)
            if before is not None:
                parts = list(self._parts(batch, before, flips, now, coding))
        if shadow is not None:
            self._put(shadow, flips, now)
        return DeviceDelivered(batch, flips, now, gains, prepared, parts)

    def _parts(
        self, batch: Batch, before: Copied, flips: F, now: torch.Tensor, coding: Coding
    ) -> Iterator[ArrivingParts]:
        """What the codec needs of the tensors that are cut into boxes."""
        changed = (i for i, (begin, end) in enumerate(pairwise(flips.bounds)) if begin < end)
        every = (CutTensor(i, batch.specs[i], coding.boxes(batch.specs[i])) for i in changed)
        cut = [one for one in every if one.boxes]
        for some in ONE.batches(cut, lambda one: one.spec.elements, AT_ONCE):
            old = old_boxes(some, before)
            found = flips_in(some, flips.indices, flips.bounds)
            inner = self._flips(old.batch, found.bounds, found.indices, flips.was[found.order])
            theirs = now[found.order]
            arriving = self._prepare(old.batch, inner, theirs, coding.codec, self._rank(old.batch, old, inner, theirs))
            assert arriving is not None
            yield ArrivingParts(some, found.bounds, arriving)

    def _before(self, batch: Batch, flips: F, shadow: Copied | None) -> Copied:
        """All bits as they were."""
        if shadow is not None:
            return shadow
        old = self.take(batch)
        self.put(old, flips)
        return old

    def _prepare(
        self, batch: Batch, flips: F, now: torch.Tensor, codec: CodecName, ranks: DeviceRanks | None
    ) -> Arriving | None:
        """What the codec needs, or its work done on the device."""
        return None if ranks is None else ArrivingRanks(batch, flips, ranks)

    @abstractmethod
    def _flips(self, batch: Batch, bounds: list[int], indices: torch.Tensor, was: torch.Tensor) -> F:
        """Flips that are known already, in the form of this set."""

    @abstractmethod
    def _put(self, copied: Copied, flips: F, values: torch.Tensor) -> None:
        """Write ``values`` to the places of ``flips`` in a copy."""

    @abstractmethod
    def _gather(self, batch: Batch, flips: F) -> tuple[torch.Tensor, torch.Tensor]:
        """The bits that are now at the places of ``flips``, and what each tensor's digest gains."""

    @abstractmethod
    def _rank(self, batch: Batch, old: Copied, flips: F, now: torch.Tensor) -> DeviceRanks: ...


class Arriving(Protocol):
    """What was prepared for the codec, in transit to the host."""

    def tensors(self) -> Sequence[Prepared]:
        """Wait for it: one for each tensor of the batch. Called once, on another thread."""
        ...


class ArrivingRanks:
    """Implements `Arriving` for kernel sets that leave coding to the host."""

    def __init__(self, batch: Batch, flips: DeviceFlips, ranks: DeviceRanks):
        self._sizes, self._bounds, self._transit = batch.sizes, flips.bounds, Transit(ranks)

    def tensors(self) -> list[Ranks]:
        ranks, bands, *tables = self._transit.arrays()
        uppers, sizes = (table.reshape(-1, MAX_BANDS) for table in tables)
        mine = [slice(*bounds) for bounds in pairwise(self._bounds)]
        blocks = [slice(*bounds) for bounds in pairwise([0, *accumulate(-(-size // BLOCK) for size in self._sizes)])]
        return [Ranks(ranks[i], bands[b], uppers[b], sizes[b]) for i, b in zip(mine, blocks, strict=True)]


@dataclass(frozen=True, eq=False)
class ArrivingParts:
    """The same for the boxes of some tensors."""

    cut: Sequence[CutTensor]
    bounds: Sequence[int]
    """Of the flips of all boxes."""
    arriving: Arriving

    def tensors(self) -> dict[int, Parts]:
        return parts_of(self.cut, self.bounds, self.arriving.tensors())


class DeviceDelivered:
    """Implements `Delivered` for flips that were found on a device."""

    def __init__(
        self,
        batch: Batch,
        flips: DeviceFlips,
        now: torch.Tensor,
        gains: Sums,
        prepared: Arriving | None,
        parts: list[ArrivingParts],
    ):
        """``parts`` are for tensors that are cut into boxes."""
        self.gains = gains
        self._batch, self._bounds, self._prepared, self._parts = batch, flips.bounds, prepared, parts
        undone = (flips.was == now).any().reshape(1)
        self._transit = Transit([undone, flips.indices.to(torch.int64), flips.was, now])

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        prepared: dict[int, Prepared | Parts] = {}
        if self._prepared is not None:
            prepared.update(enumerate(self._prepared.tensors()))
        for parts in self._parts:
            prepared |= parts.tensors()
        self._prepared, self._parts = None, []
        word = self._batch.kind.word
        undone, indices, was, now = self._transit.arrays()
        was, now, gains = was.view(word), now.view(word), self.gains().tolist()
        for i, (spec, (begin, end)) in enumerate(zip(self._batch.specs, pairwise(self._bounds), strict=True)):
            if i in replaced:
                yield replacement(spec, *replaced[i])
            elif begin < end:
                found = indices[begin:end], was[begin:end], now[begin:end]
                change = Change(spec, *found, gains[i], prepared.get(i))
                kept = without_undone(change) if undone[0] else change
                if kept is not None:
                    yield kept
