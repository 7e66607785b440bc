"""Patch objects of boxes that every reader has to reject, clause by clause (SPEC 8)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from boxes import Boxes, Cut
from checkpoints import Tensor, Tensors, some_bits, vector
from objects import Object, varint

import weightcast as wc
from weightcast.format.digest import tensor_digest
from weightcast.format.spec import DTYPES

BOX_BASE = "boxes.old.safetensors"
UPPER, LOWER, NAMESAKE, PACK, SCALAR = range(5)  # rows

HALVES: Boxes = {"a": [((0, 0), (2, 6)), ((2, 1), (2, 4))], "b": [], "pack": [], "s": []}


def box_base() -> Tensors:
    return {
        "a": Tensor("BF16", (4, 6), some_bits(Random(31), "BF16", 24)),
        "a[2,1]": vector("U8", [1, 2, 3]),
        "b": vector("U8", [1, 2, 3]),
        "pack": Tensor("F4", (4, 4), list(range(8))),
        "s": Tensor("F32", (), [0x3F800000]),
    }


def changed_at(*places: int) -> Tensors:
    """The base with some elements of `a` changed, and the first of all others."""
    old = box_base()
    new = {name: replace(tensor, bits=[tensor.bits[0] ^ 1, *tensor.bits[1:]]) for name, tensor in old.items()}
    new["a[2,1]"] = old["a[2,1]"]
    return {**new, "a": replace(old["a"], bits=[b + (i in places) for i, b in enumerate(old["a"].bits)])}


@dataclass(frozen=True)
class InMemory:
    """Weights of any dtype, also of those that `wc.Arrays` cannot hold."""

    table: wc.TensorTable
    tensors: Tensors

    def read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return np.array(tensor.bits, DTYPES[tensor.dtype].word)


class Maker:
    """Makes honest objects of a patch from the base."""

    def __init__(self, old: wc.Checkpoint):
        self.old = old

    def cut(self, codec: str, boxes: Boxes, places: tuple[int, ...] = (2, 5, 13, 22)) -> Object:
        """A patch that changes ``places`` of `a`."""
        patch = wc.diff(self.old, InMemory(self.old.table, changed_at(*places)))
        return Object.parse(Cut(codec, boxes).encode(patch, self.old))

    def first(self, boxes: Boxes, places: tuple[int, ...]) -> Object:
        """A patch without a base."""
        patch = wc.anchor(InMemory(self.old.table, changed_at(*places)))
        return Object.parse(Cut("plain", boxes).encode(patch, None))


def broken_boxes(make: Maker) -> Iterator[tuple[str, bytes]]:
    """8.3"""
    item, plain = make.cut("banded", HALVES), make.cut("plain", HALVES)
    rows = item.rows()
    yield "box-outside-its-tensor", item.row(LOWER, box=((2, 3), (2, 4))).bytes()
    yield "box-far-outside-its-tensor", item.row(LOWER, box=((2, 1 << 61), (2, 4))).bytes()
    yield "plain-box-outside-its-tensor", plain.row(LOWER, box=((3, 1), (2, 4))).bytes()
    alone = make.cut("banded", {"a": [((0, 0), (4, 6))]})
    yield "box-of-all-of-its-tensor", alone.row(0, box=((0, 0), (4, 6))).bytes()
    scalar = make.cut("banded", {"s": []})
    yield "box-of-a-scalar", scalar.row(0, box=((), ())).bytes()
    yield "box-of-packed-values", make.cut("banded", {"pack": []}).row(0, box=((0, 0), (2, 4))).bytes()
    yield "box-of-no-elements", item.row(LOWER, box=((2, 1), (2, 0))).bytes()
    yield "more-changed-than-the-box-has", item.row(LOWER, changed=9).bytes()
    size = rows[LOWER].blocks[0][1]
    yield "block-outside-its-box", item.row(LOWER, blocks=((1, size),)).bytes()
    yield "boxes-out-of-order", in_blocks(item, [LOWER, UPPER, *range(2, 5)][: len(rows)]).bytes()
    yield "box-twice", in_blocks(item, [UPPER, UPPER, *range(1, len(rows))]).bytes()
    overlapping = {"a": [((0, 0), (3, 6)), ((1, 0), (3, 6))]}
    yield "boxes-of-more-elements-than-the-tensor", make.cut("banded", overlapping, (2, 22)).bytes()
    yield "two-rows-with-the-same-label", item.row(NAMESAKE, name=b"a[2,1]").bytes()
    yield "more-boxes-than-rows-allowed", many_boxes(item, (1 << 18) + 1).bytes()
    yield "number-of-boxes-that-overflows", many_boxes(item, (1 << 63) - 1).bytes()
    table = item.table()
    yield "boxes-cut-off", item.with_table(table[: table.index(bytes([2, 6, 2, 4]))]).bytes()


def in_blocks(item: Object, order: list[int]) -> Object:
    """The rows in another order or repeated, each with its own blocks."""
    rows, raw = item.rows(), item.entries["weightcast.blocks"][2]
    ends = np.cumsum([0, *(sum(size for _, size in row.blocks) for row in rows)]).tolist()
    blocks = b"".join(raw[ends[i] : ends[i + 1]] for i in order)
    return item.listing("weightcast.blocks", "U8", blocks).with_rows([rows[i] for i in order])


def many_boxes(item: Object, count: int) -> Object:
    """One tensor of which the table says that it has so many boxes, and then has 1,000."""
    names = varint(0) + varint(1) + b"a"
    numbers = b"".join(map(varint, [14, 2, 4, 6, count]))
    packed = zlib.compress(table := names + numbers + bytes(4000), 9)
    item = item.listing("weightcast.table", "U8", packed).stating(table=len(table))
    return item.with_digests(item.digests()[:1])


def broken_box_streams(make: Maker) -> Iterator[tuple[str, bytes]]:
    """8.4"""
    plain, label = make.cut("plain", HALVES), "a[2,1]"
    values = plain.entries[f"{label}.values"]
    yield "box-under-the-name-of-its-tensor", plain.without(f"{label}.values").entry("a.values", values).bytes()
    yield "no-values-of-a-box", plain.without(f"{label}.values").bytes()
    yield "indices-of-a-box-that-is-not-there", plain.listing("a[1,1].indices", "I32", bytes(4)).bytes()
    outside = np.array([1, 8], "<i4").tobytes()
    yield "index-out-of-the-box", plain.listing(f"{label}.indices", "I32", outside).bytes()
    bits = changed_at(2, 5, 13, 22)["a"].raw()
    all_of_it = plain.without(f"{label}.indices").entry(f"{label}.values", ("BF16", (4, 6), bits))
    yield "values-of-the-tensor-for-a-box", all_of_it.bytes()
    yield "no-base-and-a-box-missing", half_of_a_tensor(make).bytes()


def half_of_a_tensor(make: Maker) -> Object:
    """Without a base, rows 0 and 1 of `a` alone, with digests that belong to a tensor of those rows.

    A reader that digests what came, and does not ask whether it is all of the tensor, takes this for good.
    """
    item = make.first({**HALVES, "a": [((0, 0), (2, 6))], "a[2,1]": []}, (2, 5))
    new = InMemory(make.old.table, changed_at(2, 5))
    digests = dict(zip((spec.name for spec in new.table), item.digests(), strict=True))
    digests["a"] = int(tensor_digest(new.read("a")[:12])).to_bytes(8, "little")
    numbers = tuple(int.from_bytes(digest, "little") for digest in digests.values())
    result = wc.Fingerprint(make.old.table, numbers).digest
    return item.with_digests(list(digests.values())).stating(result=result)


def broken_box_blocks(make: Maker) -> Iterator[tuple[str, bytes]]:
    """8.5"""
    item = make.cut("banded", HALVES)
    raw = b"\0" + changed_at(2, 5, 13, 22)["a"].raw()
    yield "raw-block-of-the-tensor-for-a-box", item.with_block(LOWER, raw).bytes()


def broken_box_counts(make: Maker) -> Iterator[tuple[str, bytes]]:
    """8.6"""
    item, plain = make.cut("banded", HALVES), make.cut("plain", HALVES)
    yield "another-count-of-a-box", item.row(LOWER, changed=1).bytes()
    yield "another-count-of-a-plain-box", plain.row(LOWER, changed=1).bytes()
    yield "box-elsewhere-in-its-tensor", item.row(LOWER, box=((2, 2), (2, 4))).bytes()


def broken_objects(make: Maker) -> Iterator[tuple[str, bytes, bytes]]:
    """What is broken (8.6.4), an object, and a good one that it is beside."""
    upper, lower = ({"a": [box]} for box in HALVES["a"])
    first = make.cut("banded", {**HALVES, **upper})
    second = make.cut("gap", lower)
    yield "objects-of-another-base", second.stating(base="0" * 64).bytes(), first.bytes()
    yield "objects-of-another-result", second.stating(result="0" * 64).bytes(), first.bytes()
    yield "objects-that-disagree-about-a-digest", second.with_digests([bytes(8)]).bytes(), first.bytes()
    yield "box-in-two-objects", first.bytes(), first.bytes()
    everything = make.cut("banded", {"a": []})
    yield "tensor-beside-a-box-of-it", everything.bytes(), first.bytes()
    common = make.cut("gap", {"a": [((1, 0), (1, 6)), ((2, 1), (2, 4))]}, (2, 7, 13, 22))
    beside = make.cut("banded", {**HALVES, **upper}, (2, 7, 13, 22))
    yield "element-changed-in-two-objects", common.bytes(), beside.bytes()


BROKEN: Mapping[str, object] = {
    "8.3": broken_boxes,
    "8.4": broken_box_streams,
    "8.5": broken_box_blocks,
    "8.6": broken_box_counts,
}


def broken_box_cases(old: wc.Checkpoint) -> Iterator[tuple[str, str, bytes, list[bytes]]]:
    """Clause, what is broken, patch, good objects beside it."""
    make = Maker(old)
    for clause, makers in BROKEN.items():
        for what, data in makers(make):  # type: ignore[operator]
            yield clause, what, data, []
    for what, data, beside in broken_objects(make):
        yield "8.6", what, data, [beside]
