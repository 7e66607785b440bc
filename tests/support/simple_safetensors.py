"""A reader of safetensors files, written from docs/SPEC.md 2.4, 5.1 and 8.1 alone, for `simple_reader.py`."""

import json
import struct
from math import prod
from typing import NamedTuple

# 2.4: bits of a value, in the order of the codes
DTYPES = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
DTYPES |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
DTYPES |= {"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}


class Rejected(Exception):  # noqa: N818 -- what happens to the object, as SPEC 8 calls it
    """The object is not one that a reader may accept; the text begins with the clause that says so."""


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def need(condition: bool, reason: str) -> None:
    if not condition:
        raise Rejected(reason)


def width(dtype: str) -> int:
    """Bits of an element (2.2, 2.4)."""
    return max(8, DTYPES[dtype])


def count_elements(dtype: str, shape: tuple[int, ...], clause: str) -> int:
    """How many elements a tensor has (2.2); shapes that cannot be are rejected under 8.1 or 8.3."""
    need(len(shape) <= 64, f"{clause} more than 64 dimensions")
    need(prod(shape) <= 1 << 48, f"{clause} more than 2^48 values")
    bits = prod(shape) * DTYPES[dtype]
    need(bits % 8 == 0, f"{clause} packed values that do not fill whole bytes")
    return bits // width(dtype)


def parse_json(text: str, clause: str) -> object:
    """JSON in which no object has a key twice (8.1); NaN and Infinity, which Python would take, are not JSON."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        need(len(dict(pairs)) == len(pairs), f"{clause} a key twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, object_pairs_hook=distinct, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{clause} not JSON") from error


def decode_text(raw: bytes, reason: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected(reason) from error


def read_container(data: bytes) -> tuple[object, dict[str, Entry]]:
    """`__metadata__` as it stands, and the entries, of a safetensors file (5.1, 8.1)."""
    need(len(data) >= 8, "8.1 a file shorter than 8 bytes")
    start = 8 + struct.unpack_from("<Q", data)[0]
    need(start <= 8 + 100_000_000, "8.1 a header over 100,000,000 bytes")
    need(start <= len(data), "8.1 a file shorter than its header says")
    header = parse_json(decode_text(data[8:start], "8.1 a header that is not UTF-8"), "8.1")
    need(isinstance(header, dict), "8.1 a header that is not an object")
    metadata = header.pop("__metadata__", None)
    spans = {name: read_entry(fields) for name, fields in header.items()}
    end = 0
    for _, _, begin, stop in sorted(spans.values(), key=lambda span: span[2:]):
        need(begin == end, "8.1 entries that overlap or leave holes")
        end = stop
    need(start + end == len(data), "8.1 entries that do not end with the file")
    return metadata, {name: Entry(d, s, data[start + a : start + b]) for name, (d, s, a, b) in spans.items()}


def read_entry(fields: object) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, and where the data begins and ends, of one header entry (5.1, 8.1)."""
    need(isinstance(fields, dict) and set(fields) == {"dtype", "shape", "data_offsets"}, "8.1 an entry's fields")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    need(isinstance(dtype, str) and dtype in DTYPES, "8.1 an unknown dtype")
    need(are_sizes(shape) and are_sizes(offsets) and len(offsets) == 2, "8.1 shape and offsets are not sizes")
    size = count_elements(dtype, tuple(shape), "8.1") * width(dtype) // 8
    need(offsets[1] - offsets[0] == size, "8.1 dtype, shape and offsets disagree")
    return dtype, tuple(shape), offsets[0], offsets[1]


def are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
