"""Other weights with the position digest of given ones: what an attacker makes who chooses the bits (SPEC 4.4.1).

Digests of tensors are sums. Some weights are overwritten as the attacker likes; then eight others are chosen, by a
merge of four levels over lists of 2¹⁶ values, so that the sum stays what it was.
"""

from __future__ import annotations

import numpy as np

U = np.uint64
_VALUES = np.arange(1 << 16, dtype=U)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


def _mix(index: int, bits: np.ndarray) -> np.ndarray:
    places = np.full(1, index, U) + U(0x9E3779B97F4A7C15)
    return _mix64(_mix64(places) ^ _mix64(np.asarray(bits, U).reshape(-1) + U(0xD1B54A32D192ED03)))


_List = tuple[np.ndarray, np.ndarray]
"""Sums, and the values that give each of them."""


def _merged(one: _List, other: _List, want: np.uint64, bits: int) -> _List:
    """The pairs whose sums agree with ``want`` in their low bits."""
    mask = U((1 << bits) - 1) if bits < 64 else U(0xFFFFFFFFFFFFFFFF)
    order = np.argsort(other[0] & mask)
    sorted_ = (other[0] & mask)[order]
    wanted = (want - one[0]) & mask
    low, high = (np.searchsorted(sorted_, wanted, side) for side in ("left", "right"))
    counts = high - low
    left = np.repeat(np.arange(one[0].size), counts)
    spans = [np.arange(a, b) for a, b in zip(low[counts > 0], high[counts > 0], strict=True)]
    right = order[np.concatenate(spans)] if spans else np.empty(0, int)
    return one[0][left] + other[0][right], np.concatenate([one[1][left], other[1][right]], axis=1)


def forged(good: np.ndarray, count: int, bits: int = 0x7F7F) -> np.ndarray:
    """The 16-bit words ``good`` with the first ``count`` overwritten by ``bits``, and with the digest they had."""
    with np.errstate(over="ignore"):
        evil = good.copy()
        evil[:count] = bits
        gained = U(0)
        for index in range(count):
            gained += (_mix(index, evil[index]) - _mix(index, good[index]))[0]
        need, first = U(0) - gained, count
        while True:
            places = range(first, first + 8)
            lists = [(_mix(at, _VALUES) - _mix(at, good[at]), np.arange(1 << 16)[:, None]) for at in places]
            zero = U(0)
            pairs = [_merged(lists[i], lists[i + 1], need if i == 6 else zero, 16) for i in (0, 2, 4, 6)]
            fours = _merged(pairs[0], pairs[1], zero, 32), _merged(pairs[2], pairs[3], need, 32)
            sums, values = _merged(fours[0], fours[1], need, 64)
            if sums.size:
                for at, value in zip(places, values[0], strict=True):
                    evil[at] = value
                return evil
            first += 8
