"""Honest patches of small models, for `fuzz_wire.py` to put lies into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from boxed import columns, encode_cut
from cases import Bag, gaussian, moved, random_bits
from surgery import Parts, Stream

from weightcast import Fingerprint, TensorSpec, anchor, diff, encode, fingerprint


@dataclass(frozen=True)
class Model:
    """Two states of some weights, and honest patches from one to the other."""

    old: Bag
    new: Bag
    fingerprint: Fingerprint
    reached: str
    patches: tuple[bytes, ...]

    @classmethod
    def of(cls, old: dict[TensorSpec, Any], new: dict[TensorSpec, Any]) -> Model:
        before, after = Bag(old), Bag(new)
        held = fingerprint(before)
        patch = diff(before, after, held)
        patches = [encode(patch, codec, before) for codec in ("plain", "gap", "banded")]
        halves = {spec.name: columns(spec, 3) for spec in before.table}
        patches += [encode_cut(patch, halves, codec, before) for codec in ("plain", "gap", "banded")]
        patches += [encode(patch, "gap"), with_wide_indices(patches[0]), encode(anchor(after), "plain")]
        patches += [encode_cut(anchor(after), halves, "plain")]
        return cls(before, after, held, patch.result, tuple(patches))


def with_wide_indices(patch: bytes) -> bytes:
    """The same plain patch with I64 where it had I32: writers need it only for tensors of gigabytes."""
    parts = Parts.of(patch)
    for name, (dtype, shape, data) in parts.entries.items():
        if dtype == "I32" and name.endswith(".indices"):
            parts.entries[name] = Stream("I64", shape, np.frombuffer(data, "<i4").astype("<i8").tobytes())
    return parts.joined()


@cache
def models() -> tuple[Model, ...]:
    """Every kind of dtype; raw blocks and whole tensors; several blocks with one left out; one small tensor."""
    rng = np.random.default_rng(0)

    def state(*specs: tuple[str, str, tuple[int, ...]]) -> dict[TensorSpec, Any]:
        named = [TensorSpec(*spec) for spec in specs]
        return {s: gaussian(rng, s.elements) if s.dtype == "BF16" else random_bits(rng, s) for s in named}

    def stepped(bits: Any, density: float, furthest: int) -> Any:
        """Of weights, only small ones move, so that bands are worth their while."""
        small = bits & 0x7FFF < 0x3C00 if bits.dtype == np.uint16 else True
        return np.where(small, moved(rng, bits, density, furthest), bits)

    dtypes = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F4", "U8", "I64", "BOOL")
    kinds = state(*((f"model.layers.{i}.{dtype}", dtype, (6, 50)) for i, dtype in enumerate(dtypes)))
    dense = state(("dense.b", "BF16", (300,)), ("dense.f", "F32", (200,)), ("dense.scalar", "F64", ()))
    large = state(("large.a", "U8", (3, (1 << 18) + 25)), ("large.b", "BF16", ((1 << 18) + 5,)))
    small = state(("w", "BF16", (1000,)))
    in_two_blocks = {spec: stepped(bits, 0.0005, 90) for spec, bits in large.items()}
    for spec, bits in large.items():
        in_two_blocks[spec][1 << 18 : 2 << 18] = bits[1 << 18 : 2 << 18]
        in_two_blocks[spec][[0, -1]] ^= 1
    return (
        Model.of(small, {spec: stepped(bits, 0.3, 3) for spec, bits in small.items()}),
        Model.of(kinds, {spec: stepped(bits, 0.2, 1000) for spec, bits in kinds.items()}),
        Model.of(dense, {spec: random_bits(rng, spec) for spec in dense}),
        Model.of(large, in_two_blocks),
    )
