"""Sharded publishing: ranks that publish together give the versions of one that holds everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import Shard, ThreadPeers, bits_at, errors_of, on_ranks, whole
from scripted_store import ScriptedStore
from sharded import followed, train

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import UsageError
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.verify import verify


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_versions_of_ranks_are_those_of_the_whole_model(size: int) -> None:
    store = MemoryStore()
    positions = train(store, size, range(1, 7))
    assert positions == [positions[0]] * size
    chain = Chain.open(store)
    for version in range(7):
        expected = wc.fingerprint(whole(version))
        manifest = chain.manifest(version)
        assert manifest.position == wc.Position(version, expected.digest)
        assert manifest.step == (version or None)
        assert wc.fingerprint(followed(store, version)) == expected
        assert manifest.codec == ("banded" if version else None)
    assert not list(verify(chain))


def test_objects_of_ranks_take_few_bytes_more_than_one() -> None:
    """Two percent, but for headers and tables: the model here is tiny, so what counts is the coded blocks."""
    one, four = MemoryStore(), MemoryStore()
    train(one, 1, range(1, 3))
    train(four, 4, range(1, 3))
    assert len(Chain.open(one).manifest(2).objects) == 1
    assert len(Chain.open(four).manifest(2).objects) == 4


def test_mirror_makes_a_checkpoint_of_a_sharded_channel(tmp_path: Path) -> None:
    store = MemoryStore()
    train(store, 3, range(1, 4))
    with wc.Subscriber(store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
    with wc.Checkpoint(tmp_path / "mirror") as checkpoint:
        assert wc.fingerprint(checkpoint) == wc.fingerprint(whole(3))


def test_what_waits_is_merged_for_all_ranks_alike() -> None:
    store = ScriptedStore()
    train(store, 3, range(1, 3))
    held = store.hang("put", "deltas/")

    def rank(number: int, peers: ThreadPeers) -> int:
        shard = Shard(number, 3, 2)
        with wc.Publisher(store, shard.weights, group=peers, threads=1) as publisher:
            for step in range(3, 9):
                shard.at(step)
                receipt = publisher.publish(step=step)
            if number == 0:
                assert held.reached.wait(30)
                held.end()
            manifest = receipt.result(60)
            assert manifest.step == 8
            return manifest.position.version

    versions = on_ranks(3, rank)
    assert versions[0] in range(3, 9)
    assert versions == [versions[0]] * 3
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(8))


def test_publish_without_a_change_makes_no_version() -> None:
    store = MemoryStore()

    def rank(number: int, peers: ThreadPeers) -> bool | None:
        shard = Shard(number, 2)
        with wc.Publisher(store, shard.weights, group=peers, threads=1) as publisher:
            receipt = publisher.publish(step=1)
            assert receipt.result(30).position.version == 0
            return receipt.is_new

    assert on_ranks(2, rank) == [False, False]


def test_change_on_one_rank_alone_is_one_object() -> None:
    store = MemoryStore()

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 3)
        with wc.Publisher(store, shard.weights, group=peers, threads=1) as publisher:
            if number == 1:
                shard.arrays[0].reshape(-1)[0] ^= 1
            publisher.publish(step=1)

    assert on_ranks(3, rank) == [None] * 3
    manifest = Chain.open(store).manifest(1)
    assert (manifest.changed, len(manifest.objects)) == (1, 1)
    assert followed(store).read("a").tobytes() != whole(0).read("a").tobytes()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4), (3, 1), (2, 2)])
def test_restart_on_another_number_of_ranks_continues_the_chain(before: int, after: int) -> None:
    store = MemoryStore()
    train(store, before, range(1, 4))
    train(store, after, range(4, 7))
    chain = Chain.open(store)
    assert chain.head() is not None
    for version in range(7):
        assert chain.manifest(version).position.digest == wc.fingerprint(whole(version)).digest
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(6))


def test_restart_at_an_older_step_on_other_ranks_publishes_all_boxes() -> None:
    """Nobody holds the boxes whole in which the head was coded, so nothing can be coded against it."""
    store = MemoryStore()
    train(store, 2, range(1, 6))
    train(store, 3, range(3, 7))
    chain = Chain.open(store)
    assert chain.manifest(6).base is None
    assert wc.fingerprint(followed(store, 6)) == wc.fingerprint(whole(2))
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(6))


def test_channel_of_one_writer_is_continued_by_ranks_and_back() -> None:
    store = MemoryStore()
    wc.init(store, whole(0))
    train(store, 3, range(1, 3))
    weights = whole(2)
    with wc.Publisher(store, weights, threads=1) as publisher:
        for name, bits in bits_at(3).items():
            weights.read(name)[:] = bits.reshape(-1)
        publisher.publish(step=3)
    train(store, 2, range(4, 6))
    chain = Chain.open(store)
    assert [chain.manifest(version).base is None for version in range(6)] == [True] + [False] * 5
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(5))


@pytest.mark.parametrize("detect", ["transient", "device"])
def test_torch_shards_are_watched_through_their_optimizer_and_rounded(detect: str) -> None:
    torch = pytest.importorskip("torch")
    store = MemoryStore()
    rows = [torch.nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))) for rank in range(2)]
    bias = torch.zeros(4, dtype=torch.int32)

    def rank(number: int, peers: ThreadPeers) -> list[str]:
        shards: list = [("w", wc.Box.of((3 * number, 0), (3, 5)), rows[number])]
        shards += [("count", wc.Box.of((0,), (4,)), bias)] * number
        optimizer = torch.optim.SGD([rows[number]], lr=0.1)
        options = {"detect": detect} | ({"optimizer": optimizer} if detect == "transient" else {})
        with wc.Publisher(store, wc.Shards(shards), group=peers, dtype="BF16", threads=1, **options) as publisher:
            found = []
            for step in range(1, 5):
                rows[number].grad = torch.full((3, 5), float(step))
                optimizer.step()
                if number:
                    bias[step - 1] += 1
                found.append(publisher.publish(step=step).result(30).position.digest)
            return found

    digests = on_ranks(2, rank)
    assert digests[0] == digests[1]
    whole_rows = torch.cat([one.detach() for one in rows]).numpy()
    arrays = {"w": wc.round_to("BF16", whole_rows), "count": bias.numpy()}
    reference = wc.Arrays(arrays, {"w": "BF16"})
    assert isinstance(digests[0], list)
    assert digests[0][-1] == wc.fingerprint(reference).digest
    held = wc.Arrays({name: np.zeros_like(array) for name, array in arrays.items()}, {"w": "BF16"})
    with wc.Subscriber(store, held, threads=1) as subscriber:
        subscriber.sync()
    assert wc.fingerprint(held).digest == digests[0][-1]


# -- what is refused, by the same error on every rank -----------------------------------------------------------------


def opened(size: int, shards: list[list[tuple[str, tuple[int, ...], np.ndarray]]]) -> list[object]:
    def rank(number: int, peers: ThreadPeers) -> None:
        boxes = [(name, wc.Box.of(offset, array.shape), array) for name, offset, array in shards[number]]
        wc.Publisher(MemoryStore(), wc.Shards(boxes), group=peers, threads=1).close()

    return on_ranks(size, rank)


ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([[("w", (0, 0), ROWS)], [("w", (1, 0), ROWS.copy())]], "ranks 0 and 1 have the same elements"),
        ([[("w", (0, 0), ROWS)], [("w", (3, 0), ROWS.copy())]], "no rank has 3 of its elements"),
        ([[("w", (0, 0), ROWS)], [("w", (2, 0), ROWS[:, :2].copy())]], "no rank has 2 of its elements"),
        ([[("w", (0, 0), ROWS)], [("w", (2, 0), ROWS.astype(np.float64))]], "rank 0 has F32, rank 1 has F64"),
        ([[("w", (0, 0), ROWS)], [("w", (2,), ROWS[0].copy())]], "rank 0 has 2 dimensions, rank 1 has 1"),
    ],
    ids=["overlap", "hole", "another shape", "another dtype", "another rank of tensor"],
)
def test_shards_that_make_no_table_are_refused_on_every_rank(shards: list, problem: str) -> None:  # type: ignore[type-arg]
    errors = errors_of(opened(2, shards))
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, UsageError)
        assert problem in str(error)


def test_ranks_that_publish_other_steps_are_refused() -> None:
    store = MemoryStore()

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 2)
        with wc.Publisher(store, shard.weights, group=peers, threads=1) as publisher:
            shard.at(1)
            publisher.publish(step=1 + number).result(30)

    errors = errors_of(on_ranks(2, rank))
    assert len(errors) == 2
    assert all("published step" in str(error) for error in errors)
    assert Chain.open(store).manifest(0) == Chain.open(store).head()


def test_group_of_weights_that_are_not_sharded_is_refused() -> None:
    (error,) = on_ranks(1, lambda _, peers: wc.Publisher(MemoryStore(), whole(0), group=peers))
    assert isinstance(error, UsageError)
    assert "only sharded weights have a group" in str(error)
