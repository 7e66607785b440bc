"""Cutting a patch into boxes, so that who holds only a part of a tensor can decode that part (SPEC 5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Place, place_of
from weightcast.format.codec import check_codec
from weightcast.format.patch import Patch, TensorPatch
from weightcast.format.patchfile import base_bits, encode_boxes
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Bits, Weights
from weightcast.format.workers import ONE, Workers


def columns(spec: TensorSpec, parts: int) -> list[Place]:
    """A tensor's last dimension cut into so many boxes, or into as many as it has coordinates."""
    if parts < 1:
        raise UsageError(f"a tensor cannot be cut into {parts} boxes", tensor=spec.name)
    if len(spec.shape) < 2 or spec.kind.per_value < 8:
        return [place_of(spec, Box.of([0] * len(spec.shape), spec.shape))]
    *rows, width = spec.shape
    edges = [width * i // parts for i in range(parts + 1)]
    return [
        place_of(spec, Box.of([*[0] * len(rows), begin], [*rows, end - begin]))
        for begin, end in pairwise(edges)
        if end > begin
    ]


def cut_tensor(patch: TensorPatch, places: Sequence[Place]) -> list[tuple[Place, TensorPatch]]:
    """The parts of a tensor's patch that are in some boxes; those without changes are left out."""
    found = []
    for place in places:
        chosen, local = place.within(patch.indices)
        if chosen.size:
            old = None if patch.old is None else patch.old[chosen]
            found.append((place, TensorPatch(place.part, local, patch.new[chosen], old, patch.digest)))
    return found


def encode_cut(
    patch: Patch,
    places: Mapping[str, Sequence[Place]],
    codec: str = "banded",
    old: Weights | None = None,
    workers: Workers = ONE,
) -> bytes:
    """`encode`, with some tensors cut into ``places`` that cover them; ``old`` is the base, which `banded` needs."""
    check_codec(codec)
    boxes: dict[str, Place] = {}
    parts: list[TensorPatch] = []
    bits: dict[str, Bits] = {}
    for tensor in patch.tensors:
        cuts = places.get(tensor.spec.name) or columns(tensor.spec, 1)
        cut = cut_tensor(tensor, cuts)
        if sum(part.changed for _, part in cut) != tensor.changed:
            raise UsageError("the boxes do not cover the tensor, each element once", tensor=tensor.spec.name)
        for place, part in cut:
            if boxes.setdefault(place.label, place) != place:
                raise UsageError("a tensor has the label of another one's box", tensor=place.label)
            parts.append(part)
            if old is not None:
                bits[place.label] = place.read(base_bits(tensor, old))
    return encode_boxes(replace(patch, tensors=tuple(parts)), codec, boxes, bits, workers)
