"""What changed: between two states of the weights, or since a detector last looked at weights that training changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from weightcast.bits import Bits, Copies, TensorSpec, TensorTable, Weights, elements_of, refuse_other_bits
from weightcast.codec.ranks import Ranks, rank
from weightcast.digest import MODULUS, Fingerprint, fingerprint
from weightcast.errors import UsageError
from weightcast.kernels import cpu
from weightcast.patch import Indices, ModelSize, Patch, TensorPatch
from weightcast.workers import ONE, Workers

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


def diff(old: Weights, new: Weights, standing: Fingerprint | None = None, workers: Workers = ONE) -> Patch:
    """The patch from ``old`` to ``new``; ``standing`` is where ``old`` stands, if that is known already."""
    refuse_other_table(old.table, new.table)
    standing = standing or fingerprint(old, workers)

    def one(spec: TensorSpec) -> TensorPatch:
        return diff_tensor(spec, old.read(spec.name), new.read(spec.name), standing[spec.name], workers)

    tensors = tuple(workers.stream(one, old.table, elements_of))
    reached = Fingerprint(old.table, tuple(tensor.digest for tensor in tensors))
    changed = tuple(tensor for tensor in tensors if tensor.changed)
    return Patch(standing.position, reached.position, ModelSize.of(old.table), changed)


def anchor(weights: Weights, workers: Workers = ONE) -> Patch:
    """All of ``weights`` as a patch without a base."""
    standing = fingerprint(weights, workers)
    tensors = tuple(
        TensorPatch(spec, np.arange(spec.elements), weights.read(spec.name), None, standing[spec.name])
        for spec in weights.table
        if spec.elements
    )
    return Patch(None, standing.position, ModelSize.of(weights.table), tensors)


def refuse_other_table(old: TensorTable, new: TensorTable) -> None:
    """`UsageError` that names the first tensor in which two tables differ."""
    if old == new:
        return
    specs_old, specs_new = ({spec.name: spec for spec in table} for table in (old, new))
    for name in sorted(specs_old.keys() | specs_new.keys()):
        a, b = specs_old.get(name), specs_new.get(name)
        if a == b:
            continue
        what = (
            f"is {a.dtype} {list(a.shape)} on one side and {b.dtype} {list(b.shape)} on the other"
            if a and b
            else "is on one side only"
        )
        raise UsageError(
            f"a tensor {what}", tensor=name, hint="A patch needs the same names, dtypes and shapes on both sides."
        )
    raise UsageError("the two sides have different aliases of tied tensors")


# -- detectors: what changed since the last look -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Change:
    """What became of one tensor since the last look: sorted flat ``indices``, the bits before and ``now``.

    ``was`` is None where what was there is not known: then all elements are listed.
    """

    spec: TensorSpec
    indices: Indices
    was: Bits | None
    now: Bits
    gain: int
    """What this adds to the tensor's digest; without ``was``, the digest."""
    ranks: Ranks | None
    """For `banded`, where it is wanted."""


class Look(Protocol):
    """What a look at the weights found. It may still be on its way from a device."""

    def changes(self) -> Iterator[Change]:
        """In the order of the table; waits until they are here. Asked for once, by another thread than looked."""
        ...


class Detector(Protocol):
    """Watches weights that training changes."""

    @property
    def weights(self) -> Weights:
        """The weights as they are, whatever has been looked at."""
        ...

    def look(self) -> Look:
        """Find what changed since the last look, or since the detector was made. Nothing later is in it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Settled:
    """A look as a patch, where it leads, and what coding it with `banded` takes."""

    patch: Patch
    reached: Fingerprint
    ranks: dict[str, Ranks] | None


def settle(standing: Fingerprint, look: Look) -> Settled:
    """Wait for what a look found. ``standing`` is where the weights stood at the look before."""
    digests, tensors = list(standing.digests), []
    ranks: dict[str, Ranks] = {}
    for change in look.changes():
        i = standing.table.ordinal(change.spec.name)
        digests[i] = ((0 if change.was is None else digests[i]) + change.gain) % MODULUS
        tensors.append(TensorPatch(change.spec, change.indices, change.now, change.was, digests[i]))
        if change.ranks is not None:
            ranks[change.spec.name] = change.ranks
    reached = Fingerprint(standing.table, tuple(digests))
    patch = Patch(standing.position, reached.position, ModelSize.of(standing.table), tuple(tensors))
    return Settled(patch, reached, ranks if len(ranks) == len(tensors) else None)


class Shadowed:
    """A detector for any weights: it keeps a copy of what it saw last."""

    def __init__(self, weights: Weights, ranked: bool, workers: Workers):
        self.weights = weights
        self._ranked, self._workers = ranked, workers
        self._shadow = Copies.of(weights)

    def look(self, weights: Weights | None = None) -> Look:
        source, base = self.weights if weights is None else weights, self._shadow
        refuse_other_table(base.table, source.table)

        def one(spec: TensorSpec) -> tuple[TensorPatch, Bits] | None:
            # Training may go on while we look: take the bits once.
            now = source.read(spec.name).copy()
            found = diff_tensor(spec, base.read(spec.name), now, 0, self._workers)
            return (found, now) if found.changed else None

        found = [pair for pair in self._workers.stream(one, base.table, elements_of) if pair is not None]
        self._shadow = base.with_tensors({tensor.spec.name: now for tensor, now in found})
        return _Compared([tensor for tensor, _ in found], base if self._ranked else None, self._workers)

    def close(self) -> None:
        """Nothing is held but memory."""


@dataclass
class _Compared:
    found: list[TensorPatch]
    base: Copies | None
    workers: Workers

    def changes(self) -> Iterator[Change]:
        for tensor in self.found:
            assert tensor.old is not None
            spec, ranks = tensor.spec, None
            if self.base is not None:
                span = partial(_span, self.base.read(spec.name))
                ranks = rank(spec, tensor.indices, tensor.old, tensor.new, span, self.workers)
            yield Change(spec, tensor.indices, tensor.old, tensor.new, tensor.digest, ranks)
        self.found, self.base = [], None


def _span(bits: Bits, first: int, size: int) -> Bits:
    return bits[first : first + size]
