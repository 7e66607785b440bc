"""Read blocks: bits to changed places and steps. For any bits, every loop ends and stays in bounds."""

import numpy as np

from weightcast.format.kernels.bands import (
    BLOCK,
    MAX_BANDS,
    MAX_GAP_RICE,
    NOTHING,
    RANK_BITS,
    REACH_BITS,
    by_band,
    key_of,
    members_of,
    ordered,
    rice_of,
    unordered,
)
from weightcast.format.kernels.bitio import SLACK, get, get_rice, get_wide
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, deposit, popcount, range_mask, trailing_zeros
from weightcast.format.kernels.memory import TURN, bytes_at, changes_at, gather_at, keys_at, take
from weightcast.format.kernels.tasks import RAW, give_up, keep_changes, traits_of

# What is wrong with a block; `weightcast.format.codec.blocks` has the messages.
ENDED, BANDS, PARAMETER, RANK, DISTANCE, TRAILING, EMPTY, RAW_SIZE = -1, -2, -3, -4, -5, -6, -7, -9

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
def _read_members(data, at, end, parameter, inverted, keys, low, high, changed):
    """Mark the places of a band's listed members, or of all others; returns the next bit or an error.

    Members are counted and ranks are read in one walk over the words: a rank belongs to the word that reaches it.
    """
    gap, at = get_rice(data, at, parameter, RANK_BITS)
    rank, seen = np.int64(gap), np.int64(0)
    for word in range(changed.size):
        if word < keys.size // LANES:
            members = range_mask(keys, word * LANES, np.uint8(low), np.uint8(high - low))
        else:
            members = members_of(keys, word, low, high)
        size = np.int64(popcount(members))
        if inverted or rank < seen + size:
            listed = _U0
            while rank < seen + size:
                if at > end:
                    return np.int64(ENDED)
                listed |= _U1 << np.uint64(rank - seen)
                gap, at = get_rice(data, at, parameter, RANK_BITS)
                rank += np.int64(gap) + 1
            changed[word] |= deposit(~listed if inverted else listed, members)
        seen += size
    if at > end:
        return np.int64(ENDED)
    return at if rank == seen else np.int64(RANK)


@kernel
def _read_header(data, at, end, uppers, parameter, inverted):
    """Bands and parameters of a block; returns the number of bands, or an error, and the next bit.

    The end is checked first, so that no error depends on what follows the block.
    """
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
        if at > end:
            return np.int64(ENDED), at
        if uppers[b] >= 255:
            return np.int64(BANDS), at
    uppers[bands - 1] = 255
    for s in range(2 * bands):
        parameter[s] = np.int64(get(data, at, 5))
        at += 5
        if at > end:
            return np.int64(ENDED), at
        if parameter[s] != NOTHING:
            if parameter[s] > MAX_GAP_RICE:
                return np.int64(PARAMETER), at
            inverted[s] = get(data, at, 1) != _U0
            at += 1
        if at > end:
            return np.int64(ENDED), at
    return bands, at


@kernel
def _read_places(data, at, end, bands, uppers, parameter, inverted, keys, changed, places):
    """The places that changed in a block, in order; returns their number and the next bit, or an error."""
    changed[:] = 0
    key = 0
    for b in range(bands):
        if parameter[2 * b] != NOTHING:
            if bands == 1 and not inverted[0]:  # ranks are places
                at = _read_ranks(data, at, end, parameter[0], keys.size, changed.view(np.uint8))
            else:
                at = _read_members(data, at, end, parameter[2 * b], inverted[2 * b], keys, key, uppers[b], changed)
            if at < 0:
                return at, at
        key = uppers[b] + 1
    used = 0
    for word in range(changed.size):
        mask = changed[word]
        while mask:
            places[used] = word * LANES + np.int64(trailing_zeros(mask))
            used += 1
            mask &= mask - _U1
    return (used if used else np.int64(EMPTY)), at


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
def _read_steps(data, at, end, bands, uppers, parameter, inverted, keys, ranks, places, old, dtype, new):
    """The new bits at ``places`` from the old ones; returns 0 or an error."""
    width, magnitude, shift, bias, signed_magnitude = dtype
    mask = (_U1 << np.uint64(width - 1)) | ((_U1 << np.uint64(width - 1)) - _U1)
    n = places.size
    band_key, exponent = np.empty(n, np.uint8), np.empty(n, np.int64)
    for i in range(n):
        band_key[i] = keys[places[i]]
        exponent[i] = key_of(old[i], magnitude, shift, bias)
    order, distance = np.empty(n, np.int64), np.ones(n, np.uint64)
    start = by_band(band_key, uppers, bands, order)
    ups = at
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
            was = ordered(old[j], width, signed_magnitude)
            now = was + distance[j] if up & _U1 else was - distance[j]
            new[j] = unordered(now & mask, width, signed_magnitude)
            up >>= _U1
    return np.int64(0)


