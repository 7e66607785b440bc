"""The block bitstream of `gap` and `banded` (SPEC 6): which elements of a block changed, and by how far.

A block is up to `BLOCK` consecutive elements of one tensor. Its elements are split into bands by their key (the old
exponent); within a band the changed places are coded as Rice gaps *in ranks among the band's members*. All loops run
over words of 64 elements: a vector compare gives a band's members as a mask, a popcount gives their number.

Elements arrive here widened to 64 bits, so that one compilation serves all dtypes.
"""

import numpy as np

from weightcast.kernels.bitio import MAX_RICE, get, get_rice, get_wide, put, put_rice, rice_length
from weightcast.kernels.compile import kernel
from weightcast.kernels.lanes import LANES, deposit, leading_zeros, popcount, range_mask, trailing_zeros

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

# What a reader found wrong; `weightcast.codec.blocks` gives each its words.
ENDED, BANDS, PARAMETER, RANK, DISTANCE, TRAILING, EMPTY = -1, -2, -3, -4, -5, -6, -7

_U0, _U1 = np.uint64(0), np.uint64(1)


# -- keys and steps --------------------------------------------------------------------------------------------------


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


# -- bands -----------------------------------------------------------------------------------------------------------


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
def _members(keys, count, word, low, high):
    """Mask of the band's members among the 64 elements of ``word``."""
    mask = range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low))
    rest = count - word * LANES
    return mask & ((_U1 << np.uint64(rest)) - _U1) if rest < LANES else mask


