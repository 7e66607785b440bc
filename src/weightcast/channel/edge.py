"""Edges: the objects of a channel that lead to a version, from an earlier one or from nothing (SPEC 12.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightcast.channel.keys import RECORD, read_delta_key, read_squash_key
from weightcast.channel.records import Manifest, ObjectRef

EdgeKind = Literal["delta", "squash", "anchor", "reference"]


@dataclass(frozen=True)
class Edge:
    """One step of a route. Anchors and references have no base; a reference's files are outside the bucket."""

    kind: EdgeKind
    base: int | None
    result: int
    nbytes: int
    key: str
    """The object of a delta or squash; the folder of an anchor, of a reference, or of a delta of several objects."""
    digest: str = ""
    """The first digits of the result's digest, from the key."""

    @property
    def record(self) -> str:
        """The key of the record of an anchor or reference."""
        return self.key + RECORD


def edge_from_key(key: str, nbytes: int) -> Edge | None:
    """The delta or squash that the object under ``key`` is, or is part of; None for any other object."""
    delta, squash = read_delta_key(key), read_squash_key(key)
    if delta:
        return Edge("delta", delta.version - 1, delta.version, nbytes, delta.delta, delta.digest)
    return Edge("squash", squash.base, squash.result, nbytes, key, squash.digest) if squash else None


def edge_of(manifest: Manifest) -> Edge:
    """The delta that a manifest commits."""
    version = manifest.position.version
    return Edge("delta", version - 1, version, manifest.nbytes, manifest.key, manifest.position.digest[:16])


def squash_object(edge: Edge) -> ObjectRef:
    """The object of a squash. It has no record: its key holds its SHA-256."""
    found = read_squash_key(edge.key)
    if found is None:
        raise ValueError(f"{edge.key} is not the key of a squash")
    return ObjectRef(edge.key, edge.nbytes, found.sha256)


def leads_to_commit(edge: Edge, manifest: Manifest | None) -> bool:
    """Whether ``edge`` leads to what ``manifest`` commits; None stands for a manifest that was collected.

    Writers that lost a race leave deltas and anchors of other weights. A delta counts only if its manifest names it;
    squashes and anchors outlive manifests, and count if their key has the digest of the committed version.
    """
    if edge.kind == "delta":
        return manifest is not None and manifest.key == edge.key
    return manifest is None or manifest.position.digest.startswith(edge.digest)
