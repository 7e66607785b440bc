"""Changed copies of weights, special values included."""

from __future__ import annotations

import numpy as np
from cases import Bag, moved

SPECIAL = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC1, 0xFFA5]
"""bf16: zeros, denormals, infinities, NaNs with payloads."""


def changed(old: Bag, density: float, seed: int, names: set[str] | None = None) -> Bag:
    rng = np.random.default_rng(seed)
    new = old.copy()
    for spec in new.table:
        if names is None or spec.name in names:
            bits = moved(rng, old.read(spec.name), density, 2**15)
            if spec.dtype == "BF16" and density:
                bits[rng.permutation(bits.size)[:3]] = rng.choice(SPECIAL, 3)
            new.write(spec.name, bits)
    return new
