"""One version, staged on the device that holds the parameters: what changes never comes to the host.

This is the way of a model on a GPU that follows each version as it comes. A tensor goes this way if each box that the
worker holds anything of is in one part as a whole, not cast, and there once. All others are decoded as
`weightcast.engine.decoding` says, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from weightcast.engine.held import Overlap, overlap_of
from weightcast.engine.layout import Part
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.errors import FormatError
from weightcast.format.codec import Coded
from weightcast.format.joined import Part as BoxOfObject
from weightcast.format.patchfile import PatchReader
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row
from weightcast.torch.batch import Slot
from weightcast.torch.decoder import BoxChange, DecodingKernels, decode_and_stage

_MOST_BOXES = 64
"""Of one tensor: each is compared with all others."""

Kernels = Callable[[torch.device], DecodingKernels | None]
"""What decodes blocks on a device; None if they are decoded on the host."""


@dataclass(frozen=True, eq=False)
class _Box:
    """A box of a tensor, and the part that has all of it."""

    overlap: Overlap
    reader: PatchReader
    row: Row

    @property
    def part(self) -> Part:
        return self.overlap.part


@dataclass(frozen=True, eq=False)
class DeviceTensor:
    """A tensor whose change can be staged where it is."""

    spec: TensorSpec
    parts: tuple[Part, ...]
    boxes: tuple[_Box, ...]

    @property
    def elements(self) -> int:
        return sum(box.row.place.box.elements for box in self.boxes)


def tensor_on_device(live: LiveParameters, spec: TensorSpec, rows: Sequence[BoxOfObject]) -> DeviceTensor | None:
    """The tensor, if its rows of one version can be decoded and staged where its parts are."""
    parts = live.layout.locate(spec.name)
    if len({part.box for part in parts}) < len(parts) or any(part.dtype != spec.dtype for part in parts):
        return None
    boxes: list[_Box] = []
    for reader, row in rows:
        overlaps = [one for one in (overlap_of(part, row.place.box) for part in parts) if one is not None]
        if not overlaps:
            continue
        is_whole = len(overlaps) == 1 and overlaps[0].within.shape == row.place.box.shape
        is_coded = reader.header.codec != "plain" and (row.blocks or not row.changed)
        if not is_whole or not is_coded or len(boxes) == _MOST_BOXES:
            return None
        boxes.append(_Box(overlaps[0], reader, row))
    if any(a.row.place.box.meets(b.row.place.box) for a, b in combinations(boxes, 2)):
        return None
    return DeviceTensor(spec, parts, tuple(boxes))


def stage_on_device(
    live: LiveParameters, tensors: Sequence[DeviceTensor], room: int | None, kernels: Kernels
) -> Prepared | None:
    """What one version changes in some tensors; None if there is no ``room``, or if anything is wrong with the objects.

    Then they are to be decoded in the other way, which says what is wrong.
    """
    by_device: dict[torch.device, list[_Box]] = {}
    for tensor in tensors:
        for box in tensor.boxes:
            if box.row.blocks:
                by_device.setdefault(live.view(box.part).device, []).append(box)
    prepared, gains, changed = Prepared(room), dict.fromkeys(_parts_of(tensors), 0), 0
    for device, boxes in by_device.items():
        decoding = kernels(device)
        if decoding is None:
            return None
        try:
            found = _decode(live, boxes, decoding, prepared)
        except FormatError:
            return None
        for box, one in zip(boxes, found, strict=True):
            if one.changed != box.row.changed:
                return None
            gains[box.part] += one.gain
            changed += one.changed
    if prepared.left is not None and prepared.left < 0:
        return None
    prepared.changed = changed
    prepared.boxes |= live.digests_after(gains)
    return prepared


def _parts_of(tensors: Iterable[DeviceTensor]) -> Iterator[Part]:
    return (part for tensor in tensors for part in tensor.parts)


def _decode(
    live: LiveParameters, boxes: Sequence[_Box], decoding: DecodingKernels, prepared: Prepared
) -> list[BoxChange]:
    coded: list[Coded] = [box.reader.coded(box.row) for box in boxes]
    slots, targets = [], []
    for box, one in zip(boxes, coded, strict=True):
        words = live.view(box.part)[box.overlap.inside].reshape(-1).contiguous()
        slots.append(Slot(one.row.spec, words))
        targets.append(live.strided(_part_of_box(box)))
    changes, found = decode_and_stage(slots, coded, targets, decoding)
    prepared.on_device += changes
    return found


def _part_of_box(box: _Box) -> Part:
    """The box alone, where its part has it."""
    part = box.part
    first = sum(along.start * stride for along, stride in zip(box.overlap.inside, part.strides, strict=True))
    return replace(part, box=box.row.place.box, offset=part.offset + first)
