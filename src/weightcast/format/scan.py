"""What changed since weights were last scanned, and the detector for weights of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from weightcast.format.codec.ranks import Ranks, rank
from weightcast.format.diff import diff_tensor, refuse_other_table
from weightcast.format.digest import MODULUS, Fingerprint
from weightcast.format.patch import Indices, ModelSize, Patch, TensorPatch
from weightcast.format.spec import TensorSpec, elements_of
from weightcast.format.tensors import Bits, Copies, Weights
from weightcast.format.workers import Workers


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


class Scan(Protocol):
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

    def scan(self) -> Scan:
        """Find what changed since the last look, or since the detector was made. Nothing later is in it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Resolved:
    """A look as a patch, where it leads, and what coding it with `banded` takes."""

    patch: Patch
    reached: Fingerprint
    ranks: dict[str, Ranks] | None


def resolve(fingerprint: Fingerprint, look: Scan) -> Resolved:
    """Wait for what a look found. ``fingerprint`` is where the weights stood at the look before."""
    digests, tensors = list(fingerprint.digests), []
    ranks: dict[str, Ranks] = {}
    for change in look.changes():
        i = fingerprint.table.ordinal(change.spec.name)
        digests[i] = ((0 if change.was is None else digests[i]) + change.gain) % MODULUS
        tensors.append(TensorPatch(change.spec, change.indices, change.now, change.was, digests[i]))
        if change.ranks is not None:
            ranks[change.spec.name] = change.ranks
    reached = Fingerprint(fingerprint.table, tuple(digests))
    patch = Patch(fingerprint.digest, reached.digest, ModelSize.of(fingerprint.table), tuple(tensors))
    return Resolved(patch, reached, ranks if len(ranks) == len(tensors) else None)


class Shadowed:
    """A detector for any weights: it keeps a copy of what it saw last."""

    def __init__(self, weights: Weights, ranked: bool, workers: Workers):
        self.weights = weights
        self._ranked, self._workers = ranked, workers
        self._shadow = Copies.of(weights)

    def scan(self, weights: Weights | None = None) -> Scan:
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
