"""Write the golden vectors of docs/SPEC.md version 1 into v1/ beside this file.

    PYTHONPATH=src python tests/vectors/make.py

Vectors are only ever added (SPEC 9.4): a case of which any file exists is left as it is. To add a case, add it here and
run this again. `good/NAME.patch` leads from `NAME.old` to `NAME.new`; what is in `broken/` is to be rejected, and
`broken/cases.json` says against which base and under which clause.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import weightcast as wc
from weightcast.format.spec import DTYPES

HERE = Path(__file__).parent / "v1"
CODECS = ("plain", "gap", "banded")
BLOCK = 1 << 18


# -- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    bits: list[int]

    def raw(self) -> bytes:
        return np.array(self.bits, DTYPES[self.dtype].word).tobytes()


Tensors = dict[str, Tensor]


def vector(dtype: str, bits: list[int]) -> Tensor:
    return Tensor(dtype, (len(bits),), bits)


def layout(entries: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file with the entries in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, raw) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    return with_header(header, b"".join(raw for _, _, raw in entries.values()))


def with_header(header: object, data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return with_text(text + b" " * (-len(text) % 8), data)


def with_text(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def checkpoint(tensors: Tensors) -> bytes:
    return layout({name: (tensor.dtype, tensor.shape, tensor.raw()) for name, tensor in tensors.items()})


# -- good: weights before and after ----------------------------------------------------------------------------------


def some_bits(rng: Random, dtype: str, count: int) -> list[int]:
    """A dozen exponents if it is a float, no structure if not."""
    kind = DTYPES[dtype]
    if kind.mantissa is None:
        return [rng.getrandbits(1 if dtype == "BOOL" else kind.width) for _ in range(count)]
    middle = 1 << (kind.width - 2 - kind.mantissa)
    exponents = [max(middle - int(rng.expovariate(0.3)), 0) for _ in range(count)]
    return [
        rng.getrandbits(1) << (kind.width - 1) | exponent << kind.mantissa | rng.getrandbits(kind.mantissa)
        for exponent in exponents
    ]


def moved(rng: Random, old: Tensor, rate: float, far: float = 0.2, reach: int = 40) -> Tensor:
    """A share ``rate`` of elements moved by one, and of those a share ``far`` by up to ``reach``."""
    width = 1 if old.dtype == "BOOL" else DTYPES[old.dtype].width
    bits = list(old.bits)
    for i in range(len(bits)):
        if rng.random() < rate:
            distance = rng.randint(2, reach) if rng.random() < far else 1
            bits[i] = (bits[i] + rng.choice((-1, 1)) * (1 if width == 1 else distance)) % (1 << width)
    return replace(old, bits=bits)


def bf16(values: list[float]) -> Tensor:
    return vector("BF16", wc.round_to("BF16", np.array(values, np.float32)).tolist())


def every_dtype() -> Iterator[tuple[str, Tensors, Tensors]]:
    for dtype, kind in DTYPES.items():
        rng = Random(dtype)
        old = Tensor(dtype, (20, 72 // min(kind.per_value, 8)), some_bits(rng, dtype, 180))
        new = moved(rng, old, 0.12, reach=min(40, (1 << kind.width) // 8))
        yield dtype.lower(), {"w": old}, {"w": new}


def scalar() -> tuple[Tensors, Tensors]:
    old = {"s": Tensor("F32", (), [0x3F800000]), "v": vector("BF16", [0x3F80, 0xBF80, 0])}
    return old, {**old, "s": Tensor("F32", (), [0x3F7FFFFF])}


def empty_tensor() -> tuple[Tensors, Tensors]:
    old = {"e": Tensor("F16", (0, 7), []), "w": vector("F16", list(range(0x3000, 0x3040)))}
    return old, {**old, "w": moved(Random(1), old["w"], 0.2)}


def unchanged() -> tuple[Tensors, Tensors]:
    old = {"w": vector("BF16", some_bits(Random(2), "BF16", 50))}
    return old, old


def random_bits() -> tuple[Tensors, Tensors]:
    rng = Random(3)
    old = [rng.getrandbits(16) for _ in range(500)]
    return {"w": vector("BF16", old)}, {"w": vector("BF16", [b ^ rng.randrange(1, 1 << 16) for b in old])}


def half_changed() -> tuple[Tensors, Tensors]:
    rng = Random(4)
    old = vector("BF16", some_bits(rng, "BF16", 1000))
    return {"w": old}, {"w": moved(rng, old, 0.5, far=0)}


def nearly_all_changed() -> tuple[Tensors, Tensors]:
    rng = Random(5)
    old = vector("F32", some_bits(rng, "F32", 600))
    return {"w": old}, {"w": moved(rng, old, 0.95, far=0.9)}


def names() -> tuple[Tensors, Tensors]:
    """The last two are in another order as UTF-16."""
    rng = Random(6)
    prefix = "model.language_model.layers."
    spelled = [f"{prefix}{i}.{part}.weight" for i in (0, 1, 10, 2) for part in ("mlp.down_proj", "mlp.up_proj")]
    spelled += ['quote".back\\slash/', "größe", "größe.東京", "\uff5e", "\U0001f600"]
    old = {name: vector("BF16", some_bits(rng, "BF16", 40)) for name in sorted(spelled, key=str.encode)}
    return old, {name: moved(rng, old[name], 0 if ".1." in name else 0.2) for name in old}


SPECIAL_BITS = {
    # sign, infinity, largest finite, smallest normal, largest and smallest denormal, NaNs quiet and signalling
    "F8_E5M2": [0x80, 0x7C, 0x7B, 0x04, 0x03, 0x01, 0x7F, 0x7D],
    "F8_E4M3": [0x80, 0x7F, 0x7E, 0x08, 0x07, 0x01, 0xFF, 0x7E],
    "F8_E4M3FNUZ": [0x80, 0x7F, 0x7E, 0x08, 0x07, 0x01, 0xFF, 0x81],
    "F16": [0x8000, 0x7C00, 0x7BFF, 0x0400, 0x03FF, 0x0001, 0x7E01, 0x7C01],
    "BF16": [0x8000, 0x7F80, 0x7F7F, 0x0080, 0x007F, 0x0001, 0x7FC1, 0x7F81],
    "F32": [0x80000000, 0x7F800000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x00000001, 0x7FC00001, 0x7F800001],
    "F64": [1 << 63, 0x7FF << 52, (0x7FF << 52) - 1, 1 << 52, (1 << 52) - 1, 1, 0xFFF << 51 | 1, 0x7FF << 52 | 1],
}


def special_bits() -> tuple[Tensors, Tensors]:
    """Each special value becomes each other, and the longest step there is goes both ways."""
    old, new = {}, {}
    for dtype, found in SPECIAL_BITS.items():
        top = found[0]
        values = [0, *found, *(bits ^ top for bits in found[1:])]
        pairs = [(a, b) for a in values for b in values] + [(2 * top - 1, 0), (0, 2 * top - 1)]
        quiet = some_bits(Random(dtype), dtype, 120)
        old[dtype] = vector(dtype, [a for a, _ in pairs] + quiet)
        new[dtype] = vector(dtype, [b for _, b in pairs] + quiet)
    return old, new


def huge_gaps() -> tuple[Tensors, Tensors]:
    """Many close together and one far away: its gap is escaped."""
    rng = Random(7)
    old = vector("I8", some_bits(rng, "I8", 2000))
    changed = {*range(1, 1000, 2), 1990}
    return {"w": old}, {"w": replace(old, bits=[(b + (i in changed)) % 256 for i, b in enumerate(old.bits)])}


def far_sloped() -> tuple[Tensors, Tensors]:
    """Adam moves all weights about as far, so small ones move by many ULPs."""
    rng = Random(8)
    weights = [rng.gauss(0, 0.02) for _ in range(2000)]
    return {"w": bf16(weights)}, {"w": bf16([w + rng.choice((-1, 1)) * rng.uniform(5e-6, 2e-5) for w in weights])}


def far_flat() -> tuple[Tensors, Tensors]:
    """The same number of ULPs at every exponent, and two that go so far that they are escaped."""
    rng = Random(9)
    floats, ints = vector("BF16", some_bits(rng, "BF16", 800)), vector("I32", some_bits(rng, "I32", 400))
    new = {"f": moved(rng, floats, 0.2, far=1, reach=60), "i": moved(rng, ints, 0.2, far=1)}
    new["f"].bits[33] = floats.bits[33] ^ 1 << 15
    new["i"].bits[77] = ints.bits[77] ^ 1 << 31
    return {"f": floats, "i": ints}, new


def many_bands() -> tuple[Tensors, Tensors]:
    """Exponents of alternating rates of change, and a hole between them that takes an escape."""
    rng = Random(10)
    exponents = [*range(60, 80), *range(120, 140)]
    old, new = [], []
    for i in range(3600):
        exponent = exponents[i % 40]
        old.append(rng.getrandbits(1) << 15 | exponent << 7 | rng.randint(1, 120))
        new.append(old[-1] + (rng.random() < (0.02, 0.7)[exponent % 2]))
    return {"w": vector("BF16", old)}, {"w": vector("BF16", new)}


def long_tensor(changed: range) -> tuple[Tensors, Tensors]:
    """Just over one block, of bits that compress."""
    bits = list(range(0x20, 0x40)) * (BLOCK // 32) + [0x33] * 500
    old = vector("F8_E4M3", bits)
    new = list(bits)
    for i in changed:
        new[i] += 1
    return {"w": old}, {"w": replace(old, bits=new)}


def good_cases() -> Iterator[tuple[str, str, Tensors, Tensors]]:
    """Name, codec, weights before and after."""
    special = {
        "scalar": scalar(),
        "empty-tensor": empty_tensor(),
        "unchanged": unchanged(),
        "random-bits": random_bits(),
        "half-changed": half_changed(),
        "nearly-all-changed": nearly_all_changed(),
        "names": names(),
        "special-bits": special_bits(),
        "huge-gaps": huge_gaps(),
        "far-sloped": far_sloped(),
        "far-flat": far_flat(),
    }
    for name, old, new in [*every_dtype(), *((name, *weights) for name, weights in special.items())]:
        yield from ((f"{codec}-{name}", codec, old, new) for codec in CODECS)
    yield "banded-many-bands", "banded", *many_bands()
    yield "banded-two-blocks", "banded", *long_tensor(range(1000, BLOCK + 500, 3001))
    control = "\x00\b\t\n\v\f\r\x1f !\x7f\x80\u2028"
    yield "gap-control-characters", "gap", {control: vector("U8", [1, 2])}, {control: vector("U8", [1, 3])}
    yield "gap-block-left-out", "gap", *long_tensor(range(BLOCK + 3, BLOCK + 500, 70))


def good_paths(name: str) -> list[Path]:
    return [HERE / "good" / f"{name}.{part}.safetensors" for part in ("old", "new", "patch")]


def add_good(name: str, codec: str, old: Tensors, new: Tensors) -> None:
    paths = good_paths(name)
    if any(path.exists() for path in paths):
        return
    add(paths[0], checkpoint(old))
    add(paths[1], checkpoint(new))
    add(paths[2], patch_between(paths[0], paths[1], codec))


def patch_between(old: Path, new: Path, codec: str) -> bytes:
    with wc.Checkpoint(old) as before, wc.Checkpoint(new) as after:
        return wc.encode(wc.diff(before, after), codec, old=before)


def add_without_base(name: str, new: Tensors) -> None:
    _, path, patch = good_paths(name)
    if path.exists() or patch.exists():
        return
    add(path, checkpoint(new))
    with wc.Checkpoint(path) as weights:
        add(patch, wc.encode(wc.anchor(weights), "plain"))


def add_by_hand(name: str, like: str, edit: Callable[[Object], bytes]) -> None:
    """A patch that weightcast would not write so, but has to read."""
    sources, paths = good_paths(like), good_paths(name)
    if any(path.exists() for path in paths):
        return
    add(paths[0], sources[0].read_bytes())
    add(paths[1], sources[1].read_bytes())
    add(paths[2], edit(Object.parse(sources[2].read_bytes())))


def wide_indices(item: Object) -> bytes:
    indices = np.frombuffer(item.entries["w.indices"][2], "<i4")
    return item.listing("w.indices", "I64", indices.astype("<i8").tobytes()).bytes()


def loose_header(item: Object) -> bytes:
    """Keys in another order, and white space wherever JSON has room for it."""
    header, body = item.header()
    header["__metadata__"] = {"weightcast": json.dumps(dict(reversed(item.meta.items())), indent=1)}
    return with_text(json.dumps(dict(reversed(header.items())), indent=3).encode(), body)


def add(path: Path, data: bytes) -> None:
    """Create a file; one that exists is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)


