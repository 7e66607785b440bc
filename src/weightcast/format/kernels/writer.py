"""Write blocks: changed places and steps to bits (SPEC 6.5)."""

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
    rice_of,
    step_of,
)
from weightcast.format.kernels.bitio import put, put_rice, rice_length
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, leading_zeros
from weightcast.format.kernels.memory import (
    ROOM,
    TURN,
    bytes_at,
    gather_at,
    keys_at,
    ranks_at,
    scatter_at,
    take,
)
from weightcast.format.kernels.ranks import rank_block
from weightcast.format.kernels.tasks import OTHER_BASE, RAW, give_up, load_changes, traits_of

CHANGE_ROOM = 12
"""Bytes that a change can take."""

_U0, _U1 = np.uint64(0), np.uint64(1)


def block_room(elements, changes):
    """Bytes that a block can take.

    The gaps add up to at most the number of elements: under 4 bits per element. A change takes at most 88 bits for its
    distance, and 4 for its direction and its place in the far set.
    """
    return elements // 2 + CHANGE_ROOM * changes + 4096


_block_room = kernel(block_room)


@kernel
def _best_rice(gaps):
    """The cheapest Rice parameter for ``gaps``, searched near the logarithm of their mean.

    The search begins in integers, as `choose_bands` does: a device must come to the same bytes.
    """
    total = np.int64(0)
    for gap in gaps:
        total += gap
    middle = 0
    while middle < MAX_GAP_RICE and 7 * total > 10 * ((2 << middle) - 1) * gaps.size:  # 2**(middle + 1) < 0.7 mean + 1
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
def _rank_gaps(ranks, mine, size, inverted, gaps):
    """Gaps between the ranks of a band's changes (if inverted, of its other members), and the closing gap."""
    used, last, unseen = 0, -1, 0
    for k in range(mine.size + 1):
        rank = np.int64(ranks[mine[k]]) if k < mine.size else size
        first = unseen if inverted else rank
        for listed in range(first, rank if inverted else min(rank + 1, size)):
            gaps[used] = listed - last - 1
            used += 1
            last = listed
        unseen = rank + 1
    gaps[used] = size - last - 1
    return used + 1


@kernel
def _subset_gaps(chosen, total, inverted, gaps):
    """The same for ordinals 0..total-1 whose flag ``chosen`` is set (if inverted, is not set)."""
    used, last = 0, -1
    for i in range(total):
        if chosen[i] != inverted:
            gaps[used] = i - last - 1
            used += 1
            last = i
    gaps[used] = total - last - 1
    return used + 1


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
def _measure_steps(old, new, dtype, up, distance, exponent):
    """Direction and distance of every change in ULPs, and its old exponent."""
    for i in range(old.size):
        up[i], distance[i] = step_of(old[i], new[i], dtype)
        exponent[i] = key_of(old[i], dtype.magnitude, dtype.shift, dtype.bias)


@kernel
def _invert(sizes, bands, start, inverted):
    """Decide which bands list their unchanged members; returns the space that all lists need."""
    room = 2 * start[bands] + 2 * bands
    for b in range(bands):
        changes = start[b + 1] - start[b]
        if 2 * changes > sizes[b]:
            inverted[2 * b] = True
            room += sizes[b] - changes
    return room


@kernel
def _list_sets(ranks, distance, sizes, bands, order, start, inverted, gaps, end, far_order):
    """Gaps of every band's changed and far sets, set s in ``gaps[end[s]:end[s + 1]]``; returns how many are far."""
    far = np.empty(ranks.size, np.bool_)
    fars, used = 0, 0
    for b in range(bands):
        mine = order[start[b] : start[b + 1]]
        if mine.size:
            used += _rank_gaps(ranks, mine, np.int64(sizes[b]), inverted[2 * b], gaps[used:])
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
    return fars


@kernel
def _put_header(out, uppers, bands, gaps, end, inverted, parameter):
    """Bands and parameters; returns the stream's state."""
    at, held = put(out, np.int64(0), _U0, bands, 8)
    for b in range(bands - 1):
        if b == 0:
            at, held = put(out, at, held, uppers[0], 8)
        else:
            at, held = put_rice(out, at, held, uppers[b] - uppers[b - 1] - 1, 0, 8)
    for s in range(2 * bands):
        mine = gaps[end[s] : end[s + 1]]
        parameter[s] = _best_rice(mine) if mine.size else NOTHING
        at, held = put(out, at, held, parameter[s], 5)
        if mine.size:
            at, held = put(out, at, held, inverted[s], 1)
    return at, held


@kernel
def _put_lists(out, at, held, which, bands, gaps, end, parameter):
    """The lists of all bands' changed sets (``which`` is 0) or far sets (1)."""
    for b in range(bands):
        s = 2 * b + which
        for gap in gaps[end[s] : end[s + 1]]:
            at, held = put_rice(out, at, held, gap, parameter[s], RANK_BITS)
    return at, held


@kernel
def _put_distances(out, at, held, distance, exponent, width):
    reach, sloped = _best_reach(distance, exponent, width)
    at, held = put(out, at, held, sloped, 1)
    at, held = put(out, at, held, reach, REACH_BITS)
    for i in range(distance.size):
        at, held = put_rice(out, at, held, distance[i], rice_of(reach, sloped, exponent[i]), width)
    return at, held


