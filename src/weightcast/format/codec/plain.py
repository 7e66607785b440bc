"""`plain`: indices and absolute values, for any safetensors reader (SPEC 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weightcast.errors import FormatError, UsageError
from weightcast.format.codec.coded import Coded, Prepared, other_base
from weightcast.format.kernels import cpu
from weightcast.format.patch import TensorPatch
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers


def index_of(spec: TensorSpec) -> np.dtype[np.signedinteger[Any]]:
    """The type of a tensor's indices."""
    return np.dtype("<i4" if spec.elements <= 1 << 31 else "<i8")


def is_dense(spec: TensorSpec, changed: int) -> bool:
    """Whether indices would take more bytes than the elements that do not change."""
    return changed * (index_of(spec).itemsize + spec.kind.word.itemsize) > spec.nbytes


def encode_tensor(patch: TensorPatch, old: Bits | None) -> Coded:
    """Indices and values; the whole tensor if that is smaller and known."""
    spec = patch.spec
    row = Row(spec, patch.changed, patch.digest)
    if is_dense(spec, patch.changed):
        if patch.changed == spec.elements:
            return Coded(row, {"values": patch.new})
        if old is not None:
            return Coded(row, {"values": patched(patch, old)})
    return Coded(row, {"indices": patch.indices.astype(index_of(spec)), "values": patch.new})


def patched(patch: TensorPatch, old: Bits) -> Bits:
    """The whole tensor after the patch, in new memory."""
    whole = old.copy()
    patch.scatter(whole)
    return whole


def decode_tensor(coded: Coded, old: Bits | None) -> TensorPatch:
    """Check the indices and take the values as they are."""
    spec, values = coded.row.spec, coded.streams["values"]
    if "indices" in coded.streams:
        _refuse_bad_indices(coded)
        indices = coded.streams["indices"].astype(np.int64)
        was = None
        if old is not None:
            was = np.empty(indices.size, old.dtype)
            cpu.gather(old, indices, 0, was)
            if (was == values).any():
                raise FormatError("the patch lists an element that it does not change", tensor=spec.name)
    elif old is None:
        if coded.row.changed != spec.elements:
            hint = "Pass the weights that the patch was made from as `old`."
            raise UsageError("this tensor cannot be decoded without the old weights", tensor=spec.name, hint=hint)
        indices, was = np.arange(spec.elements, dtype=np.int64), None
    else:
        indices, was, now = np.empty(spec.elements, np.int64), np.empty_like(old), np.empty_like(old)
        n = cpu.changes(old, values, 0, indices, was, now)
        indices, was, values = indices[:n].copy(), was[:n].copy(), now[:n].copy()
    return TensorPatch(spec, indices, values, was, coded.row.digest)


def scatter(coded: Coded, bits: Bits) -> None:
    """Write the values into ``bits``; `FormatError`, and nothing is written, if their indices are impossible."""
    _refuse_bad_indices(coded)
    cpu.scatter(bits, coded.streams["indices"], coded.streams["values"])


def _refuse_bad_indices(coded: Coded) -> None:
    spec = coded.row.spec
    if not cpu.are_places(coded.streams["indices"], spec.elements):
        raise FormatError("indices are out of range, unsorted or repeated", tensor=spec.name)


def encode(jobs: Sequence[tuple[TensorPatch, Bits | Prepared | None]], workers: Workers) -> list[Coded]:
    """`UsageError` if an old tensor is not the one that its patch changes."""

    def one(job: tuple[TensorPatch, Bits | Prepared | None]) -> Coded:
        patch, old = job[0], job[1] if isinstance(job[1], np.ndarray) else None
        if patch.old is not None and old is not None:
            there = np.empty_like(patch.old)
            cpu.gather(old, patch.indices, 0, there)
            if not np.array_equal(there, patch.old):
                raise other_base(patch.spec.name)
        return encode_tensor(patch, old)

    return workers.map(one, jobs)


def decode(jobs: Sequence[tuple[Coded, Bits | None]], workers: Workers) -> list[TensorPatch]:
    return workers.map(lambda job: decode_tensor(*job), jobs)
