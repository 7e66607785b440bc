"""`gap` and `banded`: a tensor as blocks of at most 2**18 elements (SPEC 6). One reader serves both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightcast.errors import FormatError, UsageError
from weightcast.format.codec.coded import Blocks, Coded, Prepared, other_base
from weightcast.format.codec.ranks import Ranks, band_cost, set_ranks
from weightcast.format.kernels import reader, writer
from weightcast.format.kernels.bands import BLOCK
from weightcast.format.kernels.tasks import MANY, OTHER_BASE, RAW, TASK, place_bytes
from weightcast.format.patch import TensorPatch, patch_of
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row
from weightcast.format.tasks import (
    Records,
    address,
    collect,
    parts,
    refuse_unsorted,
    room_for,
    run,
    set_changes,
    set_places,
    tasks_of_blocks,
    tensor_records,
    unsorted,
)
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers

_PROBLEMS = {
    reader.ENDED: "a block ends before its codes do",
    reader.BANDS: "a block has impossible bands",
    reader.PARAMETER: "a block has an impossible Rice parameter",
    reader.RANK: "a block's gaps run past its last element",
    reader.DISTANCE: "a block has an impossible distance",
    reader.TRAILING: "a block is longer than its codes",
    reader.EMPTY: "a block changes nothing",
    MANY: "the streams change more elements than the table says",
}

Job = tuple[TensorPatch, Bits | Prepared | None]


def encode_gap(jobs: Sequence[Job], workers: Workers) -> list[Coded]:
    """One band per block, so the reader needs old bits only where something changed."""
    return _encode([(patch, None if isinstance(old, Ranks) else old) for patch, old in jobs], False, workers)


def encode_banded(jobs: Sequence[Job], workers: Workers) -> list[Coded]:
    """Elements in bands of their old exponent, changes as ranks within a band.

    Small weights change far more often than large ones, since the bf16 step shrinks with the weight and Adam's does
    not. The reader holds the old weights, so every element's exponent costs nothing.
    """
    for patch, old in jobs:
        if old is None:
            hint = "Pass `old`, or use `gap`."
            raise UsageError("`banded` needs the whole old tensor", tensor=patch.spec.name, hint=hint)
    return _encode(jobs, True, workers)


def _encode(jobs: Sequence[Job], banded: bool, workers: Workers) -> list[Coded]:
    """Code what was not coded already."""
    rest = [(patch, old) for patch, old in jobs if not isinstance(old, Blocks)]
    coded = iter(_encode_tensors(rest, banded, workers) if rest else ())
    return [_coded(patch, old.sizes, old.stream) if isinstance(old, Blocks) else next(coded) for patch, old in jobs]


def _coded(patch: TensorPatch, sizes: tuple[tuple[int, int], ...], stream: npt.NDArray[np.uint8]) -> Coded:
    return Coded(Row(patch.spec, patch.changed, patch.digest, sizes), {"blocks": stream})


def _encode_tensors(
    jobs: Sequence[tuple[TensorPatch, Bits | Ranks | None]], banded: bool, workers: Workers
) -> list[Coded]:
    """Blocks can be raw where the old tensor is known, or every element changes. `UsageError` for another base."""
    patches = [patch for patch, _ in jobs]
    specs = [patch.spec for patch in patches]
    tensors = tensor_records(specs)
    tasks = tasks_of_blocks([patch.spec.elements if patch.changed else 0 for patch in patches])
    tensors["banded"] = banded
    set_changes(specs, tensors, [(patch.indices, _old_bits(patch), patch.new) for patch in patches])
    for patch, old in jobs:
        if isinstance(old, Ranks):
            old.refuse_others(patch.spec, patch.changed)
    tensors["old"] = [0 if old is None or isinstance(old, Ranks) else address(old) for _, old in jobs]
    set_ranks(tensors, [old if isinstance(old, Ranks) else None for _, old in jobs])
    most = writer.block_room(tasks["elements"], 0).sum() + tensors["changed"].sum() * writer.CHANGE_ROOM
    room = np.empty(int(most), np.uint8)
    run(writer.encode_tasks, workers, tensors, tasks, band_cost(), room)
    _refuse_problems(specs, tensors, tasks)
    streams = parts([np.dtype(np.uint8)] * len(specs), set_places(len(specs), tasks).tolist())
    tensors["stream"], tensors["nbytes"] = [address(stream) for stream in streams], [stream.size for stream in streams]
    run(place_bytes, workers, tensors, tasks, room)
    sizes = _block_sizes(len(specs), tasks)
    return [_coded(*one) for one in zip(patches, sizes, streams, strict=True)]


def _refuse_problems(specs: Sequence[TensorSpec], tensors: Records, tasks: Records) -> None:
    """`UsageError` for another base, or changes that are not in order or in no block."""
    refuse_unsorted(specs, tasks)
    wrong = np.flatnonzero(tasks["count"] == OTHER_BASE)
    if wrong.size:
        raise other_base(specs[tasks["tensor"][wrong[0]]].name)
    coded = np.zeros(len(specs), np.int64)
    np.add.at(coded, tasks["tensor"], tasks["changes"])
    missing = np.flatnonzero(coded != tensors["changed"])
    if missing.size:
        raise unsorted(specs[missing[0]])


def _old_bits(patch: TensorPatch) -> Bits:
    if patch.old is None:
        hint = "Use `plain`."
        raise UsageError("`gap` and `banded` need the old bits of every change", tensor=patch.spec.name, hint=hint)
    return patch.old


def _block_sizes(tensors: int, tasks: Records) -> list[tuple[tuple[int, int], ...]]:
    """For each tensor, ordinals and sizes of the blocks that change something."""
    written = tasks[tasks["count"] > 0]
    pairs = list(zip((written["first"] // BLOCK).tolist(), written["count"].tolist(), strict=True))
    ends = np.searchsorted(written["tensor"], np.arange(tensors), side="right").tolist()
    return [tuple(pairs[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def decode(jobs: Sequence[tuple[Coded, Bits | None]], workers: Workers) -> list[TensorPatch]:
    """Read the blocks against the old tensors; blocks of one band read them only where they changed."""
    windows = []
    for coded, old in jobs:
        if old is None or old.size != coded.row.spec.elements:
            hint = "Pass the weights that the patch was made from as `old`."
            message = "`gap` and `banded` cannot be decoded without the old tensor"
            raise UsageError(message, tensor=coded.row.spec.name, hint=hint)
        windows.append((coded, Window(0, old)))
    return decode_in_windows(windows, workers)


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive elements of an old tensor, of which the others are not at hand."""

    first: int
    bits: Bits

    @property
    def end(self) -> int:
        return self.first + self.bits.size


