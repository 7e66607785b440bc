"""Tensors as lists of bit patterns, and the safetensors files that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from weightcast.format.spec import DTYPES


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
