"""Scans: what changed since the last scan of some weights, and a detector for weights of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast, get_args

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Place
from weightcast.format.codec.coded import Parts, Prepared
from weightcast.format.codec.ranks import Ranks, rank_tensors
from weightcast.format.coding import Coding, cut_tensor
from weightcast.format.diff import diff_tensors, refuse_other_table
from weightcast.format.digest import MODULUS, Fingerprint
from weightcast.format.patch import Indices, ModelSize, Patch, TensorPatch
from weightcast.format.spec import TensorSpec, elements_of
from weightcast.format.tasks import Listed
from weightcast.format.tensors import Bits, Copies, Weights, read_all
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
    prepared: Prepared | Parts | None = None
    """For the codec, if it is one that needs it or a device coded the change already."""


def ranked(changes: Sequence[Change], olds: Sequence[Bits], coding: Coding, workers: Workers) -> list[Change]:
    """The changes with their ranks in the old tensors that they change, or in the boxes of these that are coded."""
    listed: list[Listed] = []
    for change in changes:
        assert change.was is not None
        listed.append((change.indices, change.was, change.now))
    boxes = [coding.boxes(change.spec) for change in changes]
    whole = [i for i, cut in enumerate(boxes) if not cut]
    found: dict[int, Ranks | Parts] = dict(
        zip(
            whole,
            rank_tensors(
                [changes[i].spec for i in whole], [listed[i] for i in whole], [olds[i] for i in whole], workers
            ),
            strict=True,
        )
    )
    cut = [i for i in range(len(changes)) if boxes[i]]
    for some in workers.batches(cut, lambda i: changes[i].spec.elements):  # each takes a copy of its old bits
        found |= zip(some, _ranked_parts([(changes[i], olds[i], boxes[i]) for i in some], workers), strict=True)
    return [replace(change, prepared=found[i]) for i, change in enumerate(changes)]


def _ranked_parts(jobs: Sequence[tuple[Change, Bits, Sequence[Box]]], workers: Workers) -> list[Parts]:
    """Ranks in the boxes of some tensors."""
    cut = workers.map(lambda job: _parts_of(*job), jobs)
    every = [part for parts in cut for part in parts]
    listed: list[Listed] = [(part.indices, part.old, part.new) for _, part, _ in every if part.old is not None]
    found = iter(rank_tensors([part.spec for _, part, _ in every], listed, [old for _, _, old in every], workers))
    return [Parts(tuple((place.box, next(found)) for place, _, _ in parts)) for parts in cut]


def _parts_of(change: Change, old: Bits, boxes: Sequence[Box]) -> list[tuple[Place, TensorPatch, Bits]]:
    patch = TensorPatch(change.spec, change.indices, change.now, change.was, 0)
    return [
        (place, part, place.read(old)) for place, part in cut_tensor(patch, [Place(change.spec, box) for box in boxes])
    ]


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
    """A scan as a patch, the fingerprint it leads to, and what was prepared for the codec where all tensors have it."""

    patch: Patch
    reached: Fingerprint
    prepared: dict[str, Prepared | Parts] | None


def resolve(fingerprint: Fingerprint, scan: Scan) -> Resolution:
    """Wait for a scan's changes and make a patch of them; ``fingerprint`` is that of the last scan."""
    digests, tensors = list(fingerprint.digests), []
    prepared: dict[str, Prepared | Parts] = {}
    for change in scan.changes():
        i = fingerprint.table.ordinal(change.spec.name)
        digests[i] = ((0 if change.was is None else digests[i]) + change.gain) % MODULUS
        tensors.append(TensorPatch(change.spec, change.indices, change.now, change.was, digests[i]))
        if change.prepared is not None:
            prepared[change.spec.name] = change.prepared
    reached = Fingerprint(fingerprint.table, tuple(digests))
    patch = Patch(fingerprint.digest, reached.digest, ModelSize.of(fingerprint.table), tuple(tensors))
    return Resolution(patch, reached, prepared if len(prepared) == len(tensors) else None)


def compare(old: Weights, new: Weights, coding: Coding, workers: Workers) -> Scan:
    """The changes from ``old`` to ``new``, as a scan. Nothing is copied but what changed."""
    refuse_other_table(old.table, new.table)
    found: list[Change] = []
    for specs in workers.batches(old.table, elements_of):
        names = [spec.name for spec in specs]
        olds, news = read_all(old, names, workers), read_all(new, names, workers)
        found += _changes(specs, olds, news, coding, workers)
    return _Compared(found)


class Shadowed:
    """A detector for any weights: it keeps a copy of them as of the last scan."""

    def __init__(self, weights: Weights, coding: Coding, workers: Workers):
        self.weights = weights
        self._coding, self._workers = coding, workers
        self.shadow = Copies.of(weights)
        """What the next scan compares with. Each scan updates it in place, so that there is never a second copy."""

    def scan(self, weights: Weights | None = None) -> Scan:
        """Find what changed; ``weights`` replace the detector's own for this scan. Nothing is recorded if it raises."""
        source, shadow = self.weights if weights is None else weights, self.shadow
        refuse_other_table(shadow.table, source.table)
        found: list[Change] = []
        try:
            for specs in self._workers.batches(shadow.table, elements_of):
                # Read once: training may continue during the scan.
                nows = self._workers.map(lambda spec: source.read(spec.name).copy(), specs)
                olds = [shadow.read(spec.name) for spec in specs]
                changes = _changes(specs, olds, nows, self._coding, self._workers)
                found += changes
                for change in changes:
                    shadow.overwrite(change.spec.name, change.indices, change.now)
        except BaseException:
            for change in found:
                assert change.was is not None
                shadow.overwrite(change.spec.name, change.indices, change.was)
            raise
        return _Compared(found)

    def close(self) -> None:
        """Nothing to release but memory."""


def _changes(
    specs: Sequence[TensorSpec], olds: Sequence[Bits], nows: Sequence[Bits], coding: Coding, workers: Workers
) -> list[Change]:
    """What changed in some tensors, ranked in the old ones if a codec needs that."""
    found = zip(diff_tensors(specs, olds, nows, [0] * len(specs), workers), olds, strict=True)
    changed = [(one, old) for one, old in found if one.changed]
    changes = [Change(one.spec, one.indices, one.old, one.new, one.digest) for one, _ in changed]
    return ranked(changes, [old for _, old in changed], coding, workers) if coding.is_banded else changes


@dataclass
class _Compared:
    """Implements `Scan`: nothing is in transit."""

    found: list[Change]

    def changes(self) -> Iterator[Change]:
        found, self.found = self.found, []
        yield from found