def decode_in_windows(jobs: Sequence[tuple[Coded, Window]], workers: Workers) -> list[TensorPatch]:
    """`decode` for tensors whose blocks are all within a window; `UsageError` if one is not."""
    rows = [coded.row for coded, _ in jobs]
    specs, streams = [row.spec for row in rows], [coded.streams["blocks"] for coded, _ in jobs]
    tensors, tasks = tensor_records(specs), _tasks_of_rows(rows)
    for row, (_, window) in zip(rows, jobs, strict=True):
        if not _holds(window, row):  # kernels check nothing
            raise UsageError("a block is outside of the old elements that are there", tensor=row.spec.name)
    words = [spec.kind.word.itemsize for spec in specs]
    tensors["old"] = [
        (address(window.bits) - window.first * word) % (1 << 64)  # where the tensor would begin: kernels add to it
        for (_, window), word in zip(jobs, words, strict=True)
    ]
    tensors["stream"], tensors["nbytes"] = [address(stream) for stream in streams], [stream.size for stream in streams]
    with room_for(most_changes(rows)) as rooms:
        run(reader.decode_tasks, workers, tensors, tasks, *rooms)
        wrong = np.flatnonzero(tasks["count"] < 0)
        if wrong.size:
            task = tasks[wrong[0]]
            spec = specs[task["tensor"]]
            needed = task["elements"] * spec.kind.word.itemsize
            raise FormatError(problem_of(int(task["count"]), task["end"] - task["begin"], needed), tensor=spec.name)
        found = collect(specs, tensors, tasks, rooms, workers)
    return [patch_of(row.spec, one, row.digest) for row, one in zip(rows, found, strict=True)]


