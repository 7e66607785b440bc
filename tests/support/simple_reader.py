"""A second reader of patch objects, written from docs/SPEC.md alone: the standard library, and no hurry.

It shares no code with weightcast, so where both read the same bytes in the same way, the page was enough.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import ldexp
from typing import NamedTuple

from simple_safetensors import (
    DTYPES,
    Entry,
    are_sizes,
    count_elements,
    need,
    parse_json,
    read_container,
    width,
)
from simple_table import BLOCK, Row, Tensor, entry_of, read_table

MANTISSA = {"F8_E5M2": 2, "F8_E4M3": 3, "F8_E4M3FNUZ": 3, "F8_E5M2FNUZ": 2, "F16": 10, "BF16": 7, "F32": 23, "F64": 52}
WORD = (1 << 64) - 1


class Part(NamedTuple):
    """What one row of one object changes."""

    row: Row
    old: list[int] | None
    new: list[int]


def read_checkpoint(data: bytes) -> dict[str, Tensor]:
    """The tensors of a plain safetensors file (2.1 to 2.3)."""
    _, entries = read_container(data)
    return {name: Tensor(e.dtype, e.shape, unpack(e.raw, width(e.dtype))) for name, e in entries.items()}


def apply_patch(
    data: bytes, old: Mapping[str, Tensor] | None, aliases: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The weights that a patch of one object makes of the old ones, or `Rejected` (7, 8)."""
    return apply_objects([data], old, aliases)


