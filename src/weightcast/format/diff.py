"""Compare two states of the weights bit by bit (SPEC 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightcast.errors import UsageError
from weightcast.format.digest import MODULUS, Fingerprint, fingerprint
from weightcast.format.patch import ModelSize, Patch, TensorPatch, patch_of
from weightcast.format.spec import TensorSpec, TensorTable, elements_of
from weightcast.format.tasks import compare_tensors
from weightcast.format.tensors import Bits, Weights, read_all, refuse_other_bits
from weightcast.format.workers import ONE, Workers


def diff_tensors(
    specs: Sequence[TensorSpec],
    olds: Sequence[Bits],
    news: Sequence[Bits],
    digests: Sequence[int],
    workers: Workers = ONE,
) -> list[TensorPatch]:
    """Compare two states of tensors bit by bit; ``digests`` are those of the old ones."""
    for spec, old, new in zip(specs, olds, news, strict=True):
        refuse_other_bits(spec, old)
        refuse_other_bits(spec, new)
    return [
        patch_of(spec, one, (digest + one.gain) % MODULUS)
        for spec, one, digest in zip(specs, compare_tensors(specs, olds, news, workers), digests, strict=True)
    ]


def diff(old: Weights, new: Weights, base: Fingerprint | None = None, workers: Workers = ONE) -> Patch:
    """The patch from ``old`` to ``new``; `UsageError` if their tables differ.

    ``base`` is the fingerprint of ``old``, if known: without it, ``old`` is read twice.

    >>> old, new = (wc.Arrays({"w": np.full(4, value, np.float32)}) for value in (0, 1))
    >>> new.read("w")[:2] = 0
    >>> patch = wc.diff(old, new)
    >>> patch.tensors[0].indices
    array([2, 3])
    >>> patch.base == wc.fingerprint(old).digest, patch.result == wc.fingerprint(new).digest
    (True, True)
    """
    refuse_other_table(old.table, new.table)
    base = base or fingerprint(old, workers)
    tensors: list[TensorPatch] = []
    for specs in workers.batches(old.table, elements_of):
        names = [spec.name for spec in specs]
        olds, news = read_all(old, names, workers), read_all(new, names, workers)
        tensors += diff_tensors(specs, olds, news, [base[name] for name in names], workers)
    reached = Fingerprint(old.table, tuple(tensor.digest for tensor in tensors))
    changed = tuple(tensor for tensor in tensors if tensor.changed)
    return Patch(base.digest, reached.digest, ModelSize.of(old.table), changed)


def anchor(weights: Weights, workers: Workers = ONE) -> Patch:
    """All of ``weights`` as a patch without a base."""
    found = fingerprint(weights, workers)
    tensors = tuple(
        TensorPatch(spec, np.arange(spec.elements), weights.read(spec.name), None, found[spec.name])
        for spec in weights.table
        if spec.elements
    )
    return Patch(None, found.digest, ModelSize.of(weights.table), tensors)


def refuse_other_table(
    old: TensorTable,
    new: TensorTable,
    *,
    file: str | None = None,
    hint: str = "A patch needs the same names, dtypes and shapes on both sides.",
) -> None:
    """`UsageError` that names the first tensor in which two tables differ."""
    if old == new:
        return
    specs_old, specs_new = ({spec.name: spec for spec in table} for table in (old, new))
    for name in sorted(specs_old.keys() | specs_new.keys()):
        a, b = specs_old.get(name), specs_new.get(name)
        if a == b:
            continue
        what = "is on one side only"
        if a and b:
            what = f"is {a.dtype} {list(a.shape)} on one side and {b.dtype} {list(b.shape)} on the other"
        raise UsageError(f"a tensor {what}", file=file, tensor=name, hint=hint)
    raise UsageError("the two sides have different aliases of tied tensors", file=file, hint=hint)