def some_blocks(coded: Coded, chosen: npt.NDArray[np.bool_]) -> Coded:
    """A row with some of its blocks alone; it still counts the changes of all."""
    if chosen.all():
        return coded
    row, begins = coded.row, _begins(coded.row)
    kept = [block for block, is_kept in zip(row.blocks, chosen, strict=True) if is_kept]
    stream = coded.streams["blocks"]
    pieces = [stream[begins[i] : begins[i + 1]] for i in np.flatnonzero(chosen)]
    return Coded(replace(row, blocks=tuple(kept)), {"blocks": np.concatenate(pieces)})


def raw_blocks(coded: Coded, chosen: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Bits]] | None:
    """The first element and the new bits of blocks that hold their elements as they are, and so need no old ones.

    None if another block is among the chosen ones.
    """
    begins, stream = _begins(coded.row), coded.streams["blocks"]
    which = np.flatnonzero(chosen).tolist()
    if (stream[begins[which]] != RAW).any():
        return None
    return (_raw_block(coded.row.spec, coded.row.blocks[i][0], stream[begins[i] : begins[i + 1]]) for i in which)


def _raw_block(spec: TensorSpec, ordinal: int, block: npt.NDArray[np.uint8]) -> tuple[int, Bits]:
    first = ordinal * BLOCK
    needed = min(BLOCK, spec.elements - first) * spec.kind.word.itemsize
    if block.size != 1 + needed:
        raise FormatError(problem_of(reader.RAW_SIZE, block.size, needed), tensor=spec.name)
    return first, block[1:].copy().view(spec.kind.word)  # aligned, as elements must be


def _begins(row: Row) -> npt.NDArray[np.int64]:
    """Where the blocks are in their stream, and its end."""
    return np.cumsum([0, *(size for _, size in row.blocks)])


def _holds(window: Window, row: Row) -> bool:
    if not row.blocks:
        return True
    begin, end = row.blocks[0][0] * BLOCK, min((row.blocks[-1][0] + 1) * BLOCK, row.spec.elements)
    return window.first <= begin and end <= window.end and window.bits.dtype == row.spec.kind.word


def most_changes(rows: Sequence[Row]) -> int:
    """Changes to make room for. A block more than the table says: a count that is a little too small can be told."""
    return sum(row.changed for row in rows) + BLOCK


def problem_of(error: int, nbytes: int, needed: int) -> str:
    """What is wrong with a block of ``nbytes``, whose elements have ``needed``."""
    if error == reader.RAW_SIZE:
        return f"a raw block has {nbytes - 1} bytes, its elements have {needed}"
    return _PROBLEMS[error]


def _tasks_of_rows(rows: Sequence[Row]) -> Records:
    """A task for each block that is there."""
    tasks = np.zeros(sum(len(row.blocks) for row in rows), TASK)
    tasks["tensor"] = np.repeat(np.arange(len(rows)), [len(row.blocks) for row in rows])
    blocks = np.array([block for row in rows for block in row.blocks], np.int64).reshape(-1, 2)
    sizes = np.array([row.spec.elements for row in rows], np.int64)[tasks["tensor"]]
    tasks["first"] = blocks[:, 0] * BLOCK
    tasks["elements"] = np.minimum(BLOCK, sizes - tasks["first"])
    ends = np.cumsum(blocks[:, 1])
    begins = np.array([sum(length for _, length in row.blocks) for row in rows], np.int64)
    tasks["end"] = ends - (np.cumsum(begins) - begins)[tasks["tensor"]]
    tasks["begin"] = tasks["end"] - blocks[:, 1]
    return tasks