@kernel
def _decode_raw(tensor, task, room, places, was, now):
    """The changes of a block that holds its elements as they are; returns how many, or an error."""
    size = task.elements * tensor.word
    if task.end - task.begin != 1 + size:
        return np.int64(RAW_SIZE)
    room[:size] = bytes_at(tensor.stream + np.uint64(task.begin + 1), size)  # aligned, as elements must be
    old = tensor.old + np.uint64(task.first * tensor.word)
    n = changes_at(old, np.uint64(room.ctypes.data), tensor.word, task.elements, places, was, now)
    return n if n else np.int64(EMPTY)


@kernel
def _block_bytes(tensor, task):
    """A block's bytes with `SLACK` after them: in place, unless the stream ends too soon."""
    size = task.end - task.begin
    here = bytes_at(tensor.stream + np.uint64(task.begin), size)
    if task.end + SLACK <= tensor.nbytes:
        return bytes_at(tensor.stream + np.uint64(task.begin), size + SLACK)
    padded = np.zeros(size + SLACK, np.uint8)
    padded[:size] = here
    return padded


@kernel
def decode_tasks(counters, tensors, tasks, all_indices, all_was, all_now):
    """Decode the blocks of tasks until there are none left, or one has an error."""
    places, was, now = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    all_keys, no_keys = np.empty(BLOCK + LANES, np.uint8), np.zeros(BLOCK + LANES, np.uint8)
    ranks, all_changed = np.zeros(BLOCK // 8 + 16, np.uint8), np.empty(BLOCK // LANES, np.uint64)
    uppers, parameter = np.empty(MAX_BANDS, np.int64), np.empty(2 * MAX_BANDS, np.int64)
    inverted, room = np.zeros(2 * MAX_BANDS, np.bool_), np.empty(8 * BLOCK, np.uint8)
    while True:
        i = take(counters, TURN, 1)
        if i >= tasks.size:
            return
        task = tasks[i]
        tensor = tensors[task.tensor]
        data, end = _block_bytes(tensor, task), 8 * (task.end - task.begin)
        if data[0] == RAW:
            n = _decode_raw(tensor, task, room, places, was, now)
        else:
            dtype, old = traits_of(tensor), tensor.old + np.uint64(task.first * tensor.word)
            n, at = _read_header(data, 0, end, uppers, parameter, inverted)
            if n > 0:
                bands, keys = n, no_keys[: task.elements]
                if bands > 1:
                    keys = all_keys[: task.elements]
                    keys_at(old, tensor.word, task.elements, dtype, keys)
                words = (task.elements + LANES - 1) // LANES
                changed = all_changed[:words]
                n, at = _read_places(data, at, end, bands, uppers, parameter, inverted, keys, changed, places)
            if n > 0:
                gather_at(old, tensor.word, task.elements, places[:n], was)
                wrong = _read_steps(
                    data, at, end, bands, uppers, parameter, inverted, keys, ranks, places[:n], was[:n], dtype, now[:n]
                )
                n = wrong if wrong else n
        if n < 0:
            task.count = n
        if n < 0 or not keep_changes(counters, task, places[:n], was[:n], now[:n], all_indices, all_was, all_now):
            give_up(counters, tasks)
            return
