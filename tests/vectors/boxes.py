"""Patches whose objects hold boxes of tensors (SPEC 2.6), and the weights before and after of the good ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from checkpoints import Tensor, Tensors, some_bits, vector
from good import BLOCK, CODECS, moved

import weightcast as wc
from weightcast.format.boxes import Box, Place, place_of, whole
from weightcast.format.coding import cut_tensor
from weightcast.format.patchfile import encode_boxes
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE

Offset = Size = tuple[int, ...]
Boxes = Mapping[str, Sequence[tuple[Offset, Size]]]
"""Boxes of some tensors as offset and size; none for all of a tensor."""


@dataclass(frozen=True)
class Cut:
    """One object: its codec, and what it holds."""

    codec: str
    boxes: Boxes

    def encode(self, patch: wc.Patch, old: Weights | None) -> bytes:
        tensors, places, bits = [], {}, {}
        for tensor in patch.tensors:
            if tensor.spec.name not in self.boxes:
                continue
            for place, part in cut_tensor(tensor, self._places(tensor.spec)):
                tensors.append(part)
                places[place.label] = place
                if old is not None:
                    bits[place.label] = place.read(old.read(tensor.spec.name))
        return encode_boxes(replace(patch, tensors=tuple(tensors)), self.codec, places, bits, ONE)

    def _places(self, spec: wc.TensorSpec) -> list[Place]:
        given = [Box.of(*box) for box in self.boxes[spec.name]]
        return [place_of(spec, box) for box in given or [whole(spec.shape)]]


def every_shape() -> tuple[Tensors, Tensors]:
    rng = Random(20)
    shapes = {
        "columns": ("BF16", (6, 20)),
        "cube": ("I16", (3, 4, 5)),
        "line": ("U8", (30,)),
        "rows": ("F32", (8, 12)),
        "scalar": ("F32", ()),
        "still": ("BF16", (4, 4)),
        "vector": ("BF16", (9,)),
    }
    old = {}
    for name, (dtype, shape) in shapes.items():
        count = 1
        for size in shape:
            count *= size
        old[name] = Tensor(dtype, shape, some_bits(rng, dtype, count))
    new = {name: moved(rng, tensor, 1.0 if name in ("scalar", "line") else 0.4) for name, tensor in old.items()}
    new["still"] = replace(old["still"], bits=[*old["still"].bits[:15], old["still"].bits[15] ^ 1])
    return old, new


EVERY_SHAPE: Boxes = {
    "columns": [((0, 0), (6, 7)), ((0, 7), (6, 6)), ((0, 13), (6, 7))],
    "cube": [((0, 1, 0), (3, 2, 5)), ((0, 3, 2), (3, 1, 3)), ((1, 0, 4), (1, 1, 1)), ((2, 0, 0), (1, 1, 4))],
    "line": [((0,), (11,)), ((11,), (19,))],
    "rows": [((0, 0), (3, 12)), ((3, 0), (5, 12))],
    "scalar": [],
    "still": [((0, 0), (2, 4)), ((2, 0), (2, 4))],  # nothing changed in the first, so it is left out
    "vector": [],
}
"""Of `cube` some elements are in no box: those do not change."""


def some_of_the_cube() -> tuple[Tensors, Tensors]:
    old, new = every_shape()
    bits, shape = list(old["cube"].bits), old["cube"].shape
    for (a, b, c), (x, y, z) in EVERY_SHAPE["cube"]:
        for i in range(a, a + x):
            for j in range(b, b + y):
                for k in range(c, c + z):
                    at = (i * shape[1] + j) * shape[2] + k
                    bits[at] = new["cube"].bits[at]
    return old, {**new, "cube": replace(old["cube"], bits=bits)}


def far_box() -> tuple[Tensors, Tensors]:
    """Boxes that begin and end beyond the first block of the tensor, and have blocks of their own."""
    shape = (2, BLOCK // 2 + 700)
    bits = list(range(0x20, 0x40)) * (shape[0] * shape[1] // 32 + 1)
    old = Tensor("F8_E4M3", shape, bits[: shape[0] * shape[1]])
    new = list(old.bits)
    for at in (*range(shape[1] - 300, shape[1], 7), *range(2 * shape[1] - 300, 2 * shape[1], 5)):
        new[at] += 1
    return {"w": old}, {"w": replace(old, bits=new)}


def labels() -> tuple[Tensors, Tensors]:
    """Names that look like labels of other tensors' boxes, which are not in the same object."""
    rng = Random(21)
    names = ["a", "a[0]", "a[0][2]", "a[2", "a[4]", "a[4].values"]
    old = {name: vector("BF16", some_bits(rng, "BF16", 8)) for name in names}
    return old, {name: moved(rng, tensor, 1.0) for name, tensor in old.items()}


LABELS = [((1,), (3,)), ((5,), (3,))]
OTHER_LABELS = [((0,), (1,)), ((4,), (1,))]


def box_cases() -> Iterator[tuple[str, Tensors, Tensors, list[Cut]]]:
    """Name, weights before and after, objects."""
    old, new = some_of_the_cube()
    for codec in CODECS:
        yield f"{codec}-boxes", old, new, [Cut(codec, EVERY_SHAPE)]
    objects = [
        Cut("banded", {name: EVERY_SHAPE[name][:1] for name in ("columns", "cube", "line", "rows", "vector")}),
        Cut("plain", {name: EVERY_SHAPE[name][1:2] for name in ("columns", "cube", "line", "rows", "still")}),
        Cut("gap", {**{name: EVERY_SHAPE[name][2:] for name in ("columns", "cube")}, "scalar": []}),
    ]
    yield "banded-three-objects", old, new, objects
    width = far_box()[0]["w"].shape[1]
    yield "banded-far-box", *far_box(), [Cut("banded", {"w": [((0, width - 301), (2, 301))]})]
    long = Cut("gap", {"w": [((0, 1), (2, width - 1))]})
    yield "gap-box-of-two-blocks", *far_box(), [long]
    named = labels()
    several = {
        "a": LABELS,
        "a[0]": [((0,), (2,)), ((3,), (5,))],
        "a[0][2]": [],
        "a[2": [],
        "a[4]": [],
        "a[4].values": [],
    }
    left = {"a": OTHER_LABELS, "a[0]": [((2,), (1,))]}
    for codec in ("plain", "banded"):
        yield f"{codec}-labels", *named, [Cut(codec, several), Cut(codec, left)]


def whole_in_boxes(tensors: Tensors) -> list[Cut]:
    """All of the weights in two objects, some of their tensors cut."""
    halves = {"columns": [((0, 0), (6, 7))], "rows": [((0, 0), (3, 12))]}
    rest = {"columns": [((0, 7), (6, 13))], "rows": [((3, 0), (5, 12))]}
    return [Cut("plain", halves), Cut("plain", {**rest, **{name: [] for name in tensors if name not in halves}})]
