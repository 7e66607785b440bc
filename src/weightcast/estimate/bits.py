"""Bits per changed element, from a model of how optimizers change weights; checked against recorded steps.

Weights are normal, and the size of an update is uniform up to some M, which follows from the density. The grid of a
floating-point number has a step of its exponent's, so the share of a band of exponents that changes is known:

- parameters trained in float32 and rounded for the wire lie anywhere between two steps, so an update of *d* steps moves
  a weight by a step with probability *d*, or by floor(d) or one more;
- parameters trained in the wire's own dtype move by round(d) steps: only weights that are small enough move at all.

A codec pays for places, one bit for the direction, and distances: `gap` as if all elements changed alike, `banded`
band by band. What the coders add to the entropy is a constant each, from the recorded steps.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

Training = Literal["fp32", "wire"]
"""What the optimizer updates: float32 masters, or parameters in the dtype that is published."""

_SHARES = tuple(
    (octave, math.erf(2.0 ** (octave + 1) / math.sqrt(2)) - math.erf(2.0**octave / math.sqrt(2)))
    for octave in range(-40, 4)
)
"""Exponents of normal weights with a deviation of 1, and the share of the weights that has each."""

_DISTANCES = 64
"""Distances that are told apart; longer ones are counted as this one. Where nine weights in ten change, that is 5 % too
few bits, and more beyond."""

_ABOVE_ENTROPY = {("gap", "fp32"): 0.13, ("banded", "fp32"): 0.30, ("gap", "wire"): 0.39, ("banded", "wire"): 0.81}
"""Bits per change that the coders took above the entropies of the model, on the whole recordings."""

FILE_BYTES, TENSOR_BYTES = 650, 12
"""Of an object without its streams, and of each tensor in its table."""


def bits_per_change(codec: str, density: float, training: Training = "fp32", itemsize: int = 2) -> float:
    """Bits for each changed element; ``density`` is the share of elements that change, between 0 and 1.

    >>> [round(bits_per_change(codec, 0.0137), 1) for codec in ("plain", "gap", "banded")]
    [48.0, 9.6, 6.8]
    """
    if codec == "plain":
        return 8.0 * (4 + itemsize)
    coded = _coded(codec, round(density, 9), training)
    return min(coded, 8.0 * itemsize / density)


@cache
def _coded(codec: str, density: float, training: Training) -> float:
    most = _largest_update(density, training)
    bands = [(share, *_moved(most * 2.0**-octave, training)) for octave, share in _SHARES]
    beyond = 1 + _ABOVE_ENTROPY[codec, training]
    if codec == "banded":
        places = sum(share * _entropy(rate) for share, rate, _ in bands)
        distances = sum(share * rate * _entropy_of(steps) for share, rate, steps in bands)
        return (places + distances) / density + beyond
    mixed = [sum(share * rate * steps[i] for share, rate, steps in bands) / density for i in range(_DISTANCES)]
    return _entropy(density) / density + _entropy_of(mixed) + beyond


def _moved(most: float, training: Training) -> tuple[float, list[float]]:
    """Which part of a band changes by updates of up to ``most`` steps, and how its distances are spread."""
    rate = _rate(most, training)
    if rate <= 0:
        return 0.0, [0.0] * _DISTANCES
    if training == "fp32":
        counted = [(_ramp(most - n + 1) - 2 * _ramp(most - n) + _ramp(most - n - 1)) / most for n in range(_DISTANCES)]
    else:
        counted = [max(0.0, min(most, n + 0.5) - (n - 0.5)) / most for n in range(_DISTANCES)]
    spread = [0.0, *(max(part, 0.0) / rate for part in counted[1:])]
    spread[-1] += max(0.0, 1.0 - sum(spread))
    return rate, spread


def _rate(most: float, training: Training) -> float:
    """Which part of the weights changes by updates of up to ``most`` steps."""
    if training == "fp32":
        return most / 2 if most < 1 else 1 - 1 / (2 * most)
    return max(0.0, 1 - 0.5 / most)


def _ramp(value: float) -> float:
    return max(value, 0.0) ** 2 / 2


def _largest_update(density: float, training: Training) -> float:
    """The M with which so large a part of the elements changes, in steps of weights around 1."""
    low, high = 1e-15, 1e15
    for _ in range(100):
        middle = math.sqrt(low * high)
        if sum(share * _rate(middle * 2.0**-octave, training) for octave, share in _SHARES) < density:
            low = middle
        else:
            high = middle
    return high


def _entropy(part: float) -> float:
    """Bits to say whether an element is one of a part."""
    return _entropy_of([part, 1 - part])


def _entropy_of(parts: list[float]) -> float:
    return -sum(part * math.log2(part) for part in parts if part > 0)
