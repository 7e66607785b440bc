"""Edges: their kind by their key, and whether they lead to what was committed."""

from __future__ import annotations

import pytest

from weightcast.channel.edge import Edge, EdgeKind, edge_from_key, edge_of, leads_to_commit, squash_object
from weightcast.channel.keys import Position, delta_key, manifest_key, squash_key
from weightcast.channel.records import Manifest, ObjectRef

A, B, C = (digit * 64 for digit in "abc")
HERE = Position(7, A)
DELTA = delta_key(HERE, C)
COMMIT = Manifest("0" * 32, HERE, Position(6, B), (ObjectRef(DELTA, 10, C),), "banded", 1, None, 0.0, "writer")


def test_kind_of_an_edge_is_read_from_its_key() -> None:
    assert edge_from_key(DELTA, 10) == edge_of(COMMIT) == Edge("delta", 6, 7, 10, DELTA, A[:16])
    squash = squash_key(0, HERE, C)
    edge = edge_from_key(squash, 20)
    assert edge == Edge("squash", 0, 7, 20, squash, A[:16])
    assert squash_object(edge) == ObjectRef(squash, 20, C)


@pytest.mark.parametrize("key", [manifest_key(7), "anchors/x/model.safetensors", "deltas/7", ""])
def test_other_keys_are_not_edges(key: str) -> None:
    assert edge_from_key(key, 10) is None


def test_delta_counts_only_if_its_manifest_names_it() -> None:
    assert leads_to_commit(edge_of(COMMIT), COMMIT)
    twin = edge_from_key(delta_key(HERE, B), 10)  # the same weights in another object, of a writer that lost a race
    assert twin is not None
    assert not leads_to_commit(twin, COMMIT)
    assert not leads_to_commit(edge_of(COMMIT), None)


@pytest.mark.parametrize("kind", ["squash", "anchor", "reference"])
def test_other_kinds_count_by_their_digest_and_outlive_manifests(kind: EdgeKind) -> None:
    good, bad = (Edge(kind, None, 7, 10, "key/", digest[:16]) for digest in (A, B))
    assert leads_to_commit(good, COMMIT)
    assert leads_to_commit(good, None)
    assert not leads_to_commit(bad, COMMIT)
