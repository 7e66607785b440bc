"""What the copy of a channel lacks, and in which order it is brought there: a pure function of two listings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weightcast.channel.edge import Edge


@dataclass(frozen=True)
class Contents:
    """What a bucket holds of a channel: the committed versions, and the squashes, anchors and references."""

    versions: frozenset[int] = frozenset()
    edges: tuple[Edge, ...] = ()

    @property
    def head(self) -> int:
        """The newest version; -1 if there is none."""
        return max(self.versions, default=-1)


@dataclass(frozen=True)
class Step:
    """What leads to one version and is brought before it is committed."""

    version: int
    edges: tuple[Edge, ...] = ()
    """Squashes, anchors and references. The delta, or the anchor that a version is, is named by its manifest."""
    commits: bool = True
    """Whether the version is to be committed: not if it was collected at the source, or is in the copy already."""


def missing(source: Contents, copy: Contents) -> tuple[Step, ...]:
    """The steps, in ascending order of versions: so what a version can be reached by is there before the version.

    Versions are only ever added after the copy's head, and an edge between older ones only if the copy has both of its
    versions: what the copy's own collector has deleted stays deleted.
    """
    edges: dict[int, list[Edge]] = {}
    for edge in _lacking(source, copy):
        edges.setdefault(edge.result, []).append(edge)
    newer = {version for version in source.versions if version > copy.head}
    return tuple(
        Step(version, tuple(edges.get(version, ())), version in newer) for version in sorted(newer | edges.keys())
    )


def apart(
    steps: Iterable[Step], deltas: Iterable[Edge], reached: Iterable[int]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps without the anchors that no version waits for, and these anchors.

    An anchor is as large as the model. ``deltas`` are those of the steps, ``reached`` the versions that can be read in
    the copy. Where a delta leads from these to a version, it can be read without its anchors.
    """
    with_delta, reached = {edge.result for edge in deltas}, set(reached)
    first, later = list[Step](), list[Step]()
    for step in steps:
        anchors = tuple(edge for edge in step.edges if edge.base is None)
        others = tuple(edge for edge in step.edges if edge.base is not None)
        follows = step.version in with_delta and step.version - 1 in reached
        if anchors and (follows or (step.version in reached and not step.commits)):
            later.append(Step(step.version, anchors, commits=False))
            step = replace(step, edges=others)
        if follows or anchors or any(edge.base in reached for edge in others):
            reached.add(step.version)
        if step.commits or step.edges:
            first.append(step)
    return tuple(first), tuple(later)


def _lacking(source: Contents, copy: Contents) -> Iterable[Edge]:
    there = {edge.key for edge in copy.edges}
    for edge in source.edges:
        if edge.key in there:
            continue
        if edge.result > copy.head or (
            edge.result in copy.versions and (edge.base is None or edge.base in copy.versions)
        ):
            yield edge
