"""Digests of the boxes that workers hold, combined into digests of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcast.errors import UsageError
from weightcast.format.boxes import Box
from weightcast.format.digest import MODULUS, Fingerprint
from weightcast.format.spec import TensorSpec, TensorTable

_MOST_BOXES = 2048
"""Of one tensor. Each may have to be compared with all others; more would take minutes."""


@dataclass(frozen=True)
class BoxDigest:
    """What a worker reports about a box: its digest, or why there is none."""

    box: Box
    digest: int | None
    problem: str | None = None
    rounded: bool = False
    """Whether the problem is only that the engine holds it in a narrower dtype."""


@dataclass(frozen=True)
class TensorDigest:
    """The digest of a tensor that all workers together hold, or why there is none."""

    digest: int | None
    problem: str | None = None
    rounded: bool = False
    """As of `BoxDigest`."""


def combine(spec: TensorSpec, boxes: Iterable[BoxDigest]) -> TensorDigest:
    """Add up boxes: copies of a box must agree and count once, others must not overlap, and none may be missing."""
    distinct: dict[Box, int] = {}
    for one in boxes:
        if not one.box.fits(spec.shape):
            raise UsageError(f"a worker reports a box that is not inside {list(spec.shape)}", tensor=spec.name)
        if one.digest is None:
            return TensorDigest(None, one.problem or "a worker has no digest of it", one.rounded)
        if distinct.setdefault(one.box, one.digest) != one.digest:
            return TensorDigest(None, "copies of the same elements differ")
    found = list(distinct)
    if len(found) > _MOST_BOXES:
        return TensorDigest(None, f"workers report {len(found):,} boxes of it, the limit is {_MOST_BOXES:,}")
    if not found and spec.elements:
        return TensorDigest(None, "no worker holds it")
    if _overlap(found):
        return TensorDigest(None, "workers hold boxes that overlap in part")
    if sum(box.elements for box in found) != spec.elements:
        return TensorDigest(None, "no worker holds some of its elements")
    return TensorDigest(sum(distinct.values()) % MODULUS)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether some element is in two boxes. Only boxes that overlap along one dimension, where most begin apart, are
    compared."""
    if len(boxes) < 2 or not boxes[0].ranges:
        return len(boxes) > 1
    starts = [{box.ranges[axis].start for box in boxes} for axis in range(len(boxes[0].ranges))]
    axis = max(range(len(starts)), key=lambda one: len(starts[one]))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.ranges[axis].start):
        near = [other for other in near if other.ranges[axis].last >= box.ranges[axis].start]
        if any(box.meets(other) for other in near):
            return True
        near.append(box)
    return False


def fingerprint_of(table: TensorTable, digests: Mapping[str, TensorDigest]) -> Fingerprint | None:
    """The fingerprint of what an engine holds; None unless every tensor could be digested."""
    known = [digest for spec in table if (digest := digests[spec.name].digest) is not None]
    return Fingerprint(table, tuple(known)) if len(known) == len(table) else None
