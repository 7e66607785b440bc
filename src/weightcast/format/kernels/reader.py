"""Read blocks: bits to changed places and steps. For any bits, every loop ends and stays in bounds."""

import numpy as np

from weightcast.format.kernels.bands import (
    BLOCK,
    MAX_BANDS,
    MAX_GAP_RICE,
    NOTHING,
    RANK_BITS,
    REACH_BITS,
    band_size,
    by_band,
    key_of,
    members_of,
    ordered,
    rice_of,
    unordered,
)
from weightcast.format.kernels.bitio import get, get_rice, get_wide
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, deposit, load_word, popcount, range_mask, trailing_zeros

# What is wrong with a block; `weightcast.format.codec.blocks` has the messages.
ENDED, BANDS, PARAMETER, RANK, DISTANCE, TRAILING, EMPTY = -1, -2, -3, -4, -5, -6, -7

_U0, _U1 = np.uint64(0), np.uint64(1)


@kernel
def _read_ranks(data, at, end, parameter, total, ranks):
    """Set a bit per coded rank below ``total`` in ``ranks``; returns the next bit or an error."""
    rank = np.int64(-1)
    while True:
        gap, at = get_rice(data, at, parameter, RANK_BITS)
        if at > end:
            return np.int64(ENDED)
        rank += np.int64(gap) + 1
        if rank >= total:
            return at if rank == total else np.int64(RANK)
        ranks[rank >> 3] |= np.uint8(1 << (rank & 7))


@kernel
def _mark(keys, low, high, ranks, inverted, changed):
    """Turn ``ranks`` within a band into places in ``changed``, and clear them. Few branches depend on the data."""
    flip = ~_U0 if inverted else _U0
    seen = 0
    for word in range(changed.size):
        if word < keys.size // LANES:
            members = range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low))
        else:
            members = members_of(keys, word, low, high)
        size = np.int64(popcount(members))
        chosen = load_word(ranks, seen >> 3) >> np.uint64(seen & 7)
        if size > 57:  # more than one load holds
            chosen |= load_word(ranks, (seen >> 3) + 8) << np.uint64(64 - (seen & 7)) if seen & 7 else _U0
        changed[word] |= deposit(chosen ^ flip, members)
        seen += size
    ranks[: (seen >> 3) + 1] = 0


@kernel
def _read_header(data, at, end, uppers, parameter, inverted):
    """Bands and parameters of a block; returns the number of bands, or an error, and the next bit."""
    bands = np.int64(get(data, at, 8))
    if bands < 1 or bands > MAX_BANDS:
        return np.int64(BANDS), at
    at += 8
    for b in range(bands - 1):
        if b == 0:
            uppers[0] = np.int64(get(data, at, 8))
            at += 8
        else:
            more, at = get_rice(data, at, 0, 8)
            uppers[b] = uppers[b - 1] + 1 + np.int64(more)
        if uppers[b] >= 255:
            return np.int64(BANDS), at
        if at > end:
            return np.int64(ENDED), at
    uppers[bands - 1] = 255
    for s in range(2 * bands):
        parameter[s] = np.int64(get(data, at, 5))
        at += 5
        if parameter[s] != NOTHING:
            if parameter[s] > MAX_GAP_RICE:
                return np.int64(PARAMETER), at
            inverted[s] = get(data, at, 1) != _U0
            at += 1
        if at > end:
            return np.int64(ENDED), at
    return bands, at