@kernel
def _band_size(keys, count, low, high):
    size = 0
    for word in range((count + LANES - 1) // LANES):
        size += np.int64(popcount(_members(keys, count, word, low, high)))
    return size


@kernel
def _by_band(change_keys, uppers, bands, order):
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


# -- encode ----------------------------------------------------------------------------------------------------------


@kernel
def _best_rice(gaps):
    """The cheapest Rice parameter for ``gaps``, searched around the logarithm of their mean."""
    mean = 0.0
    for gap in gaps:
        mean += gap
    mean /= gaps.size
    middle = 0
    while middle < MAX_GAP_RICE and (1 << (middle + 1)) <= 0.7 * mean + 1.0:
        middle += 1
    below, above = max(middle - 1, 0), middle + 1
    bits_below = bits = bits_above = 0
    for gap in gaps:
        bits_below += rice_length(gap, below, RANK_BITS)
        bits += rice_length(gap, middle, RANK_BITS)
        bits_above += rice_length(gap, above, RANK_BITS)
    if bits_below < bits:
        return below
    return above if bits_above < bits and above <= MAX_GAP_RICE else middle


@kernel
def _band_gaps(keys, count, low, high, changed, inverted, gaps):
    """Gaps in ranks between the changed (or, inverted, the unchanged) members of a band, and the closing one."""
    used, seen, last = 0, 0, -1
    for word in range((count + LANES - 1) // LANES):
        members = _members(keys, count, word, low, high)
        chosen = members & (~changed[word] if inverted else changed[word])
        while chosen:
            bit = chosen & (~chosen + _U1)
            rank = seen + np.int64(popcount(members & (bit - _U1)))
            gaps[used] = rank - last - 1
            used += 1
            last = rank
            chosen ^= bit
        seen += np.int64(popcount(members))
    gaps[used] = seen - last - 1
    return used + 1


@kernel
def _subset_gaps(chosen, total, inverted, gaps):
    """The same for ordinals 0..total-1 whose flag ``chosen`` is set (or, inverted, is not)."""
    used, last = 0, -1
    for i in range(total):
        if chosen[i] != inverted:
            gaps[used] = i - last - 1
            used += 1
            last = i
    gaps[used] = total - last - 1
    return used + 1


@kernel
def rice_of(reach, sloped, key):
    """Rice parameter of a distance: a step of one size spans twice the ULPs one exponent further down."""
    return min(max(reach - key, 0), MAX_RICE) if sloped else min(reach, MAX_RICE)


@kernel
def _reach_bits(distances, keys, width, reach, sloped):
    bits = 0
    for i in range(distances.size):
        bits += rice_length(distances[i], rice_of(reach, sloped, keys[i]), width)
    return bits


@kernel
def _best_reach(distances, keys, width):
    """The cheapest (reach, sloped) for the far distances."""
    best, best_sloped, best_bits = 0, False, np.int64(1) << 62
    for sloped in (False, True):
        mean = 0.0
        for i in range(distances.size):
            mean += 64 - np.int64(leading_zeros(distances[i])) + (keys[i] if sloped else 0)
        middle = np.int64(mean / distances.size)
        for reach in range(max(middle - 3, 0), min(middle + 3, 1 << REACH_BITS)):
            bits = _reach_bits(distances, keys, width, reach, sloped)
            if bits < best_bits:
                best, best_sloped, best_bits = reach, sloped, bits
    return best, best_sloped


@kernel
def _put_flags(out, at, held, flags):
    for i in range(0, flags.size, 32):
        count = min(32, flags.size - i)
        word = _U0
        for j in range(count):
            word |= np.uint64(flags[i + j]) << np.uint64(j)
        at, held = put(out, at, held, word, count)
    return at, held


@kernel
def _encode_block(keys, places, old, new, one_band, dtype, out):
    """Write one block with at least one change; returns its bytes."""
    width, magnitude, shift, bias, signed_magnitude = dtype
    count, n = keys.size, places.size
    words = (count + LANES - 1) // LANES
    top = _U1 << np.uint64(width - 1)

    changed = np.zeros(words, np.uint64)
    up = np.empty(n, np.bool_)
    distance = np.empty(n, np.uint64)
    exponent = np.empty(n, np.int64)
    changed_keys, far_keys = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for i in range(n):
        changed[places[i] >> 6] |= _U1 << np.uint64(places[i] & 63)
        step = (ordered(new[i], width, signed_magnitude) - ordered(old[i], width, signed_magnitude)) & (
            top | (top - _U1)
        )
        up[i] = step <= top
        distance[i] = step if up[i] else (top - (step - top))
        exponent[i] = key_of(old[i], magnitude, shift, bias)
        changed_keys[keys[places[i]]] += 1
        far_keys[keys[places[i]]] += distance[i] > _U1

    uppers = np.full(256, 255, np.int64)
    if one_band:
        bands, sizes = 1, np.full(256, count, np.float64)
    else:
        bands, sizes = choose_bands(keys, changed_keys, far_keys, uppers)
    order = np.empty(n, np.int64)
    start = _by_band(keys[places], uppers, bands, order)
    inverted = np.zeros(2 * bands, np.bool_)
    room, low = 2 * n + 2 * bands, 0
    for b in range(bands):
        changes = start[b + 1] - start[b]
        if 2 * changes > sizes[b]:
            unchanged = _band_size(keys, count, low, uppers[b]) - changes
            inverted[2 * b] = unchanged < changes
            room += unchanged
        low = uppers[b] + 1

    # Both sets of every band, before the header that states their parameters.
    gaps = np.empty(room, np.int64)
    end = np.zeros(2 * bands + 1, np.int64)
    far = np.empty(n, np.bool_)
    far_order = np.empty(n, np.int64)
    fars, used, low = 0, 0, 0
    for b in range(bands):
        high, mine = uppers[b], order[start[b] : start[b + 1]]
        if mine.size:
            used += _band_gaps(keys, count, low, high, changed, inverted[2 * b], gaps[used:])
        end[2 * b + 1] = used
        before = fars
        for i in range(mine.size):
            far[i] = distance[mine[i]] > _U1
            if far[i]:
                far_order[fars] = mine[i]
                fars += 1
        if fars > before:
            inverted[2 * b + 1] = 2 * (fars - before) > mine.size
            used += _subset_gaps(far, mine.size, inverted[2 * b + 1], gaps[used:])
        end[2 * b + 2] = used
        low = high + 1

    at, held = put(out, np.int64(0), _U0, bands, 8)
    for b in range(bands - 1):
        if b == 0:
            at, held = put(out, at, held, uppers[0], 8)
        else:
            at, held = put_rice(out, at, held, uppers[b] - uppers[b - 1] - 1, 0, 8)
    parameter = np.empty(2 * bands, np.int64)
    for s in range(2 * bands):
        mine = gaps[end[s] : end[s + 1]]
        if mine.size == 0:
            parameter[s] = NOTHING
            at, held = put(out, at, held, NOTHING, 5)
        else:
            parameter[s] = _best_rice(mine)
            at, held = put(out, at, held, parameter[s], 5)
            at, held = put(out, at, held, inverted[s], 1)
    for b in range(bands):
        for gap in gaps[end[2 * b] : end[2 * b + 1]]:
            at, held = put_rice(out, at, held, gap, parameter[2 * b], RANK_BITS)
    at, held = _put_flags(out, at, held, up)
    for b in range(bands):
        for gap in gaps[end[2 * b + 1] : end[2 * b + 2]]:
            at, held = put_rice(out, at, held, gap, parameter[2 * b + 1], RANK_BITS)
    if fars:
        far_order = far_order[:fars]
        reach, sloped = _best_reach(distance[far_order] - np.uint64(2), exponent[far_order], width)
        at, held = put(out, at, held, sloped, 1)
        at, held = put(out, at, held, reach, REACH_BITS)
        for i in far_order:
            at, held = put_rice(out, at, held, distance[i] - np.uint64(2), rice_of(reach, sloped, exponent[i]), width)
    return (at + 7) >> 3


@kernel
def encode_span(keys, indices, old, new, first, one_band, dtype, raw_bytes, out, lengths):
    """Code consecutive blocks whose elements have ``keys``, the first at flat index ``first``.

    Fills ``lengths`` with bytes per block, 0 where nothing changed, -1 where a raw block is smaller; returns the bytes.
    """
    used, i = 0, 0
    for block in range(lengths.size):
        low = block * BLOCK
        high = min(low + BLOCK, keys.size)
        j = i
        while j < indices.size and indices[j] < first + high:
            j += 1
        lengths[block] = 0
        if j > i:
            places = indices[i:j] - (first + low)
            size = _encode_block(keys[low:high], places, old[i:j], new[i:j], one_band, dtype, out[used:])
            if size > 1 + (high - low) * raw_bytes:
                lengths[block] = -1
            else:
                lengths[block] = size
                used += size
        i = j
    return used


# -- decode ----------------------------------------------------------------------------------------------------------


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
        ranks[rank >> 6] |= _U1 << np.uint64(rank & 63)


@kernel
def _mark(keys, count, low, high, ranks, inverted, changed):
    """Carry ``ranks`` within a band over to places in ``changed``, and clear them. Nothing here branches on data."""
    flip = ~_U0 if inverted else _U0
    seen = 0
    for word in range((count + LANES - 1) // LANES):
        members = _members(keys, count, word, low, high)
        i, shift = seen >> 6, np.uint64(seen & 63)
        chosen = (ranks[i] >> shift) | ((ranks[i + 1] << _U1) << (np.uint64(63) - shift))
        changed[word] |= deposit(chosen ^ flip, members)
        seen += np.int64(popcount(members))
    ranks[: (seen >> 6) + 1] = 0


@kernel
def _read_header(data, at, end, uppers, parameter, inverted):
    """Bands and parameters of a block; returns how many bands and the next bit, or an error and 0."""
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

    ``data`` holds the blocks, the one at ``k`` from byte ``offsets[k]`` to ``offsets[k + 1]``; empty ones changed
    nothing. Fills ``places``, and per block ``counts`` and the bit where the steps ``resume``. Returns the number of
    places, or an error.
    """
    used = 0
    uppers, parameter = np.empty(MAX_BANDS, np.int64), np.empty(2 * MAX_BANDS, np.int64)
    inverted = np.zeros(2 * MAX_BANDS, np.bool_)
    ranks = np.zeros(BLOCK // LANES + 2, np.uint64)
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
                total = _band_size(mine, mine.size, key, uppers[b]) if bands > 1 else mine.size
                at = _read_ranks(data, at, end, parameter[2 * b], total, ranks)
                if at < 0:
                    return at
                _mark(mine, mine.size, key, uppers[b], ranks, inverted[2 * b], changed)
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
def _read_subset(data, at, end, parameter, inverted, total, chosen):
    """Flags of a subset of 0..total-1; returns the next bit or an error."""
    chosen[:total] = inverted
    last = np.int64(-1)
    while True:
        gap, at = get_rice(data, at, parameter, RANK_BITS)
        if at > end:
            return np.int64(ENDED)
        last += np.int64(gap) + 1
        if last >= total:
            return at if last == total else np.int64(RANK)
        chosen[last] = not inverted


@kernel
def _read_far(data, at, end, old, exponent, order, start, bands, parameter, inverted, width, distance):
    """Distances above one ULP, by band; returns the next bit or an error."""
    n = old.size
    far = np.zeros(n, np.bool_)
    far_order = np.empty(n, np.int64)
    fars = 0
    for b in range(bands):
        if parameter[2 * b + 1] == NOTHING:
            continue
        size = start[b + 1] - start[b]
        at = _read_subset(data, at, end, parameter[2 * b + 1], inverted[2 * b + 1], size, far)
        if at < 0:
            return at
        for i in range(size):
            if far[i]:
                far_order[fars] = order[start[b] + i]
                fars += 1
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
    """Second half of decoding: from the old bits at ``places`` to the new. Returns 0 or an error."""
    width, magnitude, shift, bias, signed_magnitude = dtype
    mask = (_U1 << np.uint64(width - 1)) | ((_U1 << np.uint64(width - 1)) - _U1)
    uppers, parameter = np.empty(MAX_BANDS, np.int64), np.empty(2 * MAX_BANDS, np.int64)
    inverted = np.zeros(2 * MAX_BANDS, np.bool_)
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
        start = _by_band(band_key, uppers, bands, order)
        distance = np.ones(n, np.uint64)
        ups = resume[block]
        if ups + n > end:
            return np.int64(ENDED)
        at = _read_far(data, ups + n, end, before, exponent, order, start, bands, parameter, inverted, width, distance)
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
