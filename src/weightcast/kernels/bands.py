"""Keys, bands and steps: what writer and reader of a block see in its old bits (SPEC 6.1, 6.5, 6.6).

A block is up to `BLOCK` consecutive elements of one tensor. Its elements are split into bands by their key (the old
exponent); within a band the changed places are coded as Rice gaps *in ranks among the band's members*. All loops run
over words of 64 elements: a vector compare gives a band's members as a mask, a popcount gives their number.

Elements arrive here widened to 64 bits, so that one compilation serves all dtypes.
"""

from typing import NamedTuple

import numpy as np

from weightcast.kernels.bitio import MAX_RICE
from weightcast.kernels.compile import kernel
from weightcast.kernels.lanes import LANES, popcount, range_mask

BLOCK = 1 << 18
MAX_BANDS = 16
RANK_BITS = 19
"""Bits of an escaped gap: a gap is at most `BLOCK`."""

MAX_GAP_RICE = 18

NOTHING = 31
"""In the place of a Rice parameter: this set is empty."""

REACH_BITS = 9

BAND_COST = 22.0
"""Bits that one more band costs in header and closing gaps: two neighbours merge where apart they save less."""

_U0, _U1 = np.uint64(0), np.uint64(1)


class Traits(NamedTuple):
    """What kernels know of a dtype: ``magnitude``, ``shift`` and ``bias`` make the band key of its bits (SPEC 6.1)."""

    width: int
    magnitude: np.uint64
    shift: np.uint64
    bias: int
    signed_magnitude: bool


@kernel
def key_of(bits, magnitude, shift, bias):
    """The band key of an element: its exponent field, 0 to 255 (SPEC 6.1)."""
    exponent = np.int64((bits & magnitude) >> shift) - bias
    return min(max(exponent, 0), 255)


@kernel
def ordered(bits, width, signed_magnitude):
    """Bits as an integer in the order of the numbers they stand for; its own inverse is `unordered`."""
    top = _U1 << np.uint64(width - 1)
    if signed_magnitude:
        return (~bits & (top | (top - _U1))) if bits & top else bits | top
    return bits


@kernel
def unordered(order, width, signed_magnitude):
    top = _U1 << np.uint64(width - 1)
    if signed_magnitude:
        return order ^ top if order & top else ~order & (top | (top - _U1))
    return order


@kernel
def rice_of(reach, sloped, key):
    """Rice parameter of a distance: a step of one size spans twice the ULPs one exponent further down."""
    return min(max(reach - key, 0), MAX_RICE) if sloped else min(reach, MAX_RICE)


@kernel
def _entropy(total, chosen):
    """Bits to say which ``chosen`` of ``total`` are meant, about."""
    if chosen <= 0 or chosen >= total:
        return 0.0
    rest = total - chosen
    return chosen * np.log2(total / chosen) + rest * np.log2(total / rest)


@kernel
def _merge_loss(totals, b):
    """Bits lost if band ``b`` and the next were one. Columns: members, changed ones, those changed far."""
    loss = 0.0
    for sign, low, high in ((1.0, b, b + 2), (-1.0, b, b + 1), (-1.0, b + 1, b + 2)):
        members = changed = far = 0.0
        for i in range(low, high):
            members, changed, far = members + totals[i, 0], changed + totals[i, 1], far + totals[i, 2]
        loss += sign * (_entropy(members, changed) + _entropy(changed, far))
    return loss


@kernel
def choose_bands(keys, changed_keys, far_keys, uppers):
    """Split the keys into bands of about one rate of change; fills ``uppers``, returns how many and their sizes."""
    stride = (keys.size >> 14) | 1  # a sample is enough: the choice is the encoder's own
    sample = np.zeros(256, np.int64)
    for i in range(0, keys.size, stride):
        sample[keys[i]] += stride
    totals = np.zeros((256, 3), np.float64)
    bands = 0
    for key in range(256):
        members = max(sample[key], changed_keys[key])
        if members:
            totals[bands, 0], totals[bands, 1], totals[bands, 2] = members, changed_keys[key], far_keys[key]
            uppers[bands] = key
            bands += 1
    loss = np.zeros(256, np.float64)
    for b in range(bands - 1):
        loss[b] = _merge_loss(totals, b)
    while bands > 1:
        best = np.argmin(loss[: bands - 1])
        if bands <= MAX_BANDS and loss[best] >= BAND_COST:
            break
        for column in range(3):
            totals[best + 1, column] += totals[best, column]
            for b in range(best, bands - 1):
                totals[b, column] = totals[b + 1, column]
        for b in range(best, bands - 1):
            uppers[b], loss[b] = uppers[b + 1], loss[b + 1]
        bands -= 1
        for b in range(max(best - 1, 0), min(best + 1, bands - 1)):
            loss[b] = _merge_loss(totals, b)
    uppers[bands - 1] = 255
    return bands, totals[:, 0].copy()


@kernel
def members_of(keys, word, low, high):
    """Mask of the band's members among the 64 elements of ``word``, of which the last may be shorter."""
    mask = range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low))
    rest = keys.size - word * LANES
    return mask & ((_U1 << np.uint64(rest)) - _U1) if rest < LANES else mask


@kernel
def band_size(keys, low, high):
    size = _U0
    for word in range(keys.size // LANES):
        size += popcount(range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low)))
    if keys.size % LANES:
        size += popcount(members_of(keys, keys.size // LANES, low, high))
    return np.int64(size)


@kernel
def by_band(change_keys, uppers, bands, order):
    """Stable order of the changes by band; returns where each band starts."""
    band_of = np.empty(256, np.int64)
    low = 0
    for b in range(bands):
        band_of[low : uppers[b] + 1] = b
        low = uppers[b] + 1
    start = np.zeros(bands + 1, np.int64)
    for key in change_keys:
        start[band_of[key] + 1] += 1
    for b in range(bands):
        start[b + 1] += start[b]
    fill = start.copy()
    for i in range(change_keys.size):
        b = band_of[change_keys[i]]
        order[fill[b]] = i
        fill[b] += 1
    return start
