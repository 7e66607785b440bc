"""The weights before and after of the good vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
from checkpoints import Tensor, Tensors, some_bits, vector

import weightcast as wc
from weightcast.format.spec import DTYPES

CODECS = ("plain", "gap", "banded")
BLOCK = 1 << 18


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
