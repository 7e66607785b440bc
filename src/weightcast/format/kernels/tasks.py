"""Tasks: a block of a tensor to compare, encode or decode, taken by whichever thread is free.

What tasks find goes to common room in the order in which they end; a second call puts it in the order of the tensors.
"""

import numpy as np

from weightcast.format.kernels.bands import BLOCK, Traits
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.cpu import digest_change
from weightcast.format.kernels.memory import (
    ROOM,
    TURN,
    bytes_at,
    changes_at,
    indices_at,
    load_at,
    rounded_changes_at,
    store_at,
    take,
)

TENSOR = np.dtype(
    [
        ("word", "i8"),  # bytes of an element
        ("width", "i8"), ("magnitude", "u8"), ("shift", "u8"), ("bias", "i8"), ("signed", "?"),  # its traits
        ("old", "u8"), ("new", "u8"),  # addresses of its elements; 0 if they are not known
        ("mantissa", "i8"), ("exponent", "i8"),  # bits of what new elements are rounded to, if they are binary32; or 0
        ("indices", "u8"), ("was", "u8"), ("now", "u8"), ("changed", "i8"),  # a patch of it: to read, or to fill in
        ("banded", "?"), ("ranks", "u8"), ("bands", "u8"), ("uppers", "u8"), ("sizes", "u8"),  # 0 if not ranked yet
        ("stream", "u8"), ("nbytes", "i8"),  # its coded blocks
    ],
    align=True,
)  # fmt: skip
TASK = np.dtype(
    [
        ("tensor", "i8"),
        ("first", "i8"), ("elements", "i8"),  # of the tensor
        ("begin", "i8"), ("end", "i8"),  # of the block in the tensor's stream, to decode
        ("changes", "i8"),  # in the block, encoded
        ("count", "i8"), ("start", "i8"),  # what it found, and where in the common room; a negative count is an error
        ("place", "i8"),  # where that belongs in the end
        ("gain", "u8"),  # what the changes add to the tensor's digest
    ],
    align=True,
)  # fmt: skip

RAW = 0
"""The first byte of a block that holds its elements' new bits as they are; in other blocks, the number of bands."""

_ROUNDED = 1 << 13
"""Elements that are rounded before they are compared: few enough to stay in the nearest cache."""

MANY = -8
"""An error: there is no room for so many changes."""
UNSORTED = -11
"""An error: indices are not in order."""
OTHER_BASE = -10
"""An error: the old elements are not those that the patch changes."""


@kernel
def traits_of(tensor):
    return Traits(tensor.width, tensor.magnitude, tensor.shift, tensor.bias, tensor.signed)


@kernel
def give_up(counters, tasks):
    """No thread takes another task."""
    take(counters, TURN, np.int64(tasks.size))


@kernel
def load_changes(tensor, task, places, was, now):
    """The changes of a patch in a task's block, places within it; returns where they begin and how many there are.

    The number is `UNSORTED` if the places are not in order, or one is there twice.
    """
    indices = indices_at(tensor.indices, tensor.changed)
    low, high = np.searchsorted(indices, task.first), np.searchsorted(indices, task.first + task.elements)
    n, last = high - low, np.int64(-1)
    if n > task.elements:
        return low, np.int64(UNSORTED)
    for i in range(n):
        place = indices[low + i] - task.first
        if place <= last or place >= task.elements:
            return low, np.int64(UNSORTED)
        places[i] = last = place
    load_at(tensor.was, tensor.word, low, was[:n])
    load_at(tensor.now, tensor.word, low, now[:n])
    return low, n


@kernel
def keep_changes(counters, task, places, was, now, all_indices, all_was, all_now):
    """Move what a task found to the common room; False if it does not fit. ``places`` become flat indices."""
    n = places.size
    for i in range(n):
        places[i] += task.first
    start = take(counters, ROOM, np.int64(n))
    if start + n > all_indices.size:
        task.count = MANY
        return False
    all_indices[start : start + n] = places
    all_was[start : start + n] = was
    all_now[start : start + n] = now
    task.count, task.start, task.gain = n, start, digest_change(places, was, now)
    return True


@kernel
def diff_tasks(counters, tensors, tasks, all_indices, all_was, all_now):
    """Compare the old and new elements of tasks until there are none left."""
    places, was, now = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    rounded = np.empty(_ROUNDED, np.uint16)
    while True:
        i = take(counters, TURN, 1)
        if i >= tasks.size:
            return
        task = tasks[i]
        tensor = tensors[task.tensor]
        old = tensor.old + np.uint64(task.first * tensor.word)
        if tensor.mantissa:
            new, size = tensor.new + np.uint64(task.first * 4), task.elements
            n = rounded_changes_at(old, new, tensor.mantissa, tensor.exponent, size, rounded, places, was, now)
        else:
            new = tensor.new + np.uint64(task.first * tensor.word)
            n = changes_at(old, new, tensor.word, task.elements, places, was, now)
        if not keep_changes(counters, task, places[:n], was[:n], now[:n], all_indices, all_was, all_now):
            give_up(counters, tasks)
            return


@kernel
def place_changes(counters, tensors, tasks, all_indices, all_was, all_now):
    """Move what all tasks found to the patches of their tensors, in order."""
    while True:
        i = take(counters, TURN, 1)
        if i >= tasks.size:
            return
        task = tasks[i]
        tensor = tensors[task.tensor]
        mine = slice(task.start, task.start + task.count)
        indices_at(tensor.indices + np.uint64(8 * task.place), task.count)[:] = all_indices[mine]
        store_at(tensor.was, tensor.word, task.place, all_was[mine])
        store_at(tensor.now, tensor.word, task.place, all_now[mine])


@kernel
def place_bytes(counters, tensors, tasks, room):
    """Move what all tasks wrote to the streams of their tensors, in order."""
    while True:
        i = take(counters, TURN, 1)
        if i >= tasks.size:
            return
        task = tasks[i]
        stream = bytes_at(tensors[task.tensor].stream, tensors[task.tensor].nbytes)
        stream[task.place : task.place + task.count] = room[task.start : task.start + task.count]
