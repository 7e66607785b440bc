"""Ranks of changed elements within their bands: all that encoding needs of the whole old tensor (SPEC 6.4, 6.5)."""

import numpy as np

from weightcast.format.kernels.bands import (
    BLOCK,
    MAX_BANDS,
    by_band,
    choose_bands,
    count_members,
    key_of,
    members_of,
    step_of,
)
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, popcount
from weightcast.format.kernels.memory import TURN, bytes_at, keys_at, ranks_at, take
from weightcast.format.kernels.tasks import give_up, load_changes, traits_of

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
def _rank_band(keys, low, high, places, mine, before, ranks):
    """Fill in the ranks of a band's changes ``mine``; returns the band's size."""
    count_members(keys, low, high, before)
    for i in mine:
        word, bit = places[i] >> 6, np.uint64(places[i] & 63)
        ahead = members_of(keys, word, low, high) & ((_U1 << bit) - _U1)
        ranks[i] = before[word] + np.int64(popcount(ahead))
    return before[-1]


@kernel
def rank_block(keys, places, old, new, dtype, cost, ranks, uppers, sizes):
    """Split one block into bands and rank its changes; returns the number of bands."""
    members, changed_keys, far_keys = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64)
    change_keys, order = np.empty(places.size, np.int64), np.empty(places.size, np.int64)
    _tally(keys, old, new, dtype, members, changed_keys, far_keys, change_keys)
    chosen = np.empty(256, np.int64)
    bands = choose_bands(members, changed_keys, far_keys, cost, chosen)
    start = by_band(change_keys, chosen, bands, order)
    before = np.empty((keys.size + LANES - 1) // LANES + 1, np.int64)
    low = 0
    for b in range(bands):
        uppers[b] = chosen[b]
        mine = order[start[b] : start[b + 1]]
        if mine.size:
            sizes[b] = _rank_band(keys, low, chosen[b], places, mine, before, ranks)
        low = chosen[b] + 1
    return bands


@kernel
def rank_tasks(counters, tensors, tasks, cost):
    """Rank the changes in the blocks of tasks against the old elements, until there are none left.

    For each block it fills in the number of bands, the highest key of each and, if a band has changes, its size.
    """
    keys = np.empty(BLOCK + LANES, np.uint8)
    all_places, all_was, all_now = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    uppers, sizes = np.empty(MAX_BANDS, np.int64), np.empty(MAX_BANDS, np.int32)
    while True:
        i = take(counters, TURN, 1)
        if i >= tasks.size:
            return
        task = tasks[i]
        tensor = tensors[task.tensor]
        low, n = load_changes(tensor, task, all_places, all_was, all_now)
        task.count = min(n, 0)
        if n < 0:
            give_up(counters, tasks)
            return
        if n == 0:
            continue
        mine, block, dtype = keys[: task.elements], task.first // BLOCK, traits_of(tensor)
        keys_at(tensor.old + np.uint64(task.first * tensor.word), tensor.word, task.elements, dtype, mine)
        ranks = ranks_at(tensor.ranks + np.uint64(4 * low), n)
        uppers[:], sizes[:] = 0, 0  # those of bands without changes are not filled in
        bands = rank_block(mine, all_places[:n], all_was[:n], all_now[:n], dtype, cost, ranks, uppers, sizes)
        bytes_at(tensor.bands + np.uint64(block), 1)[0] = bands
        bytes_at(tensor.uppers + np.uint64(MAX_BANDS * block), MAX_BANDS)[:] = uppers
        ranks_at(tensor.sizes + np.uint64(4 * MAX_BANDS * block), MAX_BANDS)[:] = sizes
