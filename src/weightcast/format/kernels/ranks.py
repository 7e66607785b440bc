"""Ranks of changed elements within their bands: all that encoding needs of the whole old tensor (SPEC 6.4, 6.5)."""

import numpy as np

from weightcast.format.kernels.bands import BLOCK, by_band, choose_bands, key_of, members_of, step_of
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, popcount

_U1 = np.uint64(1)


@kernel
def _tally(keys, old, new, dtype, members, changed, far, change_keys):
    """For each key: how many elements have it (from a sample), change, and change by more than one step."""
    stride = (keys.size >> 14) | 1  # a sample is enough: the choice of bands is the encoder's own
    for i in range(0, keys.size, stride):
        members[keys[i]] += stride
    for i in range(old.size):
        key = key_of(old[i], dtype.magnitude, dtype.shift, dtype.bias)
        change_keys[i] = key
        changed[key] += 1
        far[key] += step_of(old[i], new[i], dtype)[1] > _U1
    for key in range(256):
        members[key] = max(members[key], changed[key])


@kernel
def _rank_band(keys, low, high, changed, mine, ranks):
    """Fill in the ranks of a band's changes ``mine``, which are in order of place; returns the band's size."""
    used, seen = 0, 0
    for word in range(changed.size):
        members = members_of(keys, word, low, high)
        chosen = members & changed[word]
        while chosen:
            bit = chosen & (~chosen + _U1)
            ranks[mine[used]] = seen + np.int64(popcount(members & (bit - _U1)))
            used += 1
            chosen ^= bit
        seen += np.int64(popcount(members))
    return seen


@kernel
def _rank_block(keys, places, old, new, dtype, cost, ranks, uppers, sizes):
    """Split one block into bands and rank its changes; returns the number of bands."""
    members, changed_keys, far_keys = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64)
    change_keys, order = np.empty(places.size, np.int64), np.empty(places.size, np.int64)
    _tally(keys, old, new, dtype, members, changed_keys, far_keys, change_keys)
    chosen = np.empty(256, np.int64)
    bands = choose_bands(members, changed_keys, far_keys, cost, chosen)
    start = by_band(change_keys, chosen, bands, order)
    changed = np.zeros((keys.size + LANES - 1) // LANES, np.uint64)
    for place in places:
        changed[place >> 6] |= _U1 << np.uint64(place & 63)
    low = 0
    for b in range(bands):
        uppers[b] = chosen[b]
        mine = order[start[b] : start[b + 1]]
        if mine.size:
            sizes[b] = _rank_band(keys, low, chosen[b], changed, mine, ranks)
        low = chosen[b] + 1
    return bands


@kernel
def rank_span(keys, indices, old, new, first, dtype, cost, ranks, bands, uppers, sizes):
    """Rank the changes in consecutive blocks whose elements have ``keys``, the first at flat index ``first``.

    For each block it fills in the number of ``bands``, the highest key of each and, if a band has changes, its size.
    """
    i = 0
    for block in range(bands.size):
        low = block * BLOCK
        high = min(low + BLOCK, keys.size)
        j = i
        while j < indices.size and indices[j] < first + high:
            j += 1
        if j > i:
            places = indices[i:j] - (first + low)
            bands[block] = _rank_block(
                keys[low:high], places, old[i:j], new[i:j], dtype, cost, ranks[i:j], uppers[block], sizes[block]
            )
        i = j
