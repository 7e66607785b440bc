"""Flips of tensors as flips of the boxes that these are cut into, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from weightcast.format.boxes import Box, Place, natural_strides
from weightcast.format.codec.coded import Parts, Prepared
from weightcast.format.spec import TensorSpec
from weightcast.torch.batch import Batch, Copied, Slot

AT_ONCE = 1 << 28
"""Elements of tensors that are cut in one go: a copy of their old bits is taken."""


@dataclass(frozen=True, eq=False)
class CutTensor:
    """A tensor of a batch, and the boxes that it is cut into: a grid, in order of the offsets."""

    ordinal: int
    spec: TensorSpec
    boxes: tuple[Box, ...]

    def located(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For flat indices of the tensor: the box of each, and its flat index there."""
        coordinates = []
        box = torch.zeros_like(at)
        for axis, (size, stride) in enumerate(zip(self.spec.shape, natural_strides(self.spec.shape), strict=True)):
            rows = at // stride
            coordinates.append(rows - rows // size * size)
            starts = sorted({one.offset[axis] for one in self.boxes})
            if len(starts) > 1:
                edges = torch.tensor(starts[1:], device=at.device)
                box = box * len(starts) + torch.bucketize(coordinates[-1], edges, right=True)
        shapes, offsets = (
            torch.tensor(rows, device=at.device)
            for rows in ([one.shape for one in self.boxes], [one.offset for one in self.boxes])
        )
        local = torch.zeros_like(at)
        for axis, along in enumerate(coordinates):
            local = local * shapes[box, axis] + along - offsets[box, axis]
        return box, local


def old_boxes(cut: Sequence[CutTensor], before: Copied) -> Copied:
    """The old bits of all boxes of some tensors, as a batch of their own."""
    places = [(one, Place(one.spec, box)) for one in cut for box in one.boxes]
    nowhere = torch.empty(0, dtype=before.batch.word, device=before.batch.device)
    copied = Copied.room(Batch([Slot(place.part, nowhere) for _, place in places]))
    for target, (one, place) in zip(copied.words(), places, strict=True):
        within = tuple(slice(along.start, along.start + along.count) for along in place.box.ranges)
        target.view(place.box.shape).copy_(before.tensor(one.ordinal).view(one.spec.shape)[within])
    return copied


@dataclass(frozen=True, eq=False)
class BoxFlips:
    """Flips of the boxes of some tensors: those of box b are at ``bounds[b]:bounds[b + 1]``."""

    order: torch.Tensor
    """For each of them its place among the flips that they were found in."""
    indices: torch.Tensor
    bounds: list[int]


def flips_in(cut: Sequence[CutTensor], indices: torch.Tensor, bounds: Sequence[int]) -> BoxFlips:
    """The flips of some tensors of a batch, by box. Waits for their numbers."""
    boxes, local, places = [], [], []
    first = 0
    for one in cut:
        begin, end = bounds[one.ordinal], bounds[one.ordinal + 1]
        box, at = one.located(indices[begin:end].to(torch.int64))
        boxes.append(box + first)
        local.append(at)
        places.append(torch.arange(begin, end, device=indices.device))
        first += len(one.boxes)
    box = torch.cat(boxes)
    order = torch.argsort(box, stable=True)
    counts = torch.bincount(box, minlength=first).tolist()
    return BoxFlips(torch.cat(places)[order], torch.cat(local)[order], [0, *accumulate(counts)])


def parts_of(cut: Sequence[CutTensor], bounds: Sequence[int], prepared: Sequence[Prepared]) -> dict[int, Parts]:
    """What was prepared for each box, by the tensors of the batch; without boxes in which nothing changed."""
    spans, found = iter(zip(pairwise(bounds), prepared, strict=True)), {}
    for one in cut:
        mine = [(box, *next(spans)) for box in one.boxes]
        found[one.ordinal] = Parts(tuple((box, made) for box, (begin, end), made in mine if begin < end))
    return found
