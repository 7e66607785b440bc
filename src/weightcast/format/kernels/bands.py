"""Keys, bands and steps: what writer and reader of a block derive from its old bits (SPEC 6.1, 6.5, 6.6).

A block is up to `BLOCK` consecutive elements of one tensor. Its elements are split into bands by their key (the old
exponent); within a band the changed places are coded as Rice gaps *in ranks among the band's members*. All loops run
over words of 64 elements: a vector compare gives a band's members as a mask, a popcount gives their number.

Elements are widened to 64 bits before, so that one compilation serves all dtypes.
"""

from typing import NamedTuple

import numpy as np

from weightcast.format.kernels.bitio import MAX_RICE
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, popcount, range_mask

BLOCK = 1 << 18
MAX_BANDS = 16
RANK_BITS = 19
"""Bits of an escaped gap: a gap is at most `BLOCK`."""

MAX_GAP_RICE = 18

NOTHING = 31
"""In place of a Rice parameter: this set is empty."""

REACH_BITS = 9

COST_SCALE = 1 << 16
"""Costs are integers, in this fraction of a bit."""

BAND_COST = 22 * COST_SCALE
"""What one more band costs in header and closing gaps: two neighbours are merged if keeping them apart saves less."""

_U0, _U1 = np.uint64(0), np.uint64(1)


class Traits(NamedTuple):
    """What kernels know about a dtype. ``magnitude``, ``shift`` and ``bias`` make the band key of bits (SPEC 6.1)."""

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
    """Bits as an integer in the order of the numbers they represent; `unordered` is the inverse."""
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
    """Rice parameter of a distance: a step of the same size spans twice as many ULPs one exponent lower."""
    return min(max(reach - key, 0), MAX_RICE) if sloped else min(reach, MAX_RICE)


@kernel
def step_of(old, new, dtype):
    """Direction (up?) and distance of a change, in steps of the order of numbers (SPEC 6.6)."""
    top = _U1 << np.uint64(dtype.width - 1)
    mask = top | (top - _U1)
    after = ordered(new, dtype.width, dtype.signed_magnitude)
    step = (after - ordered(old, dtype.width, dtype.signed_magnitude)) & mask
    up = step <= top
    return up, step if up else (mask - step) + _U1


@kernel
def _bits_of_band(cost, members, changed, far):
    """About the bits needed to say which members changed, and which of those by more than a step."""
    return cost[members] - cost[members - changed] - cost[far] - cost[changed - far]


@kernel
def choose_bands(members, changed, far, cost, uppers):
    """Split the keys into bands of about one rate of change; fills ``uppers``, returns how many.

    The arrays count by key, and are overwritten. ``cost[n]`` is n · log2(n) as an integer: sums of integers are the
    same on every device, in any order.
    """
    bands = 0
    for key in range(256):
        if members[key]:
            members[bands], changed[bands], far[bands] = members[key], changed[key], far[key]
            uppers[bands] = key
            bands += 1
    bits, loss = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for b in range(bands):
        bits[b] = _bits_of_band(cost, members[b], changed[b], far[b])
    for b in range(bands - 1):
        loss[b] = _merge_loss(cost, members, changed, far, bits, b)
    while bands > 1:
        best = np.argmin(loss[: bands - 1])
        if bands <= MAX_BANDS and loss[best] >= BAND_COST:
            break
        for counts in (members, changed, far):
            counts[best + 1] += counts[best]
        bits[best + 1] = _bits_of_band(cost, members[best + 1], changed[best + 1], far[best + 1])
        for column in (members, changed, far, bits, uppers, loss):
            for b in range(best, bands - 1):
                column[b] = column[b + 1]
        bands -= 1
        for b in range(max(best - 1, 0), min(best + 1, bands - 1)):
            loss[b] = _merge_loss(cost, members, changed, far, bits, b)
    uppers[bands - 1] = 255
    return bands


@kernel
def _merge_loss(cost, members, changed, far, bits, b):
    """Bits lost if band ``b`` and the next one are merged."""
    together = members[b] + members[b + 1], changed[b] + changed[b + 1], far[b] + far[b + 1]
    return _bits_of_band(cost, together[0], together[1], together[2]) - bits[b] - bits[b + 1]


@kernel
def members_of(keys, word, low, high):
    """Mask of the band's members among the 64 elements of ``word``; the last word may have fewer."""
    mask = range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low))
    rest = keys.size - word * LANES
    return mask & ((_U1 << np.uint64(rest)) - _U1) if rest < LANES else mask


@kernel
def count_members(keys, low, high, before):
    """Fill in how many members a band has before each word; the last one is how many it has in all."""
    seen = np.int64(0)
    for word in range(keys.size // LANES):
        before[word] = seen
        seen += np.int64(popcount(range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low))))
    if keys.size % LANES:
        before[keys.size // LANES] = seen
        seen += np.int64(popcount(members_of(keys, keys.size // LANES, low, high)))
    before[-1] = seen


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
