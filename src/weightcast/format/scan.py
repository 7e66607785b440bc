"""Scans: what changed since the last scan of some weights, and a detector for weights of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast, get_args

from weightcast.errors import UsageError
from weightcast.format.codec.ranks import Ranks, rank
from weightcast.format.diff import diff_tensor, refuse_other_table
from weightcast.format.digest import MODULUS, Fingerprint
from weightcast.format.patch import Indices, ModelSize, Patch, TensorPatch
from weightcast.format.spec import TensorSpec, elements_of
from weightcast.format.tensors import Bits, Copies, Weights
from weightcast.format.workers import Workers

Detect = Literal["transient", "device", "host"]
"""How changes of a torch model are found (`weightcast.torch.detectors`)."""

WireDtype = Literal["BF16", "F16"]
"""The dtypes that float32 can be published as."""


def check_detect(name: str) -> Detect:
    """The name of a detector; `UsageError` for anything else."""
    if name not in get_args(Detect):
        raise UsageError(f"there is no detector {name!r}", hint=f"Choose one of {_listed(Detect)}.")
    return cast(Detect, name)


def check_wire_dtype(name: str) -> WireDtype:
    """The name of a dtype to publish float32 in; `UsageError` for anything else."""
    if name not in get_args(WireDtype):
        hint = f"Choose one of {_listed(WireDtype)}, or None for the weights' own dtype."
        raise UsageError(f"float32 cannot be published as {name!r}", hint=hint)
    return cast(WireDtype, name)


def _listed(choices: object) -> str:
    return ", ".join(map(repr, get_args(choices)))


@dataclass(frozen=True, eq=False)
class Change:
    """What changed in one tensor since the last scan: sorted flat ``indices``, the bits before and ``now``.

    ``was`` is None if the bits before are unknown: then all elements are listed.
    """

    spec: TensorSpec
    indices: Indices
    was: Bits | None
    now: Bits
    gain: int
    """What this adds to the tensor's digest; without ``was``, the whole digest."""
    ranks: Ranks | None = None
    """For `banded`, if it is used."""

    def ranked(self, old: Bits, workers: Workers) -> Change:
        """The change with its ranks in the tensor ``old`` that it changes."""
        assert self.was is not None
        return replace(self, ranks=rank(self.spec, self.indices, self.was, self.now, old, workers))


class Scan(Protocol):
    """What a scan found. It may still be in transit from a device."""

    def changes(self) -> Iterator[Change]:
        """Wait for the changes and yield them in the order of the table. Called once, on another thread."""
        ...


class Detector(Protocol):
    """Watches weights that training changes."""

    @property
    def weights(self) -> Weights:
        """The weights as they are now, scanned or not."""
        ...

    def scan(self) -> Scan:
        """Find what changed since the last scan, or since the detector was made. Later changes are not included."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Resolution:
    """A scan as a patch, the fingerprint it leads to, and the ranks that `banded` needs."""

    patch: Patch
    reached: Fingerprint
    ranks: dict[str, Ranks] | None


def resolve(fingerprint: Fingerprint, scan: Scan) -> Resolution:
    """Wait for a scan's changes and make a patch of them; ``fingerprint`` is that of the last scan."""
    digests, tensors = list(fingerprint.digests), []
    ranks: dict[str, Ranks] = {}
    for change in scan.changes():
        i = fingerprint.table.ordinal(change.spec.name)
        digests[i] = ((0 if change.was is None else digests[i]) + change.gain) % MODULUS
        tensors.append(TensorPatch(change.spec, change.indices, change.now, change.was, digests[i]))
        if change.ranks is not None:
            ranks[change.spec.name] = change.ranks
    reached = Fingerprint(fingerprint.table, tuple(digests))
    patch = Patch(fingerprint.digest, reached.digest, ModelSize.of(fingerprint.table), tuple(tensors))
    return Resolution(patch, reached, ranks if len(ranks) == len(tensors) else None)


def compare(old: Weights, new: Weights, ranked: bool, workers: Workers) -> Scan:
    """The changes from ``old`` to ``new``, as a scan. Nothing is copied: keep ``old`` as it is until `resolve`."""
    refuse_other_table(old.table, new.table)

    def one(spec: TensorSpec) -> TensorPatch:
        return diff_tensor(spec, old.read(spec.name), new.read(spec.name), 0, workers)

    found = [tensor for tensor in workers.stream(one, old.table, elements_of) if tensor.changed]
    return _Compared(found, old if ranked else None, workers)


class Shadowed:
    """A detector for any weights: it keeps a copy of them as of the last scan."""

    def __init__(self, weights: Weights, ranked: bool, workers: Workers):
        self.weights = weights
        self._ranked, self._workers = ranked, workers
        self.shadow = Copies.of(weights)
        """What the next scan compares with."""

    def scan(self, weights: Weights | None = None) -> Scan:
        """Find what changed; ``weights`` replace the detector's own for this scan."""
        source, base = self.weights if weights is None else weights, self.shadow
        refuse_other_table(base.table, source.table)

        def one(spec: TensorSpec) -> tuple[TensorPatch, Bits] | None:
            now = source.read(spec.name).copy()  # read once: training may continue during the scan
            found = diff_tensor(spec, base.read(spec.name), now, 0, self._workers)
            return (found, now) if found.changed else None

        found = [pair for pair in self._workers.stream(one, base.table, elements_of) if pair is not None]
        self.shadow = base.with_tensors({tensor.spec.name: now for tensor, now in found})
        return _Compared([tensor for tensor, _ in found], base if self._ranked else None, self._workers)

    def close(self) -> None:
        """Nothing to release but memory."""


@dataclass
class _Compared:
    """Implements `Scan`; ranks are computed when the changes are read."""

    found: list[TensorPatch]
    base: Weights | None
    workers: Workers

    def changes(self) -> Iterator[Change]:
        for tensor in self.found:
            change = Change(tensor.spec, tensor.indices, tensor.old, tensor.new, tensor.digest)
            if self.base is not None:
                change = change.ranked(self.base.read(tensor.spec.name), self.workers)
            yield change
        self.found, self.base = [], None
