"""Ranks that die, fail or come late: no half commit, no version lost, and an error that names the rank."""

from __future__ import annotations

import time

import pytest
from ranks import KilledError, Shard, ThreadPeers, errors_of, on_ranks, whole
from scripted_store import ScriptedStore
from sharded import followed, train

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import ConflictError, PeerError, UnreachableError
from weightcast.publish.shards import arrays_of
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.verify import verify

STEPS = 3


def killed_at(store: Store, victim: int, message: int, size: int = 3) -> list[object]:
    """Train and publish, until one rank dies without a word before one of its messages."""

    def rank(number: int, peers: ThreadPeers) -> int:
        if number == victim:
            peers.dies_before = message
        shard = Shard(number, size)
        publisher = wc.Publisher(store, shard.weights, group=peers, threads=1, retry_after=0.01)
        patience = 2.0 if number == victim else 30.0
        for step in range(1, STEPS + 1):
            shard.at(step)
            publisher.publish(step=step).result(patience)
        version = publisher.flush(patience).version
        if number != victim:  # a dead process closes nothing
            publisher.close()
        return version

    return on_ranks(size, rank, timeout=5.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # how a rank dies here
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("message", range(0, 75, 4))
def test_rank_killed_at_any_message_costs_no_version(victim: int, message: int) -> None:
    store = MemoryStore()
    found = killed_at(store, victim, message)
    if found == [STEPS] * 3:
        return  # it was to die after the last one
    assert isinstance(found[victim], KilledError | TimeoutError)
    for number, error in enumerate(found):
        if number != victim:
            assert isinstance(error, PeerError), error
            assert error.rank == victim
            assert f"rank {victim}" in str(error)
    begun = list(store.list("channel.json"))
    head = Chain.open(store).head() if begun else None
    if head is not None:
        assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(head.position.version))
        assert not list(verify(Chain.open(store)))
    done = 0 if head is None else head.position.version
    train(store, 2, range(done + 1, STEPS + 2))
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(STEPS + 1))
    assert Chain.open(store).manifest(STEPS + 1).step == STEPS + 1


@pytest.mark.parametrize("nth", range(4))
def test_upload_that_fails_on_one_rank_is_repeated_by_all(nth: int) -> None:
    store = ScriptedStore(MemoryStore())
    train(store, 3, range(1, 2))
    store.fail("put", "deltas/", skip=nth, times=1)
    train(store, 3, range(2, 5))
    chain = Chain.open(store)
    for version in range(5):
        assert chain.manifest(version).position.digest == wc.fingerprint(whole(version)).digest
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(4))


def test_bucket_that_is_away_for_long_loses_no_step() -> None:
    """Training goes on on all ranks, and what was published meanwhile arrives together."""
    store = ScriptedStore(MemoryStore())
    train(store, 3, range(1, 2))
    away = store.fail("put", "deltas/")

    def rank(number: int, peers: ThreadPeers) -> wc.Manifest:
        shard = Shard(number, 3, 1)
        with wc.Publisher(store, shard.weights, group=peers, threads=1, retry_after=0.01) as publisher:
            for step in range(2, 8):
                shard.at(step)
                receipt = publisher.publish(step=step)
            if number == 0:
                while not away.hits:
                    time.sleep(0.01)
                away.end()
            return receipt.result(60)

    manifests = on_ranks(3, rank)
    assert manifests == [manifests[0]] * 3
    assert isinstance(manifests[0], wc.Manifest)
    assert manifests[0].step == 7
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(7))


@pytest.mark.parametrize("lost", [False, True], ids=["fails", "answer lost"])
def test_commit_that_may_have_been_taken_is_tried_again_unchanged(lost: bool) -> None:
    store = ScriptedStore(MemoryStore())
    train(store, 2, range(1, 2))
    store.fail("create", "manifests/", lost=lost, times=1)
    train(store, 2, range(2, 5))
    chain = Chain.open(store)
    assert [chain.manifest(version).step for version in range(5)] == [None, 1, 2, 3, 4]
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(4))


def test_rank_that_is_late_is_named_on_every_rank() -> None:
    store = MemoryStore()

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 3)
        with wc.Publisher(store, shard.weights, group=peers, threads=1) as publisher:
            shard.at(1)
            if number == 2:
                time.sleep(2.0)
            publisher.publish(step=1).result(30)

    errors = errors_of(on_ranks(3, rank, timeout=1.0))
    for error in errors[:2]:
        assert isinstance(error, PeerError)
        assert error.rank == 2
        assert "rank 2 did not come in time" in str(error)


def test_step_that_fails_on_one_rank_ends_all_with_its_name() -> None:
    store = MemoryStore()
    train(store, 3, range(1, 2))

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 3, 1)
        publisher = wc.Publisher(store, shard.weights, group=peers, threads=1)
        shard.at(2)
        publisher.publish(step=2).result(30)
        shard.at(3)
        weights = arrays_of(shard.weights)
        if number == 1:
            weights.read = lost_memory  # type: ignore[assignment]
        try:
            publisher.publish(step=3, weights=weights).result(30)
        finally:
            publisher.close()

    errors = errors_of(on_ranks(3, rank, timeout=5.0))
    assert len(errors) == 3
    assert isinstance(errors[1], MemoryError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError)
        assert (error.rank, "no memory left" in str(error)) == (1, True)
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(2))


def lost_memory(name: str) -> object:
    raise MemoryError("no memory left")


def test_another_writer_ends_every_rank() -> None:
    store = MemoryStore()
    train(store, 2, range(1, 2))

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 2, 1)
        publisher = wc.Publisher(store, shard.weights, group=peers, threads=1)
        if number == 0:
            weights = whole(1)
            with wc.Publisher(store, weights, threads=1) as other:
                weights.read("a")[0] ^= 1
                other.publish()
        shard.at(2)
        try:
            publisher.publish(step=2).result(30)
        finally:
            publisher.close()

    errors = errors_of(on_ranks(2, rank))
    assert [type(error) for error in errors] == [ConflictError, ConflictError]


def test_flush_raises_on_every_rank_what_keeps_the_store_away() -> None:
    store = ScriptedStore(MemoryStore())
    train(store, 2, range(1, 2))
    store.fail("put", "deltas/")

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 2, 1)
        publisher = wc.Publisher(store, shard.weights, group=peers, threads=1, retry_after=0.01)
        shard.at(2)
        publisher.publish(step=2)
        publisher.close()

    errors = errors_of(on_ranks(2, rank, timeout=5.0))
    assert len(errors) == 2
    assert any(isinstance(error, UnreachableError) for error in errors)
