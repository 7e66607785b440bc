"""What crosses the group: digests are added up, and no rank sends or receives more with more ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import KilledError, ThreadPeers, errors_of, on_ranks

from weightcast.errors import PeerError
from weightcast.format.boxes import Box
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.publish.agreement import agree_on_table
from weightcast.publish.peers import Message
from weightcast.publish.rounds import Rounds

SIZES = [1, 2, 3, 8, 32]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tensors", [0, 1, 5, 1000])
def test_sums_of_all_ranks_are_added_up_on_every_rank(size: int, tensors: int) -> None:
    rng = np.random.default_rng(0)
    sums = rng.integers(0, 1 << 64, (size, tensors), np.uint64)

    def rank(number: int, peers: ThreadPeers) -> np.ndarray:
        return Rounds(peers).add(sums[number])

    for found in on_ranks(size, rank):
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, sums.sum(axis=0, dtype=np.uint64))


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_sends_or_receives_more_than_twice_the_sums(size: int) -> None:
    tensors = 5000

    def rank(number: int, peers: ThreadPeers) -> tuple[int, int]:
        Rounds(peers).add(np.arange(tensors, dtype=np.uint64))
        return peers.sent, peers.received

    for sent, received in on_ranks(size, rank):
        assert max(sent, received) <= 2 * 8 * tensors + size


@pytest.mark.parametrize("size", SIZES)
def test_large_answer_reaches_all_in_parts(size: int) -> None:
    """Random digits, which do not get smaller."""
    answer = np.random.default_rng(0).bytes(200_000).hex()

    def rank(number: int, peers: ThreadPeers) -> tuple[str, int, int]:
        facts = Rounds(peers).meet(Message(), lambda _: Message({"answer": answer})).facts
        return facts["answer"], peers.sent, peers.received

    for found, sent, received in on_ranks(size, rank):
        assert found == answer
        assert max(sent, received) <= 2 * 1.3 * 200_000 + 100 * size


def tell_sums(rounds: Rounds, number: int) -> Message:
    rounds.meet(Message())
    rounds.add(np.arange(100, dtype=np.uint64))
    return rounds.meet(Message())


def tell_large(rounds: Rounds, number: int) -> Message:
    rounds.meet(Message(), lambda _: Message({"answer": np.random.default_rng(0).bytes(50_000).hex()}))
    return rounds.meet(Message())


def tell_table(rounds: Rounds, number: int) -> Message:
    agree_on_table(rounds, [(f"w{i}", "F32", Box.of((number,), (1,))) for i in range(20)], None)
    return rounds.meet(Message())


@pytest.mark.parametrize("how", ["dies", "stops"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("talk", [tell_sums, tell_large, tell_table])
def test_rank_lost_at_any_message_is_named_by_all_others(
    talk: Callable[[Rounds, int], Message], victim: int, how: str
) -> None:
    size = 4
    counts = on_ranks(size, lambda number, peers: (talk(Rounds(peers), number), peers.messages)[1])
    total = counts[victim]
    assert isinstance(total, int)
    for message in range(total) if how == "dies" else range(0, total, 5):

        def rank(number: int, peers: ThreadPeers, message: int = message) -> Any:
            if number == victim:
                setattr(peers, f"{how}_before", message)
            return talk(Rounds(peers), number)

        found = on_ranks(size, rank, timeout=0.4 if how == "stops" else 1.5)
        assert isinstance(found[victim], KilledError)
        for number, error in enumerate(found):
            if number != victim and not done(error, message, total):
                assert isinstance(error, PeerError), (message, number, error)
                assert error.rank == victim, (message, number, error)


def done(found: object, message: int, total: int) -> bool:
    """Whether a rank rightly saw the last round end: it may be told before the victim is lost."""
    return isinstance(found, Message) and message >= total - 6


@pytest.mark.parametrize("known", [True, False], ids=["a model", "shards"])
def test_table_of_many_tensors_takes_few_bytes_of_each_rank(known: bool) -> None:
    """A rank's own boxes, packed: not those of all ranks, and not through rank 0."""
    size, tensors = 8, 2000
    names = [f"model.layers.{i // 20}.mlp.experts.{i % 20}.down_proj.weight" for i in range(tensors)]
    table = TensorTable.of(TensorSpec(name, "BF16", (8 * size, 64)) for name in names)

    def rank(number: int, peers: ThreadPeers) -> tuple[TensorTable, int, int]:
        boxes = [(name, "BF16", Box.of((8 * number, 0), (8, 64))) for name in names]
        found = agree_on_table(Rounds(peers), boxes, table if known else None)
        return found, peers.sent, peers.received

    found = on_ranks(size, rank)
    assert not errors_of(found)
    for one in found:
        assert isinstance(one, tuple)
        assert one[0] == table
        assert max(one[1:]) < 60 * tensors
