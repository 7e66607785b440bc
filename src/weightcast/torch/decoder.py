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
from weightcast.torch.strided import Strided
from weightcast.torch.transit import Transit

if TYPE_CHECKING:
    from weightcast.torch.kernels.decoding import GpuDecoded
    from weightcast.torch.kernels.parts import DeviceChanges


@runtime_checkable
class DecodingKernels(Protocol):
    """A set of kernels that decodes blocks."""

    def decode(self, batch: Batch, blocks: Sequence[Blocks], most: int) -> GpuDecoded: ...

    def stage(self, batch: Batch, decoded: GpuDecoded, targets: Sequence[Strided]) -> DeviceChanges: ...


@dataclass(frozen=True, eq=False)
class _Blocks:
    """For each block of a tensor the number of changes, and an error or 0."""

    counts: npt.NDArray[np.int64]
    errors: npt.NDArray[np.int32]


@dataclass(frozen=True)
class BoxChange:
    """How many elements of a box change, and what that adds to the digest of the box's tensor."""

    changed: int
    gain: int


class _Arriving:
    """What a batch's blocks change, in transit to the host."""

    def __init__(self, batch: Batch, coded: Sequence[Coded], decoded: GpuDecoded):
        self._batch, self._coded, self._bounds = batch, coded, decoded.flips.bounds
        indices = decoded.flips.indices.to(torch.int64)
        parts = decoded.errors, decoded.before, decoded.gains, indices, decoded.flips.was, decoded.now
        self._transit = Transit(parts)

    def tensors(self) -> Iterator[tuple[str, tuple[Found, _Blocks]]]:
        errors, before, gains, indices, was, now = self._transit.arrays()
        word = self._batch.kind.word
        was, now = was.view(word), now.view(word)
        blocks = _blocks_of(self._batch, self._coded, errors, before, self._bounds[-1])
        for i, (one, mine, (begin, end)) in enumerate(zip(self._coded, blocks, pairwise(self._bounds), strict=True)):
            found = Found(indices[begin:end], was[begin:end], now[begin:end], int(gains[i]) % MODULUS)
            yield one.row.spec.name, (found, mine)


def _blocks_of(
    batch: Batch, coded: Sequence[Coded], errors: npt.NDArray[np.int32], before: npt.NDArray[np.int64], end: int
) -> Iterator[_Blocks]:
    """``before`` are the changes before each block of the batch, ``end`` all of them."""
    counts = np.diff(before, append=end)
    firsts = accumulate((-(-size // BLOCK) for size in batch.sizes), initial=0)
    for one, first in zip(coded, firsts, strict=False):
        there = [first + ordinal for ordinal, _ in one.row.blocks]
        yield _Blocks(counts[there], errors[there])


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
    _refuse_problems(coded, [read[row.spec.name][1] for row in rows], most)
    return [patch_of(row.spec, read[row.spec.name][0], row.digest) for row in rows]


def decode_and_stage(
    slots: Sequence[Slot], coded: Sequence[Coded], targets: Sequence[Strided], kernels: DecodingKernels
) -> tuple[list[DeviceChanges], list[BoxChange]]:
    """Decode blocks of boxes on one device, and leave what they change there, ready to be written to ``targets``.

    A slot, coded blocks and a target for each box; a slot has the box's old bits. Errors are those of
    `decode_in_place`. Nothing is written.
    """
    most, index = most_changes([one.row for one in coded]), {slot: i for i, slot in enumerate(slots)}
    launched = []
    for batch in batches_of(slots):
        mine = [index[slot] for slot in batch.slots]
        blocks = [Blocks(coded[i].row.blocks, coded[i].streams["blocks"]) for i in mine]
        decoded = kernels.decode(batch, blocks, most)
        changes = kernels.stage(batch, decoded, [targets[i] for i in mine])
        launched.append((batch, mine, decoded, changes, Transit([decoded.errors, decoded.before, changes.gains])))
    found: dict[int, tuple[BoxChange, _Blocks]] = {}
    for batch, mine, decoded, _, transit in launched:
        errors, before, gains = transit.arrays()
        bounds = decoded.flips.bounds
        blocks_of = _blocks_of(batch, [coded[i] for i in mine], errors, before, bounds[-1])
        for i, (begin, end), gain, results in zip(mine, pairwise(bounds), gains.tolist(), blocks_of, strict=True):
            found[i] = BoxChange(end - begin, gain % MODULUS), results
    _refuse_problems(coded, [found[i][1] for i in range(len(coded))], most)
    return [changes for *_, changes, _ in launched], [found[i][0] for i in range(len(coded))]


def _refuse_problems(coded: Sequence[Coded], read: Sequence[_Blocks], most: int) -> None:
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
