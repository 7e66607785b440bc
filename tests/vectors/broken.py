"""Patch objects that every reader has to reject, clause by clause (SPEC 8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from checkpoints import Tensor, Tensors, layout, some_bits, vector, with_header, with_text
from objects import K0, NOTHING, Object, Row, gaps, rice, tiny_bits, to_bytes, u

import weightcast as wc
from weightcast.format.spec import DTYPES

BASE, WIDE_BASE = "base.old.safetensors", "wide.old.safetensors"
HALF, PACK, TINY = 0, 1, 2  # rows; `still` has none


def base_weights() -> tuple[Tensors, Tensors]:
    old = {
        "half": Tensor("BF16", (4, 5), some_bits(Random(11), "BF16", 20)),
        "pack": Tensor("F4", (2, 2), [0x12, 0x34]),
        "still": vector("F32", [0x3F800000, 0, 0x80000000]),
        "tiny": vector("I8", [0, 1, 2, 3, 4, 5]),
    }
    half = [b + {3: 1, 9: 5, 10: -1}.get(i, 0) for i, b in enumerate(old["half"].bits)]
    new = {"half": replace(old["half"], bits=half), "pack": Tensor("F4", (2, 2), [0x12, 0x35])}
    return old, {**old, **new, "tiny": vector("I8", [0, 2, 2, 3, 1, 5])}


@dataclass(frozen=True)
class Good:
    """What the broken ones are made of."""

    plain: Object
    banded: Object
    anchor: Object


def broken_containers(good: Good) -> Iterator[tuple[str, bytes]]:
    data = good.banded.bytes()
    header, body = good.banded.header()
    text = data[8 : len(data) - len(body)]
    yield "short-file", data[:7]
    yield "shorter-than-its-header", data[: 8 + len(text) - 1]
    yield "header-over-limit", (100_000_001).to_bytes(8, "little") + data[8:]
    yield "header-not-utf8", with_text(text.replace(b"weightcast.blocks", b"weightcast.block\xff"), body)
    yield "header-not-json", with_text(text.rstrip()[:-1], body)
    yield "header-not-an-object", with_text(b"[" + text.rstrip() + b"]", body)
    twice = b'"weightcast.blocks":' + json.dumps(header["weightcast.blocks"]).encode()
    yield "key-twice", with_text(b"{" + twice + b"," + text.strip()[1:], body)

    def editing(name: str, **fields: Any) -> bytes:
        return with_header({**header, name: {**header[name], **fields}}, body)

    digests, blocks, table = (header[f"weightcast.{name}"] for name in ("digests", "blocks", "table"))
    yield "other-fields", editing("weightcast.blocks", note="")
    yield (
        "missing-field",
        with_header({**header, "weightcast.table": {k: v for k, v in table.items() if k != "shape"}}, body),
    )
    yield "unknown-dtype", editing("weightcast.table", dtype="U7")
    yield "65-dimensions", editing("weightcast.table", shape=[1] * 64 + table["shape"])
    yield "over-2-to-the-48-values", editing("weightcast.table", shape=[1 << 24, 1 << 25])
    yield "shape-and-offsets-disagree", editing("weightcast.table", shape=[table["shape"][0] - 1])
    yield "dtype-and-offsets-disagree", editing("weightcast.table", dtype="U16")
    start, end = blocks["data_offsets"]
    yield (
        "entries-overlap",
        editing("weightcast.blocks", shape=[end - start + 1], data_offsets=[start - 1, end]),
    )
    yield "hole", editing("weightcast.blocks", shape=[end - start - 1], data_offsets=[start + 1, end])
    yield "data-behind-the-last-entry", data + b"\0"
    yield "data-cut-off", data[:-1]
    assert digests["data_offsets"][1] == start
    assert table["data_offsets"][0] == end


def broken_metadata(good: Good) -> Iterator[tuple[str, bytes]]:
    item = good.banded
    yield "no-metadata", layout(item.entries)
    yield "another-key", item.bytes({"weightcast": item.text(), "format": "pt"})
    yield "not-json", item.bytes({"weightcast": item.text()[:-1]})
    yield "not-an-object", item.bytes({"weightcast": f"[{item.text()}]"})
    header, body = item.header()
    yield "lone-surrogate", with_text(json.dumps({**header, "__metadata__": {"weightcast": "\ud800"}}).encode(), body)
    yield "field-twice", item.bytes({"weightcast": '{"table":0,' + item.text()[1:]})
    yield "other-field", item.stating(note="").bytes()
    yield "missing-field", replace(item, meta={k: v for k, v in item.meta.items() if k != "model"}).bytes()
    # Of an unknown format nothing else may be judged, so all else is strange as well.
    yield "unknown-format", item.stating(format=2, codec="new", base=0, table=-1, note="").bytes()
    yield "format-not-a-number", item.stating(format="1").bytes()
    yield "unknown-codec", item.stating(codec="zstd").bytes()
    yield "base-in-capitals", item.stating(base="A" + item.meta["base"][1:]).bytes()
    yield "result-too-short", item.stating(result=item.meta["result"][1:]).bytes()
    yield "result-null", item.stating(result=None).bytes()
    yield "table-over-limit", item.stating(table=(1 << 26) + 1).bytes()
    yield "no-base-but-banded", item.stating(base=None).bytes()
    yield "model-of-two-numbers", item.stating(model=item.meta["model"][:2]).bytes()
    yield "model-too-large", item.stating(model=[1 << 63, 0, 0]).bytes()


def broken_tables(good: Good) -> Iterator[tuple[str, bytes]]:
    item, rows = good.banded, good.banded.rows()
    stream, table, digests = item.entries["weightcast.table"][2], item.table(), item.digests()
    yield "zlib-broken", item.listing("weightcast.table", "U8", stream[:-1] + bytes([stream[-1] ^ 1])).bytes()
    yield "zlib-cut-off", item.listing("weightcast.table", "U8", stream[:-1]).bytes()
    yield "zlib-followed-by-bytes", item.listing("weightcast.table", "U8", stream + b"\0").bytes()
    yield "table-longer-than-stated", item.stating(table=len(table) - 1).bytes()
    yield "table-shorter-than-stated", item.stating(table=len(table) + 1).bytes()
    yield "more-rows-than-digests", item.with_digests(digests[:-1]).bytes()
    yield "fewer-rows-than-digests", item.with_digests([*digests, bytes(8)]).bytes()
    yield "name-not-utf8", item.row(TINY, name=b"tin\xff").bytes()
    names_swapped = [replace(rows[0], name=rows[1].name), replace(rows[1], name=rows[0].name), rows[2]]
    yield "names-unsorted", item.with_rows(names_swapped).bytes()
    yield "name-twice", item.row(PACK, name=b"half").bytes()
    yield "name-shares-more-than-there-is", item.with_table(b"\x01" + table[1:]).bytes()
    yield "name-over-4096-bytes", item.row(TINY, name=b"tt" + bytes(4095)).bytes()
    yield "varint-cut-off", item.with_table(table[:-1] + bytes([table[-1] | 128])).bytes()
    yield "varint-too-long", item.with_table(table[:-1] + bytes([table[-1] | 128]) + b"\x80" * 8 + b"\0").bytes()
    yield "table-ends-early", item.with_table(table[:-1]).bytes()
    yield "bytes-behind-the-last-column", item.with_table(table + b"\0").bytes()
    yield "unknown-dtype-code", item.row(HALF, code=22).bytes()
    yield "65-dimensions", item.row(HALF, shape=(1,) * 63 + (4, 5)).bytes()
    yield "over-2-to-the-48-values", item.row(HALF, shape=(1 << 24, (1 << 24) + 1)).bytes()
    yield "packed-values-in-half-a-byte", item.row(PACK, shape=(3,)).bytes()
    yield "nothing-changed", item.row(TINY, changed=0).bytes()
    yield "more-changed-than-there-are", item.row(TINY, changed=7).bytes()
    size = rows[TINY].blocks[0][1]
    yield "block-outside-its-tensor", item.row(TINY, blocks=((1, size),)).bytes()
    yield "second-block-outside-its-tensor", item.row(TINY, blocks=((0, size - 1), (0, 1))).bytes()
    yield "block-of-no-bytes", item.row(TINY, blocks=((0, 0),)).bytes()
    yield "plain-with-blocks", good.plain.row(TINY, blocks=((0, 1),)).bytes()
    yield "banded-without-blocks", item.row(TINY, blocks=()).bytes()


def broken_bombs(good: Good) -> Iterator[tuple[str, bytes]]:
    """Small files that a careless reader makes much of (8.7)."""
    count, length = 100, 1 << 20
    names = [b"a" * (length + i) for i in range(count - 1)]
    rows = [Row(name, 4, (1,), 1, ((0, 1),)) for name in [*names, names[-1]]]
    long = good.banded.with_rows(rows).with_digests([bytes(8)] * count)
    yield "long-names-that-share", long.listing("weightcast.blocks", "U8", bytes(count)).bytes()
    yield "table-of-zeros", good.banded.with_table(bytes(1 << 22)).with_digests([]).bytes()


def broken_wide_streams(old: wc.Checkpoint) -> Iterator[tuple[str, bytes]]:
    """I64 indices whose differences, modulo 2^64, are all positive.

    As addresses of 8-byte elements they wrap round to the tensor itself, and the digests are those of such indices: a
    reader that checks differences only, and not bounds, takes this for good.
    """
    bits = old.read("w")
    far = 3 << 61
    indices = np.array([0, far + 1, 2 - far - bits.size, 3], np.int64)
    spec, before = old.table["w"], wc.fingerprint(old)
    digest = (before["w"] + wc.TensorPatch(spec, indices, bits + 1, bits, 0).digest_change()) % (1 << 64)
    new = InMemory(old.table, {"w": vector("U64", (bits + 1).tolist())})
    item = Object.parse(wc.encode(wc.diff(old, new), "plain", old=old))
    item = item.with_digests([digest.to_bytes(8, "little")]).stating(result=wc.Fingerprint(old.table, (digest,)).digest)
    item = item.listing("w.values", "U64", (bits + 1).tobytes()).listing("w.indices", "I64", indices.tobytes())
    yield "indices-that-overflow", item.bytes()


def broken_streams(good: Good) -> Iterator[tuple[str, bytes]]:
    plain, banded = good.plain, good.banded
    yield "no-digests", banded.without("weightcast.digests").bytes()
    yield "no-table", banded.without("weightcast.table").bytes()
    yield "no-blocks", banded.without("weightcast.blocks").bytes()
    yield "no-values", plain.without("half.values").bytes()
    table = banded.entries["weightcast.table"]
    yield "table-of-another-dtype", banded.entry("weightcast.table", ("I8", *table[1:])).bytes()
    yield "table-of-two-dimensions", banded.entry("weightcast.table", ("U8", (1, *table[1]), table[2])).bytes()
    yield "indices-without-a-base", plain.stating(base=None).bytes()
    yield "entry-of-no-tensor", plain.entry("still.values", ("F32", (3,), bytes(12))).bytes()
    yield "indices-of-no-tensor", plain.listing("still.indices", "I32", bytes(4)).bytes()
    yield "plain-with-an-entry-of-blocks", plain.listing("weightcast.blocks", "U8", b"").bytes()
    yield "banded-with-values", banded.listing("tiny.values", "I8", bytes(6)).bytes()

    def indexed(indices: list[int], dtype: str = "I32") -> bytes:
        return plain.listing("half.indices", dtype, np.array(indices, np.int64).astype("<i4").tobytes()).bytes()

    yield "index-out-of-range", indexed([3, 9, 20])
    yield "index-negative", indexed([-3, 9, 10])
    yield "indices-unsorted", indexed([9, 3, 10])
    yield "index-twice", indexed([3, 9, 9])
    yield "indices-of-another-dtype", indexed([3, 9, 10], "U32")
    values = plain.entries["half.values"][2]
    still = base_weights()[0]["half"].bits[3].to_bytes(2, "little")
    yield "element-that-does-not-change", plain.listing("half.values", "BF16", still + values[2:]).bytes()
    yield "more-values-than-indices", plain.listing("half.values", "BF16", values + bytes(2)).bytes()
    yield "fewer-values-than-indices", plain.listing("half.values", "BF16", values[:-2]).bytes()
    yield "values-of-another-dtype", plain.listing("half.values", "F16", values).bytes()
    dtype, shape, raw = plain.entries["tiny.values"]
    assert (dtype, shape) == ("I8", (6,))
    yield "all-values-of-another-dtype", plain.entry("tiny.values", ("U8", shape, raw)).bytes()
    yield "all-values-of-another-shape", plain.entry("tiny.values", ("I8", (2, 3), raw)).bytes()
    blocks = banded.entries["weightcast.blocks"][2]
    yield "more-block-bytes-than-stated", banded.listing("weightcast.blocks", "U8", blocks + b"\0").bytes()
    yield "fewer-block-bytes-than-stated", banded.listing("weightcast.blocks", "U8", blocks[:-1]).bytes()


def broken_blocks(good: Good) -> Iterator[tuple[str, bytes]]:
    def tiny(block: bytes) -> bytes:
        return good.banded.with_block(TINY, block).bytes()

    def coded(**parts: str) -> bytes:
        return tiny(to_bytes(tiny_bits(**parts)))

    old, new = (weights["tiny"].raw() for weights in base_weights())
    block = to_bytes(tiny_bits())
    yield "17-bands", coded(bands=u(17, 8) + u(0, 8) + rice(0, 0, 8) * 15, other_bands=NOTHING * 32)
    yield "first-key-255", coded(bands=u(2, 8) + u(255, 8), other_bands=NOTHING * 2)
    yield "second-key-255", coded(bands=u(3, 8) + u(250, 8) + rice(4, 0, 8), other_bands=NOTHING * 4)
    yield "key-past-255", coded(bands=u(3, 8) + u(250, 8) + rice(200, 0, 8), other_bands=NOTHING * 4)
    yield "k-19-of-changed", coded(changed=u(19, 5) + u(0, 1), changed_list=gaps(1, 2, 1, k=19))
    yield "k-30-of-far", coded(far=u(30, 5) + u(0, 1), far_list=gaps(1, 0, k=30))
    yield "rank-past-end", coded(changed_list=gaps(1, 2, 2))
    yield "escaped-rank-past-end", coded(changed_list=gaps(1, 2) + "1" * 24 + u((1 << 19) - 1, 19))
    yield "far-rank-past-end", coded(far_list=gaps(1, 1))
    yield "distance-over-half", coded(distances=rice(127, 0, 8))
    yield "distance-over-the-word", coded(reach=u(0, 1) + u(511, 9), distances=rice(1 << 58, 58, 8))
    yield "codes-past-the-bytes", tiny(block[:-1])
    yield "only-the-number-of-bands", tiny(block[:1])
    yield "ones-to-the-end", tiny(block[:2] + b"\xff" * 8)
    yield "ones-past-the-bytes", coded(changed_list="1" * 12, directions="", far_list="", reach="", distances="")
    yield "byte-behind-the-last-code", tiny(block + b"\0")
    assert len(tiny_bits()) % 8
    yield "one-bit-behind-the-last-code", tiny(block[:-1] + bytes([block[-1] | 128]))
    yield "raw-too-short", tiny(b"\0" + new[:-1])
    yield "raw-too-long", tiny(b"\0" + new + b"\0")
    yield "raw-changes-nothing", tiny(b"\0" + old)
    yield "empty-sets", tiny(to_bytes(u(1, 8) + NOTHING * 2))
    yield "empty-list", tiny(to_bytes(u(1, 8) + K0 + NOTHING + gaps(6)))


def broken_counts(good: Good) -> Iterator[tuple[str, bytes]]:
    banded, plain = good.banded, good.plain
    yield "another-count", banded.row(TINY, changed=3).bytes()
    yield "another-count-of-all-values", plain.row(TINY, changed=3).bytes()
    yield "another-count-than-indices", plain.row(HALF, changed=4).bytes()
    yield "row-of-another-shape", banded.row(HALF, shape=(20, 1)).bytes()
    yield "row-of-a-tensor-nobody-has", banded.row(TINY, name=b"tinz").bytes()
    yield "another-base", banded.stating(base="0" * 64).bytes()
    yield "another-result", banded.stating(result="0" * 64).bytes()
    digests = banded.digests()
    yield "another-digest", banded.with_digests([digests[0], bytes(8), digests[2]]).bytes()
    block = to_bytes(tiny_bits(directions="11"))
    yield "block-leads-elsewhere", banded.with_block(TINY, block).bytes()
    _, shape, raw = plain.entries["tiny.values"]
    yield "values-lead-elsewhere", plain.entry("tiny.values", ("I8", shape, raw[:1] + b"\x07" + raw[2:])).bytes()
    rows, brought = good.anchor.rows(), good.anchor.digests()
    less = good.anchor.without("still.values").with_digests([*brought[:2], brought[3]])
    yield "no-base-and-a-tensor-missing", less.with_rows([*rows[:2], rows[3]]).bytes()


def good_objects(old: wc.Checkpoint) -> Good:
    new = InMemory(old.table, base_weights()[1])
    patch = wc.diff(old, new)
    plain, banded = (Object.parse(wc.encode(patch, codec, old=old)) for codec in ("plain", "banded"))
    by_hand = banded.with_block(TINY, to_bytes(tiny_bits()))
    for item in (plain, banded, by_hand):
        wc.advance(wc.fingerprint(old), wc.decode(item.bytes(), old=old))
    return Good(plain, by_hand, Object.parse(wc.encode(wc.anchor(new), "plain")))


@dataclass(frozen=True)
class InMemory:
    """Weights of any dtype, also of those that `wc.Arrays` cannot hold."""

    table: wc.TensorTable
    tensors: Tensors

    def read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return np.array(tensor.bits, DTYPES[tensor.dtype].word)


def broken_cases(folder: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Clause, what is broken, base, patch."""
    with wc.Checkpoint(folder / BASE) as old:
        good = good_objects(old)
    made = [
        ("8.1", broken_containers),
        ("8.2", broken_metadata),
        ("8.3", broken_tables),
        ("8.3", broken_bombs),
        ("8.4", broken_streams),
        ("8.5", broken_blocks),
        ("8.6", broken_counts),
    ]
    for clause, make in made:
        yield from ((clause, what, BASE, data) for what, data in make(good))
    with wc.Checkpoint(folder / WIDE_BASE) as old:
        yield from (("8.4", what, WIDE_BASE, data) for what, data in broken_wide_streams(old))
