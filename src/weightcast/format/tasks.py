"""Work on the blocks of many tensors in one compiled call per thread (`weightcast.format.kernels.tasks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.kernels.bands import BLOCK, Traits
from weightcast.format.kernels.tasks import MANY, TASK, TENSOR, UNSORTED, diff_tasks, place_changes
from weightcast.format.spec import Dtype, TensorSpec
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers

Records = npt.NDArray[np.void]
Rooms = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]

_INDEX = np.dtype(np.int64)

_KEPT = 1 << 24
_spare: list[Rooms] = []
"""Rooms of at most so many changes, for the next calls: fresh pages would cost a fifth of their time."""

DENSE = 16
"""A comparison begins with room for a change in so many elements."""


@cache
def traits(dtype: Dtype) -> Traits:
    """What the kernels need of a dtype."""
    if dtype.mantissa is None:
        return Traits(dtype.width, np.uint64(0), np.uint64(0), 0, False)
    magnitude = np.uint64((1 << (dtype.width - 1)) - 1)
    return Traits(dtype.width, magnitude, np.uint64(dtype.mantissa), 896 if dtype.width == 64 else 0, True)


def address(array: npt.NDArray[Any] | None) -> int:
    """Of a contiguous array's memory; 0 for none. Whoever passes it on keeps the array."""
    if array is None:
        return 0
    assert array.flags.c_contiguous
    return array.ctypes.data


def tensor_records(specs: Sequence[TensorSpec]) -> Records:
    """A record for each tensor, with its traits; addresses are still missing."""
    records = np.zeros(len(specs), TENSOR)
    for record, spec in zip(records, specs, strict=True):
        kind = traits(spec.kind)
        record["word"], record["width"], record["magnitude"] = spec.kind.word.itemsize, kind.width, kind.magnitude
        record["shift"], record["bias"], record["signed"] = kind.shift, kind.bias, kind.signed_magnitude
    return records