@kernel
def _encode_block(ranks, old, new, bands, uppers, sizes, dtype, out):
    """Write one block with at least one change; returns its bytes."""
    n = ranks.size
    up, distance, exponent = np.empty(n, np.bool_), np.empty(n, np.uint64), np.empty(n, np.int64)
    _measure_steps(old, new, dtype, up, distance, exponent)

    order = np.empty(n, np.int64)
    start = by_band(exponent, uppers, bands, order)
    inverted, parameter = np.zeros(2 * bands, np.bool_), np.empty(2 * bands, np.int64)
    gaps = np.empty(_invert(sizes, bands, start, inverted), np.int64)
    end, far_order = np.zeros(2 * bands + 1, np.int64), np.empty(n, np.int64)
    fars = _list_sets(ranks, distance, sizes, bands, order, start, inverted, gaps, end, far_order)

    at, held = _put_header(out, uppers, bands, gaps, end, inverted, parameter)
    at, held = _put_lists(out, at, held, 0, bands, gaps, end, parameter)
    at, held = _put_flags(out, at, held, up)
    at, held = _put_lists(out, at, held, 1, bands, gaps, end, parameter)
    if fars:
        far = far_order[:fars]
        at, held = _put_distances(out, at, held, distance[far] - np.uint64(2), exponent[far], dtype.width)
    return (at + 7) >> 3


@kernel
def _put_raw(tensor, task, places, now, whole, out):
    """The block's new elements as they are; returns the bytes."""
    size = task.elements * tensor.word
    if tensor.old:  # else every element changes
        whole[:size] = bytes_at(tensor.old + np.uint64(task.first * tensor.word), size)
    scatter_at(np.uint64(whole.ctypes.data), tensor.word, task.elements, places, now)
    out[0] = RAW
    out[1 : 1 + size] = whole[:size]
    return 1 + size


@kernel
def _bands_of(tensor, task, low, places, was, now, dtype, cost, keys, ranks, uppers, sizes):
    """Ranks of a block's changes, and its bands: one, those found before, or those of the old elements."""
    n = places.size
    block = task.first // BLOCK
    if not tensor.banded:
        ranks[:n] = places
        uppers[0], sizes[0] = 255, task.elements
        return 1
    if tensor.ranks:
        ranks[:n] = ranks_at(tensor.ranks + np.uint64(4 * low), n)
        uppers[:] = bytes_at(tensor.uppers + np.uint64(MAX_BANDS * block), MAX_BANDS)
        sizes[:] = ranks_at(tensor.sizes + np.uint64(4 * MAX_BANDS * block), MAX_BANDS)
        return np.int64(bytes_at(tensor.bands + np.uint64(block), 1)[0])
    keys_at(tensor.old + np.uint64(task.first * tensor.word), tensor.word, task.elements, dtype, keys)
    sizes[:] = 0  # those of bands without changes are not filled in
    return rank_block(keys, places, was, now, dtype, cost, ranks[:n], uppers, sizes)


@kernel
def _is_base(tensor, task, places, was, there):
    """Whether the old elements are those that the patch changes."""
    gather_at(tensor.old + np.uint64(task.first * tensor.word), tensor.word, task.elements, places, there)
    same = True
    for i in range(places.size):
        same &= there[i] == was[i]
    return same


@kernel
def encode_tasks(counters, tensors, tasks, cost, room):
    """Encode the blocks of tasks until there are none left, or one has another base: bytes go to the common room."""
    keys, whole = np.empty(BLOCK + LANES, np.uint8), np.empty(8 * BLOCK, np.uint8)
    all_places, all_was, all_now = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    ranks, uppers, sizes = np.empty(BLOCK, np.int32), np.empty(MAX_BANDS, np.int64), np.empty(MAX_BANDS, np.int32)
    there, out = np.empty(BLOCK, np.uint64), np.empty(0, np.uint8)
    while True:
        i = take(counters, TURN, 1)
        if i >= tasks.size:
            return
        task = tasks[i]
        tensor = tensors[task.tensor]
        low, n = load_changes(tensor, task, all_places, all_was, all_now)
        task.count, task.changes = min(n, 0), n
        if n < 0:
            give_up(counters, tasks)
            return
        if n == 0:
            continue
        places, was, now = all_places[:n], all_was[:n], all_now[:n]
        if tensor.old and not _is_base(tensor, task, places, was, there):
            task.count = OTHER_BASE
            give_up(counters, tasks)
            return
        dtype = traits_of(tensor)
        bands = _bands_of(tensor, task, low, places, was, now, dtype, cost, keys[: task.elements], ranks, uppers, sizes)
        if out.size < _block_room(task.elements, n):
            out = np.empty(_block_room(task.elements, n), np.uint8)
        size = _encode_block(ranks[:n], was, now, bands, uppers, sizes, dtype, out)
        if size > 1 + task.elements * tensor.word and (tensor.old or n == task.elements):
            size = _put_raw(tensor, task, places, now, whole, out)
        start = take(counters, ROOM, np.int64(size))
        room[start : start + size] = out[:size]
        task.count, task.start = size, start
