"""Decoding against live tensors on a GPU: coded blocks go there, and only what they change comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from weightcast.errors import FormatError, UsageError
from weightcast.format.codec.blocks import most_changes, problem_of
from weightcast.format.codec.coded import Blocks, Coded
from weightcast.format.digest import MODULUS
from weightcast.format.kernels.bands import BLOCK
from weightcast.format.kernels.tasks import MANY, OTHER_BASE
from weightcast.format.patch import TensorPatch, patch_of
from weightcast.format.tasks import Found
from weightcast.torch.batch import Batch, Slot, batches_of
from weightcast.torch.transit import Transit

if TYPE_CHECKING:
    from weightcast.torch.kernels.decoding import GpuDecoded


@runtime_checkable
class DecodingKernels(Protocol):
    """A set of kernels that decodes blocks."""

    def decode(self, batch: Batch, blocks: Sequence[Blocks], most: int) -> GpuDecoded: ...


@dataclass(frozen=True, eq=False)
class _Read:
    """What was read of one tensor's blocks: its changes, and for each block the number of them and an error or 0."""

    found: Found
    counts: npt.NDArray[np.int64]
    errors: npt.NDArray[np.int32]


class _Arriving:
    """What a batch's blocks change, in transit to the host."""

    def __init__(self, batch: Batch, coded: Sequence[Coded], decoded: GpuDecoded):
        self._batch, self._coded, self._bounds = batch, coded, decoded.flips.bounds
        indices = decoded.flips.indices.to(torch.int64)
        parts = decoded.errors, decoded.before, decoded.gains, indices, decoded.flips.was, decoded.now
        self._transit = Transit(parts)

    def tensors(self) -> Iterator[tuple[str, _Read]]:
        errors, before, gains, indices, was, now = self._transit.arrays()
        word = self._batch.kind.word
        was, now, counts = was.view(word), now.view(word), np.diff(before, append=self._bounds[-1])
        firsts = accumulate((-(-size // BLOCK) for size in self._batch.sizes), initial=0)
        for i, (one, first, (begin, end)) in enumerate(zip(self._coded, firsts, pairwise(self._bounds), strict=False)):
            found = Found(indices[begin:end], was[begin:end], now[begin:end], int(gains[i]) % MODULUS)
            there = [first + ordinal for ordinal, _ in one.row.blocks]
            yield one.row.spec.name, _Read(found, counts[there], errors[there])


def decode_in_place(
    slots: Mapping[str, Slot], kernels: Callable[[torch.device], DecodingKernels], coded: Sequence[Coded]
) -> list[TensorPatch]:
    """Decode blocks against tensors where they are; patches and errors are those of `weightcast.format.codec.blocks`.

    Nothing is written to the tensors.
    """
    rows = [one.row for one in coded]
    most, by_name = most_changes(rows), {one.row.spec.name: one for one in coded}
    arriving = []
    for batch in batches_of([slots[name] for name in by_name]):
        mine = [by_name[spec.name] for spec in batch.specs]
        blocks = [Blocks(one.row.blocks, one.streams["blocks"]) for one in mine]
        arriving.append(_Arriving(batch, mine, kernels(batch.device).decode(batch, blocks, most)))
    read = dict(one for batch in arriving for one in batch.tensors())
    _refuse_problems(coded, [read[row.spec.name] for row in rows], most)
    return [patch_of(row.spec, read[row.spec.name].found, row.digest) for row in rows]


def _refuse_problems(coded: Sequence[Coded], read: Sequence[_Read], most: int) -> None:
    """Raise what is wrong with the first block that is not good, in the order of the file."""
    total = sum(int(one.counts.sum()) for one in read)
    if total <= most and not any(one.errors.any() for one in read):
        return
    total = 0
    for one, mine in zip(coded, read, strict=True):
        spec = one.row.spec
        for (ordinal, nbytes), count, error in zip(one.row.blocks, mine.counts, mine.errors, strict=True):
            total += int(count)
            if error == OTHER_BASE:
                hint = "Let no other program write to the model while it follows a channel."
                raise UsageError("the tensor changed while it was read", tensor=spec.name, hint=hint)
            if error or total > most:
                needed = min(BLOCK, spec.elements - ordinal * BLOCK) * spec.kind.word.itemsize
                raise FormatError(problem_of(int(error) or MANY, nbytes, needed), tensor=spec.name)
