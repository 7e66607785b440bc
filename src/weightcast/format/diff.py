"""Compare two states of the weights bit by bit (SPEC 2)."""

from __future__ import annotations

import numpy as np

from weightcast.errors import UsageError
from weightcast.format.digest import MODULUS, Fingerprint, fingerprint
from weightcast.format.kernels import cpu
from weightcast.format.patch import ModelSize, Patch, TensorPatch
from weightcast.format.spec import TensorSpec, TensorTable, elements_of
from weightcast.format.tensors import Bits, Weights, refuse_other_bits
from weightcast.format.workers import ONE, Workers

_SPAN = 1 << 20


def diff_tensor(spec: TensorSpec, old: Bits, new: Bits, base_digest: int, workers: Workers = ONE) -> TensorPatch:
    """Compare two states of one tensor bit by bit; ``base_digest`` is the old one's."""
    for bits in (old, new):
        refuse_other_bits(spec, bits)

    def part(first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        before, after = old[first : first + _SPAN], new[first : first + _SPAN]
        # Room for every element: pages that are never written are never allocated.
        indices = np.empty(before.size, np.int64)
        was, now = np.empty_like(before), np.empty_like(after)
        n = cpu.changes(before, after, first, indices, was, now)
        found = indices[:n].copy(), was[:n].copy(), now[:n].copy()
        return *found, int(cpu.digest_change(*found))

    parts = workers.map(part, range(0, old.size, _SPAN)) or [part(0)]
    indices, was, now = (np.concatenate([piece[i] for piece in parts]) for i in range(3))
    digest = (base_digest + sum(piece[3] for piece in parts)) % MODULUS
    return TensorPatch(spec, indices, now, was, digest)


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

    def one(spec: TensorSpec) -> TensorPatch:
        return diff_tensor(spec, old.read(spec.name), new.read(spec.name), base[spec.name], workers)

    tensors = tuple(workers.stream(one, old.table, elements_of))
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