# -- patch objects in parts, to be broken ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    name: bytes
    code: int
    shape: tuple[int, ...]
    changed: int
    blocks: tuple[tuple[int, int], ...]  # blocks left out before it, bytes


@dataclass(frozen=True)
class Object:
    """A patch object whose parts can be replaced one at a time."""

    meta: dict[str, Any]
    entries: dict[str, tuple[str, tuple[int, ...], bytes]]

    @classmethod
    def parse(cls, data: bytes) -> Object:
        length = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        meta = json.loads(header.pop("__metadata__")["weightcast"])
        entries = {
            name: (fields["dtype"], tuple(fields["shape"]), body[slice(*fields["data_offsets"])])
            for name, fields in header.items()
        }
        item = cls(meta, entries)
        assert item.bytes() == data
        return item

    def text(self) -> str:
        return json.dumps(self.meta, separators=(",", ":"), sort_keys=True)

    def bytes(self, metadata: dict[str, Any] | None = None) -> bytes:
        return layout(self.entries, {"weightcast": self.text()} if metadata is None else metadata)

    def header(self) -> tuple[dict[str, Any], bytes]:
        data = self.bytes()
        length = int.from_bytes(data[:8], "little")
        return json.loads(data[8 : 8 + length]), data[8 + length :]

    def stating(self, **fields: Any) -> Object:
        return replace(self, meta={**self.meta, **fields})

    def entry(self, name: str, entry: tuple[str, tuple[int, ...], bytes]) -> Object:
        return replace(self, entries={**self.entries, name: entry})

    def without(self, name: str) -> Object:
        return replace(self, entries={key: entry for key, entry in self.entries.items() if key != name})

    def listing(self, name: str, dtype: str, raw: bytes) -> Object:
        return self.entry(name, (dtype, (len(raw) * 8 // DTYPES[dtype].width,), raw))

    def table(self) -> bytes:
        return zlib.decompress(self.entries["weightcast.table"][2])

    def with_table(self, table: bytes) -> Object:
        return self.listing("weightcast.table", "U8", zlib.compress(table, 9)).stating(table=len(table))

    def rows(self) -> list[Row]:
        table, at = self.table(), 0

        def number() -> int:
            nonlocal at
            value = shift = 0
            while True:
                at, byte = at + 1, table[at]
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        names: list[bytes] = []
        digests = self.entries["weightcast.digests"][1][0]
        for _ in range(digests):
            shared, more = number(), number()
            names.append((names[-1][:shared] if names else b"") + table[at : at + more])
            at += more
        codes, ranks = ([number() for _ in names] for _ in range(2))
        shapes = [tuple(number() for _ in range(rank)) for rank in ranks]
        changed, counts = ([number() for _ in names] for _ in range(2))
        skips, sizes = ([[number() for _ in range(count)] for count in counts] for _ in range(2))
        blocks = [tuple(zip(*pair, strict=True)) for pair in zip(skips, sizes, strict=True)]
        rows = [Row(*row) for row in zip(names, codes, shapes, changed, blocks, strict=True)]
        assert pack(rows) == table
        return rows

    def with_rows(self, rows: list[Row]) -> Object:
        return self.with_table(pack(rows))

    def row(self, at: int, **fields: Any) -> Object:
        rows = self.rows()
        return self.with_rows([*rows[:at], replace(rows[at], **fields), *rows[at + 1 :]])

    def digests(self) -> list[bytes]:
        raw = self.entries["weightcast.digests"][2]
        return [raw[i : i + 8] for i in range(0, len(raw), 8)]

    def with_digests(self, digests: list[bytes]) -> Object:
        return self.listing("weightcast.digests", "U64", b"".join(digests))

    def with_block(self, at: int, block: bytes) -> Object:
        """The only block of row ``at``, replaced."""
        rows, raw = self.rows(), self.entries["weightcast.blocks"][2]
        before = sum(size for row in rows[:at] for _, size in row.blocks)
        after = before + rows[at].blocks[0][1]
        return self.listing("weightcast.blocks", "U8", raw[:before] + block + raw[after:]).row(
            at, blocks=((0, len(block)),)
        )


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def pack(rows: list[Row]) -> bytes:
    """The columns of 5.2."""
    table, before = b"", b""
    for row in rows:
        shared = next((i for i, (a, b) in enumerate(zip(before, row.name, strict=False)) if a != b), None)
        shared = min(len(before), len(row.name)) if shared is None else shared
        table += varint(shared) + varint(len(row.name) - shared) + row.name[shared:]
        before = row.name
    numbers = [row.code for row in rows] + [len(row.shape) for row in rows] + [n for row in rows for n in row.shape]
    numbers += [row.changed for row in rows] + [len(row.blocks) for row in rows]
    numbers += [skip for row in rows for skip, _ in row.blocks] + [size for row in rows for _, size in row.blocks]
    return table + b"".join(map(varint, numbers))


# -- blocks by hand --------------------------------------------------------------------------------------------------


def u(value: int, count: int) -> str:
    """6.2, as characters 0 and 1."""
    return "".join(str(value >> i & 1) for i in range(count))


def rice(value: int, k: int, plain: int) -> str:
    """6.3"""
    return "1" * 24 + u(value, plain) if value >> k >= 24 else "1" * (value >> k) + "0" + u(value, k)


def gaps(*values: int, k: int = 0) -> str:
    return "".join(rice(value, k, 19) for value in values)


def to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


NOTHING = u(31, 5)
K0 = u(0, 5) + u(0, 1)


def tiny_bits(**parts: str) -> str:
    """The block of the tensor `tiny` of six elements: 1 goes up by 1, 4 goes down by 3."""
    block = {
        "bands": u(1, 8),
        "changed": K0,
        "far": K0,
        "other_bands": "",
        "changed_list": gaps(1, 2, 1),
        "directions": "10",
        "far_list": gaps(1, 0),
        "reach": u(0, 1) + u(0, 9),
        "distances": rice(1, 0, 8),
    }
    return "".join({**block, **parts}.values())


# -- broken ----------------------------------------------------------------------------------------------------------

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


def add_broken(folder: Path) -> None:
    for base, weights in ((BASE, base_weights()[0]), (WIDE_BASE, {"w": vector("U64", [10, 20, 30, 40])})):
        if not (folder / base).exists():
            add(folder / base, checkpoint(weights))
    index = folder / "cases.json"
    cases = json.loads(index.read_text()) if index.exists() else {}
    for clause, what, base, data in broken_cases(folder):
        path = folder / f"{clause}-{what}.patch.safetensors"
        if not path.exists():
            add(path, data)
            cases[path.name] = {"old": base, "clause": clause}
    index.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")


def main() -> None:
    for case in good_cases():
        add_good(*case)
    weights = {name: tensors["w"] for name, tensors, _ in every_dtype()}
    add_without_base("plain-without-base", {"scalar": Tensor("F32", (), [7]), **weights})
    add_by_hand("plain-wide-indices", "plain-bf16", wide_indices)
    add_by_hand("plain-loose-header", "plain-names", loose_header)
    add_by_hand("gap-in-bands", "banded-far-sloped", lambda item: item.stating(codec="gap").bytes())
    add_broken(HERE / "broken")


if __name__ == "__main__":
    main()
