"""A sharded training that goes on from an older version publishes the difference, where its ranks can tell it."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import KilledError, Shard, ThreadPeers, bits_at, errors_of, on_ranks, whole
from sharded import followed, train

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.errors import PeerError
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.verify import verify


def reopened(store: Store, size: int, step: int, **options: object) -> Manifest:
    """Open on so many ranks with the weights of a step; the head afterwards."""

    def rank(number: int, peers: ThreadPeers) -> None:
        wc.Publisher(store, Shard(number, size, step).weights, group=peers, threads=1, **options).close()  # type: ignore[arg-type]

    assert on_ranks(size, rank) == [None] * size
    head = Chain.open(store).head()
    assert head is not None
    return head


def must_be_at(store: Store, head: Manifest, step: int) -> None:
    assert head.position.digest == wc.fingerprint(whole(step)).digest
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(step))
    assert not list(verify(Chain.open(store)))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 3), (4, 1), (3, 1), (1, 1)])
def test_ranks_that_hold_whole_boxes_publish_the_difference(before: int, after: int) -> None:
    store = MemoryStore()
    train(store, before, range(1, 6))
    head = reopened(store, after, 2)
    assert head.base is not None
    assert (head.position.version, head.base.version, head.codec) == (6, 5, "gap")
    must_be_at(store, head, 2)
    train(store, after, range(3, 5))
    must_be_at(store, Chain.open(store).manifest(8), 4)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (2, 3), (1, 2), (4, 2)])
def test_ranks_that_hold_parts_of_boxes_upload_all(before: int, after: int) -> None:
    store = MemoryStore()
    train(store, before, range(1, 6))
    head = reopened(store, after, 2)
    assert head.base is None
    must_be_at(store, head, 2)


def test_as_many_ranks_with_each_others_boxes_upload_all() -> None:
    store = MemoryStore()
    train(store, 3, range(1, 5))

    def rank(number: int, peers: ThreadPeers) -> None:
        wc.Publisher(store, Shard(2 - number, 3, 1).weights, group=peers, threads=1).close()

    assert on_ranks(3, rank) == [None] * 3
    head = Chain.open(store).manifest(5)
    assert head.base is None
    must_be_at(store, head, 1)


def test_weights_of_no_version_are_uploaded_whole() -> None:
    store = MemoryStore()
    train(store, 2, range(1, 4))
    head = reopened(store, 2, 9)
    assert head.base is None
    must_be_at(store, head, 9)


def test_way_back_leads_through_boxes_that_were_cut() -> None:
    store = MemoryStore()

    def rank(number: int, peers: ThreadPeers) -> None:
        shard, cut = Shard(number, 2), [wc.Cut("*", axis=1, parts=4)]
        with wc.Publisher(store, shard.weights, group=peers, threads=1, cut=cut) as publisher:
            for step in (1, 2, 3):
                shard.at(step)
                publisher.publish(step=step).result(60)

    assert not errors_of(on_ranks(2, rank))
    head = reopened(store, 2, 1)
    assert head.base is not None
    must_be_at(store, head, 1)


def test_version_to_which_a_rank_gave_nothing_is_on_the_way() -> None:
    store = MemoryStore()
    last = bits_at(0)

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 3)
        with wc.Publisher(store, shard.weights, group=peers, threads=1) as publisher:
            if number == 1:
                shard.arrays[0].reshape(-1)[3] ^= 1
            publisher.publish(step=1)

    assert on_ranks(3, rank) == [None] * 3
    assert len(Chain.open(store).manifest(1).objects) == 1
    head = reopened(store, 3, 0)
    assert head.base is not None
    assert head.changed == 1
    assert np.array_equal(followed(store).read("a"), last["a"].reshape(-1))


@pytest.mark.parametrize("loss", ["manifest", "object", "damage"])
def test_what_is_lost_on_the_way_costs_an_upload(loss: str) -> None:
    store = MemoryStore()
    train(store, 2, range(1, 5))
    manifest = Chain.open(store).manifest(3)
    if loss == "manifest":
        store.delete("manifests/000000000003.json")
    else:
        store.delete(manifest.objects[0].key)
    if loss == "damage":
        store.put(manifest.objects[0].key, bytes(manifest.objects[0].size))
    head = reopened(store, 2, 1)
    assert head.base is None
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(1))


def test_anchor_on_the_way_costs_an_upload() -> None:
    store = MemoryStore()
    train(store, 2, range(1, 3))
    assert reopened(store, 2, 9).base is None
    head = reopened(store, 2, 1)
    assert head.base is None
    must_be_at(store, head, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # how a rank dies here
@pytest.mark.parametrize("message", range(2, 34, 3))
def test_rank_that_dies_on_the_way_back_costs_no_version(message: int) -> None:
    store = MemoryStore()
    train(store, 3, range(1, 4))

    def rank(number: int, peers: ThreadPeers) -> None:
        if number == 1:
            peers.dies_before = message
        publisher = wc.Publisher(store, Shard(number, 3, 1).weights, group=peers, threads=1)
        if number != 1:
            publisher.close()

    found = on_ranks(3, rank, timeout=5.0)
    if isinstance(found[1], KilledError):
        assert all(
            error is None or (isinstance(error, PeerError) and error.rank == 1) for error in (found[0], found[2])
        )
    head = Chain.open(store).head()
    assert head is not None
    assert head.position.version in (3, 4)
    must_be_at(store, head, 3 if head.position.version == 3 else 1)
    must_be_at(store, reopened(store, 3, 1), 1)