def tasks_of_blocks(elements: Sequence[int]) -> Records:
    """A task for each block of tensors with so many elements."""
    sizes = np.asarray(elements, np.int64)
    blocks = -(-sizes // BLOCK)
    tasks = np.zeros(int(blocks.sum()), TASK)
    tasks["tensor"] = np.repeat(np.arange(sizes.size), blocks)
    tasks["first"] = (np.arange(tasks.size) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * BLOCK
    tasks["elements"] = np.minimum(BLOCK, sizes[tasks["tensor"]] - tasks["first"])
    return tasks


def run(kernel: Callable[..., None], workers: Workers, tensors: Records, tasks: Records, *room: Any) -> None:
    """Call a kernel on as many threads as have a use; each takes tasks until there are none left."""
    counters = np.zeros(2, np.int64)
    threads = range(min(workers.threads, len(tasks)))
    workers.map(lambda _: kernel(counters, tensors, tasks, *room), threads)


@contextmanager
def room_for(changes: int) -> Iterator[Rooms]:
    """Common room for so many changes: pages that are never written are never allocated."""
    rooms: Rooms | None = None
    with suppress(IndexError):  # other threads take it too
        rooms = _spare.pop()
    if rooms is None or rooms[0].size < changes:
        rooms = np.empty(changes, np.int64), np.empty(changes, np.uint64), np.empty(changes, np.uint64)
    indices, was, now = rooms
    yield indices[:changes], was[:changes], now[:changes]
    if indices.size <= _KEPT and len(_spare) < 2:
        _spare.append(rooms)


def refuse_unsorted(specs: Sequence[TensorSpec], tasks: Records) -> None:
    """`UsageError` if a task met indices that are not in order."""
    wrong = np.flatnonzero(tasks["count"] == UNSORTED)
    if wrong.size:
        raise unsorted(specs[tasks["tensor"][wrong[0]]])


def unsorted(spec: TensorSpec) -> UsageError:
    return UsageError("the patch's indices are unsorted, repeated or outside the tensor", tensor=spec.name)


def parts(words: Sequence[np.dtype], sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    """New arrays of these words and sizes: parts of one, since each allocation takes time."""
    ends = list(accumulate(-(-word.itemsize * size // 8) * 8 for word, size in zip(words, sizes, strict=True)))
    room = np.empty(ends[-1] if ends else 0, np.uint8)
    begins = (0, *ends)
    return [
        room[begin : begin + word.itemsize * size].view(word)
        for begin, word, size in zip(begins, words, sizes, strict=False)
    ]


def set_places(tensors: int, tasks: Records) -> npt.NDArray[np.int64]:
    """Say for each task where what it found belongs in its tensor; returns how much there is for each tensor."""
    ends = np.cumsum(tasks["count"])
    totals = np.zeros(tensors, np.int64)
    np.add.at(totals, tasks["tensor"], tasks["count"])
    tasks["place"] = ends - tasks["count"] - (np.cumsum(totals) - totals)[tasks["tensor"]]
    return totals


Listed = tuple[npt.NDArray[np.int64], Bits, Bits]
"""Changes of one tensor: sorted flat indices, the bits before, the bits after."""


def set_changes(specs: Sequence[TensorSpec], tensors: Records, changes: Sequence[Listed]) -> None:
    """Say where the changes of tensors are, to read or to fill in. `UsageError` for arrays of other types or sizes."""
    for spec, (indices, was, now) in zip(specs, changes, strict=True):
        if not (
            indices.dtype == _INDEX
            and was.dtype == now.dtype == spec.kind.word
            and indices.shape == was.shape == now.shape == (indices.size,)
        ):
            text = f"a patch has a list of int64 and as many {spec.kind.word} before and after"
            raise UsageError(text, tensor=spec.name)
    for place, name in enumerate(("indices", "was", "now")):
        tensors[name] = [address(one[place]) for one in changes]
    tensors["changed"] = [indices.size for indices, _, _ in changes]


@dataclass(frozen=True, eq=False)
class Found:
    """The changes of one tensor: sorted flat indices, the bits before and after, what they add to its digest."""

    indices: npt.NDArray[np.int64]
    was: Bits
    now: Bits
    gain: int


def collect(
    specs: Sequence[TensorSpec], tensors: Records, tasks: Records, rooms: Rooms, workers: Workers
) -> list[Found]:
    """What all tasks found, by tensor."""
    totals = set_places(len(specs), tasks)
    gains = np.zeros(len(specs), np.uint64)
    np.add.at(gains, tasks["tensor"], tasks["gain"])
    words = [spec.kind.word for spec in specs]
    indices, was, now = (parts(kinds, totals.tolist()) for kinds in ([_INDEX] * len(specs), words, words))
    set_changes(specs, tensors, list(zip(indices, was, now, strict=True)))
    run(place_changes, workers, tensors, tasks, *rooms)
    return [Found(*one) for one in zip(indices, was, now, gains.tolist(), strict=True)]


def compare_tensors(
    specs: Sequence[TensorSpec],
    olds: Sequence[Bits],
    news: Sequence[Bits],
    workers: Workers,
    rounded: tuple[int, int] | None = None,
) -> list[Found]:
    """Where two states of tensors differ, bit by bit; ``rounded``: the new ones are float32, to be rounded to that."""
    tensors, tasks = tensor_records(specs), tasks_of_blocks([spec.elements for spec in specs])
    tensors["mantissa"], tensors["exponent"] = rounded or (0, 0)
    tensors["old"], tensors["new"] = [address(bits) for bits in olds], [address(bits) for bits in news]
    elements = sum(spec.elements for spec in specs)
    with room_for(elements // DENSE + BLOCK) as rooms:
        run(diff_tasks, workers, tensors, tasks, *rooms)
        if not (tasks["count"] == MANY).any():
            return collect(specs, tensors, tasks, rooms, workers)
    with room_for(elements) as rooms:
        run(diff_tasks, workers, tensors, tasks, *rooms)
        return collect(specs, tensors, tasks, rooms, workers)