def apply_objects(
    objects: Sequence[bytes], old: Mapping[str, Tensor] | None, aliases: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The weights that all objects of a patch (2.5.4) together make of the old ones, or `Rejected` (7, 8)."""
    need(len(objects) > 0, "2.5 a patch of no objects")
    opened = [read_container(data) for data in objects]
    metas = [read_metadata(metadata) for metadata, _ in opened]
    base, result = metas[0]["base"], metas[0]["result"]
    need(all(m["base"] == base and m["result"] == result for m in metas), "8.6 (8.6.4) objects of two patches")
    if base is not None:
        old = old or {}
        need(base == position(old, aliases), "8.6 (7.1) the base is not where the weights held stand")
    parts: dict[str, list[Part]] = {}
    for meta, (_, entries) in zip(metas, opened, strict=True):
        for part in read_parts(meta, entries, old):
            parts.setdefault(part.row.name, []).append(part)
        need(sum(map(len, parts.values())) <= 1 << 20, "8.6 (8.6.4) more rows together than their limit")
    new = {name: put_together(parts[name], None if base is None else old[name]) for name in parts}
    for name, tensor in new.items():
        need(tensor_digest(tensor.bits) == parts[name][0].row.digest, f"8.6 (7.2) the digest of {name!r} is another")
    kept = [tensor.bits for name, tensor in (old or {}).items() if name not in new]
    need(base is not None or not any(kept), "8.6 (2.5) a patch without a base misses a tensor")
    weights = {**(old or {}), **new}
    need(position(weights, aliases) == result, "8.6 (7.2) the position reached is not the result")
    return weights


def read_parts(meta: dict, entries: Mapping[str, Entry], old: Mapping[str, Tensor] | None) -> list[Part]:
    """What the rows of one object change (5)."""
    digests = unpack(entry_of(entries, "weightcast.digests", "U64"), 64)
    rows = read_table(entries, meta["table"], digests, meta["codec"], old)
    olds = [None if meta["base"] is None else box_of(old[row.name].bits, row) for row in rows]
    read = read_plain if meta["codec"] == "plain" else read_blocks
    return [Part(*part) for part in zip(rows, olds, read(rows, olds, entries), strict=True)]


def box_of(bits: list[int], row: Row) -> list[int]:
    """The elements of a row, in their own order (2.6)."""
    return list(bits) if row.box is None else [bits[place] for place in row.places()]


def put_together(parts: Sequence[Part], old: Tensor | None) -> Tensor:
    """A tensor, all of whose parts are there (2.5.4, 8.6.4)."""
    first = parts[0].row
    total = count_elements(first.dtype, first.shape, "8.3")
    agree = all(row[1:4] == first[1:4] for row, _, _ in parts)
    need(agree, "8.6 (8.6.4) rows of one tensor that disagree")
    listed = sum(row.elements for row, _, _ in parts)
    need(listed <= total, "8.6 (8.6.4) rows of more elements together than the tensor has")
    need(old is not None or listed == total, "8.4 (8.4.2) no base, and not all of a tensor")
    bits = [0] * total if old is None else list(old.bits)
    seen: set[int] = set()
    for row, before, after in parts:
        for j, place in enumerate(row.places()):
            if before is None or before[j] != after[j]:
                need(place not in seen, "8.6 (8.6.4) an element changed twice")
                seen.add(place)
                bits[place] = after[j]
    return Tensor(first.dtype, first.shape, bits)


# Sections 2 to 4: elements, rounding, digests


def unpack(raw: bytes, w: int) -> list[int]:
    """Bytes as elements of `w` bits (2.3)."""
    return [int.from_bytes(raw[i : i + w // 8], "little") for i in range(0, len(raw), w // 8)]


def round_to(dtype: str, bits: int) -> int:
    """Bits of an fp32 as those of BF16 or F16 (3.1, 3.2)."""
    mantissa, infinity = {"BF16": (7, 0x7F80), "F16": (10, 0x7C00)}[dtype]
    sign, rest = bits >> 31 << 15, bits % (1 << 31)
    if rest > 0x7F800000:
        return infinity | 1 << (mantissa - 1)
    # In place of infinity stands what would follow the largest finite number, so that overflow is rounding too.
    places = [magnitude(place, mantissa, infinity >> mantissa + 1) for place in range(infinity + 1)]
    value = min(magnitude(rest, 23, 127), places[infinity])
    below = bisect_right(places, value) - 1
    middle = (places[below] + places[min(below + 1, infinity)]) / 2
    return sign | below + (value > middle or (value == middle and below % 2))


def magnitude(bits: int, mantissa: int, bias: int) -> float:
    """The number that exponent and mantissa stand for, exactly."""
    exponent, fraction = divmod(bits, 1 << mantissa)
    return ldexp(fraction + (1 << mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)


def mix64(x: int) -> int:
    """4.1"""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def mix(i: int, b: int) -> int:
    """4.1"""
    return mix64(mix64((i + 0x9E3779B97F4A7C15) & WORD) ^ mix64((b + 0xD1B54A32D192ED03) & WORD))


def tensor_digest(bits: Iterable[int]) -> int:
    """4.2"""
    return sum(mix(i, b) for i, b in enumerate(bits)) & WORD


def position(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> str:
    """4.3"""
    ordered = sorted(tensors.items(), key=lambda item: item[0].encode())
    rows = (f"[{text(name)},{text(tensor.dtype)},[{','.join(map(str, tensor.shape))}]]" for name, tensor in ordered)
    pairs = (f"{text(alias)}:{text(name)}" for alias, name in sorted((aliases or {}).items()))
    table = f'{{"aliases":{{{",".join(pairs)}}},"tensors":[{",".join(rows)}]}}'
    digests = b"".join(struct.pack("<Q", tensor_digest(tensor.bits)) for _, tensor in ordered)
    return hashlib.sha256(f"weightcast position 1\n{table}\n".encode("ascii") + digests).hexdigest()


SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def text(value: str) -> str:
    """A string of canonical JSON (4.3)."""
    return '"' + "".join(SHORT.get(c) or (c if " " <= c <= "~" else escaped(c)) for c in value) + '"'


def escaped(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


# Section 5: the object


def read_metadata(metadata: object) -> dict:
    """The fields of 5.1, judged in the order that 8.2 wants: `format` first."""
    need(isinstance(metadata, dict) and isinstance(metadata.get("weightcast"), str), "8.2 no string `weightcast`")
    fields = parse_json(metadata["weightcast"], "8.2")
    need(isinstance(fields, dict), "8.2 `weightcast` is not an object")
    number = fields.get("format", 1)
    need(type(number) is int and number == 1, "8.2 an unknown format")
    need(set(metadata) == {"weightcast"}, "8.2 another set of keys")
    need(set(fields) == {"base", "codec", "format", "model", "result", "table"}, "8.2 another set of fields")
    model = fields["model"]
    need(are_sizes(model) and len(model) == 3 and max(model) < 1 << 63, "8.2 model is not three sizes")
    need(fields["codec"] in ("plain", "gap", "banded"), "8.2 an unknown codec")
    need(fields["base"] is None or is_digest(fields["base"]), "8.2 base is not a digest")
    need(is_digest(fields["result"]), "8.2 result is not a digest")
    need(are_sizes([fields["table"]]) and fields["table"] <= 1 << 24, "8.2 table is over its limit")
    need(fields["base"] is not None or fields["codec"] == "plain", "8.2 no base with a codec other than plain")
    return fields


def is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def read_plain(rows: list[Row], olds: list[list[int] | None], entries: Mapping[str, Entry]) -> list[list[int]]:
    """The new bits of each row in codec `plain` (5.3, 8.4); ``olds`` are None in a patch without a base."""
    expected = {"weightcast.digests", "weightcast.table"}
    new = []
    for row, old in zip(rows, olds, strict=True):
        dtype, label = row.dtype, row.label
        expected |= {f"{label}.values", f"{label}.indices"}
        if f"{label}.indices" in entries:
            need(old is not None, "8.4 (5.3) indices in a patch without a base")
            indices = entries[f"{label}.indices"]
            need(indices.dtype in ("I32", "I64") and len(indices.shape) == 1, "8.4 indices are not I32 or I64 [k]")
            at = unpack(indices.raw, width(indices.dtype))
            values = unpack(entry_of(entries, f"{label}.values", dtype if DTYPES[dtype] >= 8 else "U8"), width(dtype))
            bits = overwrite(old, at, values)
            need(len(at) == row.changed, "8.6 a number of changed elements other than the table's")
        else:
            need(f"{label}.values" in entries, f"8.4 a missing entry: {label}.values")
            whole = entries[f"{label}.values"]
            need(whole[:2] == (dtype, row.part), "8.4 values of another dtype or shape than the tensor's")
            bits = unpack(whole.raw, width(dtype))
            need(old is not None or row.changed == len(bits), "8.4 no base, and another count than all elements")
            counted = old is None or row.changed in (len(bits), count_changed(old, bits))
            need(counted, "8.6 a number of changed elements other than the table's")
        new.append(bits)
    need(set(entries) <= expected, "8.4 an entry of no tensor")
    return new


def overwrite(old: list[int], indices: list[int], values: list[int]) -> list[int]:
    """5.3, 8.4; negative indices, read as unsigned, are out of range too."""
    need(len(indices) == len(values), "8.4 indices and values of different length")
    need(all(a < b for a, b in pairwise(indices)), "8.4 indices unsorted or repeated")
    need(not indices or indices[-1] < len(old), "8.4 indices out of range")
    need(all(old[i] != value for i, value in zip(indices, values, strict=True)), "8.4 an element that does not change")
    new = list(old)
    for i, value in zip(indices, values, strict=True):
        new[i] = value
    return new


def count_changed(old: list[int], new: list[int]) -> int:
    return sum(a != b for a, b in zip(old, new, strict=True))


# Section 6: blocks


def read_blocks(rows: list[Row], olds: list[list[int]], entries: Mapping[str, Entry]) -> list[list[int]]:
    """The new bits of each row in codecs `gap` and `banded` (6, 8.4)."""
    raw = entry_of(entries, "weightcast.blocks", "U8")
    need(set(entries) == {"weightcast.digests", "weightcast.table", "weightcast.blocks"}, "8.4 an entry of no tensor")
    need(sum(size for row in rows for _, size in row.blocks) == len(raw), "8.4 block bytes that do not add up")
    new = []
    at = 0
    for row, old in zip(rows, olds, strict=True):
        bits = list(old)
        for index, size in row.blocks:
            span = slice(index * BLOCK, (index + 1) * BLOCK)
            bits[span] = read_block(raw[at : at + size], bits[span], row.dtype)
            at += size
        need(count_changed(old, bits) == row.changed, "8.6 a number of changed elements other than the table's")
        new.append(bits)
    return new


class Bits:
    """A block's bytes as a sequence of bits (6.2, 6.3)."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def u(self, n: int) -> int:
        need(self.at + n <= 8 * len(self.raw), "8.5 codes run past the block's bytes")
        window = int.from_bytes(self.raw[self.at // 8 : (self.at + n + 7) // 8], "little")
        value = window >> self.at % 8 & (1 << n) - 1
        self.at += n
        return value

    def rice(self, k: int, p: int) -> int:
        ones = 0
        while ones < 24 and self.u(1):
            ones += 1
        return self.u(p) if ones == 24 else ones << k | self.u(k)

    def close(self) -> None:
        left = 8 * len(self.raw) - self.at
        need(left < 8 and self.u(left) == 0, "8.5 bytes or one bits behind the last code")


def read_parameters(bits: Bits) -> tuple[int, int] | None:
    """`k` and *inverted* of a set, None for the empty one (6.4)."""
    k = bits.u(5)
    need(k <= 18 or k == 31, "8.5 k of 19..30")
    return None if k == 31 else (k, bits.u(1))


def read_set(bits: Bits, total: int, parameters: tuple[int, int] | None) -> list[int]:
    """6.4. A member takes a place of its own, so the gaps *and* the members add up to `total`."""
    if parameters is None:
        return []
    k, inverted = parameters
    members: list[int] = []
    at = bits.rice(k, 19)
    while at < total:
        members.append(at)
        at += 1 + bits.rice(k, 19)
    need(at == total, "8.5 a list runs past its end")
    return sorted(set(range(total)) - set(members)) if inverted else members


def read_bands(bits: Bits, count: int) -> list[int]:
    """The highest key of each band (6.5, item 2)."""
    tops: list[int] = []
    for i in range(count - 1):
        tops.append(bits.u(8) if i == 0 else tops[-1] + 1 + bits.rice(0, 8))
        need(tops[-1] < 255, "8.5 keys not below 255")
    return [*tops, 255]


def read_block(raw: bytes, old: list[int], dtype: str) -> list[int]:
    """New bits of one block (6.5)."""
    w = width(dtype)
    bits = Bits(raw)
    bands = bits.u(8)
    if bands == 0:
        need(len(raw) - 1 == len(old) * w // 8, "8.5 a raw block of another size than its elements")
        need(unpack(raw[1:], w) != old, "8.5 a block that changes nothing")
        return unpack(raw[1:], w)
    need(bands <= 16, "8.5 B above 16")
    tops = read_bands(bits, bands)
    parameters = [(read_parameters(bits), read_parameters(bits)) for _ in tops]
    keys = [key_of(b, dtype) for b in old]
    band_of_key = [next(i for i, top in enumerate(tops) if key <= top) for key in range(256)]
    members: list[list[int]] = [[] for _ in tops]
    for i, key in enumerate(keys):
        members[band_of_key[key]].append(i)
    sets = zip(members, parameters, strict=True)
    changed = [[band[rank] for rank in read_set(bits, len(band), of)] for band, (of, _) in sets]
    need(any(changed), "8.5 a block that changes nothing")
    ups = {i: bits.u(1) for i in sorted(i for band in changed for i in band)}
    sets = zip(changed, parameters, strict=True)
    far = [band[rank] for band, (_, of) in sets for rank in read_set(bits, len(band), of)]
    distances = read_distances(bits, far, keys, w) if far else {}
    bits.close()
    new = list(old)
    for i, up in ups.items():
        new[i] = step(old[i], distances.get(i, 1) * (1 if up else -1), dtype)
    return new


def read_distances(bits: Bits, far: list[int], keys: list[int], w: int) -> dict[int, int]:
    """How far the far elements moved (6.5, item 7; 6.6)."""
    sloped, reach = bits.u(1), bits.u(9)
    distances = {}
    for i in far:
        k = min(max(reach - keys[i] if sloped else reach, 0), 58)
        distances[i] = bits.rice(k, w) + 2
        need(distances[i] <= 1 << (w - 1), "8.5 a distance above 2^(w-1)")
    return distances


def key_of(b: int, dtype: str) -> int:
    """6.1"""
    if dtype not in MANTISSA:
        return 0
    exponent = b % (1 << (width(dtype) - 1)) >> MANTISSA[dtype]
    return min(max(exponent - 896, 0), 255) if dtype == "F64" else exponent


def step(b: int, distance: int, dtype: str) -> int:
    """6.6"""
    w = width(dtype)
    half, full = 1 << (w - 1), 1 << w
    if dtype not in MANTISSA:
        return (b + distance) % full
    order = full - 1 - b if b >= half else b + half
    moved = (order + distance) % full
    return full - 1 - moved if moved < half else moved - half
