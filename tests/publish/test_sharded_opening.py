"""A rank that fails while a sharded publisher opens: all ranks raise, and all say which rank and why."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from ranks import Shard, ThreadPeers, errors_of, on_ranks, whole
from scripted_store import ScriptedStore
from sharded import followed, train

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import AccessError, PeerError, StoreError, UsageError
from weightcast.format.scan import Detector
from weightcast.publish import publisher as publishers
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.verify import verify

SIZE = 3
REASON = "the key is wrong"


def opened(store: Store, victim: int, step: int, skip: int | None) -> tuple[list[object], ScriptedStore]:
    """Open on all ranks, where a request of one rank fails; what each raised, and the store as that rank sees it."""
    broken = ScriptedStore(store)
    if skip is not None:
        broken.fail("", "", AccessError(REASON, url="memory://"), skip=skip, times=1)

    def rank(number: int, peers: ThreadPeers) -> None:
        own = broken if number == victim else ScriptedStore(store)
        wc.Publisher(own, Shard(number, SIZE, step).weights, group=peers, threads=1).close()

    return on_ranks(SIZE, rank, timeout=10.0), broken


def nothing() -> Store:
    return MemoryStore()


def three_versions() -> Store:
    store = MemoryStore()
    train(store, 2, range(1, 4))
    return store


def working() -> set[threading.Thread]:
    """Threads that are not idle callers of stores."""
    return {thread for thread in threading.enumerate() if thread.name != "weightcast-call"}


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize(("channel", "step"), [(nothing, 0), (three_versions, 3), (three_versions, 1)])
def test_request_that_fails_on_one_rank_is_named_with_its_reason_on_all(
    channel: Callable[[], Store], step: int, victim: int
) -> None:
    found, quiet = opened(channel(), victim, step, None)
    assert not errors_of(found)
    failed = 0
    for skip in range(len(quiet.calls)):
        store, before = channel(), working()
        found, _ = opened(store, victim, step, skip)
        if isinstance(found[victim], AccessError):
            failed += 1
            for number, error in enumerate(found):
                assert isinstance(error, StoreError), (skip, found)
                assert REASON in str(error)
                assert number == victim or f"rank {victim}" in str(error)
        else:
            assert found == [None] * SIZE, skip  # what can be done without
        assert working() <= before
        if list(store.list("channel.json")):
            chain = Chain.open(store)
            assert not [one for one in verify(chain) if chain.head() is not None], skip
        train(store, 2, range(step + 1, step + 2))
        assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(step + 1))
    assert failed >= 2


@pytest.mark.parametrize("victim", range(SIZE))
def test_detector_that_cannot_be_made_on_one_rank_is_named_on_all(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Detector:
        raise MemoryError(REASON)

    watch = publishers.arrays_of
    marked = Shard(victim, SIZE)
    monkeypatch.setattr(
        publishers, "arrays_of", lambda shards: refused() if shards is marked.weights else watch(shards)
    )
    store = MemoryStore()

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = marked if number == victim else Shard(number, SIZE)
        wc.Publisher(store, shard.weights, group=peers, threads=1)

    before = working()
    found = on_ranks(SIZE, rank, timeout=10.0)
    for number, error in enumerate(found):
        if number == victim:
            assert isinstance(error, MemoryError)
        else:
            assert isinstance(error, PeerError)
            assert error.rank == victim
            assert str(error).startswith(f"rank {victim} failed: {REASON}")
    assert working() <= before
    assert not list(store.list(""))


@pytest.mark.parametrize("victim", range(SIZE))
def test_option_that_is_refused_on_one_rank_is_named_on_all(victim: int) -> None:
    def rank(number: int, peers: ThreadPeers) -> None:
        writer = "a/b" if number == victim else "ok"
        wc.Publisher(MemoryStore(), Shard(number, SIZE).weights, group=peers, writer=writer)

    found = on_ranks(SIZE, rank, timeout=10.0)
    for number, error in enumerate(found):
        assert isinstance(error, UsageError)
        assert number == victim or f"rank {victim}: " in str(error)