@kernel
def decode_places(data, offsets, keys, first, places, counts, resume):
    """First half of decoding consecutive blocks: the changed flat indices.

    ``data`` holds the blocks, block k from byte ``offsets[k]`` to ``offsets[k + 1]``; an empty one changes nothing.
    Fills ``places`` and, for each block, ``counts`` and the bit at which the steps ``resume``. Returns the number of
    places, or an error.
    """
    used = 0
    uppers, parameter = np.empty(MAX_BANDS, np.int64), np.empty(2 * MAX_BANDS, np.int64)
    inverted = np.zeros(2 * MAX_BANDS, np.bool_)
    ranks = np.zeros(BLOCK // 8 + 16, np.uint8)
    for block in range(counts.size):
        low = block * BLOCK
        mine = keys[low : min(low + BLOCK, keys.size)]
        at, end = 8 * offsets[block], 8 * offsets[block + 1]
        counts[block] = 0
        if at == end:
            continue
        bands, at = _read_header(data, at, end, uppers, parameter, inverted)
        if bands < 0:
            return bands
        changed = np.zeros((mine.size + LANES - 1) // LANES, np.uint64)
        key = 0
        for b in range(bands):
            if parameter[2 * b] != NOTHING:
                total = band_size(mine, key, uppers[b]) if bands > 1 else mine.size
                at = _read_ranks(data, at, end, parameter[2 * b], total, ranks)
                if at < 0:
                    return at
                _mark(mine, key, uppers[b], ranks, inverted[2 * b], changed)
            key = uppers[b] + 1
        before = used
        for word in range(changed.size):
            mask = changed[word]
            while mask:
                places[used] = first + low + word * LANES + np.int64(trailing_zeros(mask))
                used += 1
                mask &= mask - _U1
        if used == before:
            return np.int64(EMPTY)
        counts[block] = used - before
        resume[block] = at
    return used


@kernel
def _read_far(data, at, end, exponent, order, start, bands, parameter, inverted, width, ranks, distance):
    """Distances above one ULP, by band; returns the next bit or an error."""
    far_order = np.empty(order.size, np.int64)
    fars = 0
    for b in range(bands):
        if parameter[2 * b + 1] == NOTHING:
            continue
        size = start[b + 1] - start[b]
        at = _read_ranks(data, at, end, parameter[2 * b + 1], size, ranks)
        if at < 0:
            return at
        for i in range(size):
            if (ranks[i >> 3] >> (i & 7)) & 1 != inverted[2 * b + 1]:
                far_order[fars] = order[start[b] + i]
                fars += 1
        ranks[: (size >> 3) + 1] = 0
    if fars == 0:
        return at
    if at + 1 + REACH_BITS > end:
        return np.int64(ENDED)
    sloped = get(data, at, 1) != _U0
    reach = np.int64(get(data, at + 1, REACH_BITS))
    at += 1 + REACH_BITS
    furthest = (_U1 << np.uint64(width - 1)) - np.uint64(2)
    for i in far_order[:fars]:
        beyond, at = get_rice(data, at, rice_of(reach, sloped, exponent[i]), width)
        if at > end:
            return np.int64(ENDED)
        if beyond > furthest:
            return np.int64(DISTANCE)
        distance[i] = beyond + np.uint64(2)
    return at


@kernel
def decode_steps(data, offsets, keys, first, places, counts, resume, old, dtype, new):
    """Second half of decoding: the new bits at ``places`` from the old ones. Returns 0 or an error."""
    width, magnitude, shift, bias, signed_magnitude = dtype
    mask = (_U1 << np.uint64(width - 1)) | ((_U1 << np.uint64(width - 1)) - _U1)
    uppers, parameter = np.empty(MAX_BANDS, np.int64), np.empty(2 * MAX_BANDS, np.int64)
    inverted = np.zeros(2 * MAX_BANDS, np.bool_)
    ranks = np.zeros(BLOCK // 8 + 16, np.uint8)
    used = 0
    for block in range(counts.size):
        n, end = counts[block], 8 * offsets[block + 1]
        if offsets[block] == offsets[block + 1]:
            continue
        bands, _ = _read_header(data, 8 * offsets[block], end, uppers, parameter, inverted)
        mine = slice(used, used + n)
        before, after = old[mine], new[mine]
        band_key, exponent = np.empty(n, np.uint8), np.empty(n, np.int64)
        for i in range(n):
            band_key[i] = keys[places[used + i] - first]
            exponent[i] = key_of(before[i], magnitude, shift, bias)
        order = np.empty(n, np.int64)
        start = by_band(band_key, uppers, bands, order)
        distance = np.ones(n, np.uint64)
        ups = resume[block]
        if ups + n > end:
            return np.int64(ENDED)
        at = _read_far(data, ups + n, end, exponent, order, start, bands, parameter, inverted, width, ranks, distance)
        if at < 0:
            return at
        if at + 7 < end or at > end or get_wide(data, at, end - at) != _U0:
            return np.int64(TRAILING)
        for i in range(0, n, 32):
            up = get(data, ups + i, 32)
            for j in range(i, min(i + 32, n)):
                was = ordered(before[j], width, signed_magnitude)
                now = was + distance[j] if up & _U1 else was - distance[j]
                after[j] = unordered(now & mask, width, signed_magnitude)
                up >>= _U1
        used += n
    return np.int64(0)
