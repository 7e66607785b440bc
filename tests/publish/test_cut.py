"""Publishing in boxes for tensor-parallel readers: named, or as replicas say in their heartbeats."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Shard, ThreadPeers, errors_of, on_ranks, whole
from scripted_store import ScriptedStore
from sharded import followed

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import replica_key
from weightcast.channel.records import Heartbeat
from weightcast.errors import UsageError
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource
from weightcast.publish.pipeline import AHEAD
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore

COLUMNS = wc.Cut("b", axis=1, parts=4)


def boxes_of(store: Store, version: int) -> dict[str, list[tuple[int, ...]]]:
    """The offsets of the boxes of each tensor, in all objects of a version together."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for ref in Chain.open(store).manifest(version).objects:
        for row in PatchReader(BytesSource(store.get(ref.key))).rows:
            found.setdefault(row.spec.name, []).append(row.place.box.offset)
    return found


def report(store: Store, replica: str, *cuts: wc.Cut) -> None:
    chain = Chain.open(store)
    head = chain.head()
    assert head is not None
    put_heartbeat(chain, Heartbeat(replica, head.position, 1.0, pause=0.0, cuts=cuts))


def publish(store: Store, steps: range, **options: object) -> None:
    weights = whole(steps.start - 1)
    with wc.Publisher(store, weights, threads=1, **options) as publisher:  # type: ignore[arg-type]
        for step in steps:
            after = whole(step)
            for spec in weights.table:
                weights.read(spec.name)[:] = after.read(spec.name)
            publisher.publish(step=step).result(60)


def must_follow(store: Store, version: int) -> None:
    assert wc.fingerprint(followed(store)) == wc.fingerprint(whole(version))


def test_named_parts_are_boxes() -> None:
    store = MemoryStore()
    publish(store, range(1, 4), cut=[COLUMNS])
    assert boxes_of(store, 3)["b"] == [(0, 0), (0, 10), (0, 20), (0, 30)]
    assert boxes_of(store, 3)["a"] == [(0, 0)]
    assert Chain.open(store).manifest(3).codec == "banded"
    must_follow(store, 3)


def test_other_weights_passed_to_publish_are_cut_too() -> None:
    store, weights = MemoryStore(), whole(0)
    with wc.Publisher(store, weights, threads=1, cut=[COLUMNS]) as publisher:
        publisher.publish(1, whole(1)).result(60)
    assert len(boxes_of(store, 1)["b"]) == 4
    must_follow(store, 1)


def test_merged_updates_are_whole() -> None:
    """They are coded with `gap`, of which a reader needs no old bits but its own."""
    store = ScriptedStore()
    publish(store, range(1, 2))
    held = store.hang("put", "deltas/")
    weights = whole(1)
    with wc.Publisher(store, weights, threads=1, cut=[COLUMNS]) as publisher:
        receipts = []
        for step in range(2, 5 + AHEAD):  # once the last ones return, those before them are merged
            weights.read("b")[:] = whole(step).read("b")
            receipts.append(publisher.publish(step=step))
            assert held.reached.wait(30)
        held.end()
        merged = receipts[2].result(60)
    assert receipts[1].result(60) == merged
    assert merged.codec == "gap"
    assert boxes_of(store, merged.position.version)["b"] == [(0, 0)]


def test_replicas_name_the_parts() -> None:
    store = MemoryStore()
    publish(store, range(1, 2))
    report(store, "one", COLUMNS)
    report(store, "two", wc.Cut("b", axis=1, parts=2), wc.Cut("experts", axis=0, parts=4))
    report(store, "three")
    publish(store, range(2, 4), cut="replicas")
    assert boxes_of(store, 3)["b"] == [(0, 0), (0, 10), (0, 20), (0, 30)]
    assert len(boxes_of(store, 3)["experts"]) == 4
    must_follow(store, 3)


LIES = {
    "a number": "3",
    "none": "[]",
    "too few values": '[["b",1]]',
    "no parts": '[["b",1,0]]',
    "too many parts": '[["b",1,257]]',
    "no dimension": '[["b",-1,4]]',
    "no name": '[["",1,4]]',
    "a name that is no text": "[[1,1,4]]",
    "too many values": '[["b",1,4,4]]',
    "too many": '[["b",1,4]' + ',["b",1,4]' * 64 + "]",
    "a long name": '[["' + "b" * 1001 + '",1,4]]',
}


@pytest.mark.parametrize("cuts", LIES.values(), ids=LIES.keys())
def test_heartbeats_that_lie_about_parts_are_ignored(cuts: str) -> None:
    store = MemoryStore()
    publish(store, range(1, 2))
    report(store, "one", COLUMNS)
    key = replica_key("one")
    whole_record = store.get(key)
    assert b'"cuts":[["b",1,4]]' in whole_record
    store.put(key, whole_record.replace(b'[["b",1,4]]', cuts.encode()))
    publish(store, range(2, 3), cut="replicas")
    assert boxes_of(store, 2)["b"] == [(0, 0)]
    must_follow(store, 2)


def test_bucket_without_an_answer_about_heartbeats_delays_no_version() -> None:
    store = ScriptedStore()
    publish(store, range(1, 2))
    report(store, "one", COLUMNS)
    store.fail("list", "replicas/")
    publish(store, range(2, 4), cut="replicas")
    assert boxes_of(store, 3)["b"] == [(0, 0)]
    must_follow(store, 3)


@pytest.mark.parametrize("cut", ["replica", 8, [8], "*"])
def test_anything_else_is_refused_before_the_channel_is_touched(cut: object) -> None:
    store = MemoryStore()
    for make in (lambda: wc.Publisher(store, whole(0), cut=cut), lambda: wc.StreamPublisher(store, cut=cut)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="parts of tensors"):
            make()
    assert not list(store.list(""))


@pytest.mark.parametrize("cut", ["replicas", [COLUMNS, wc.Cut("a", axis=1, parts=2)]], ids=["replicas", "named"])
def test_boxes_of_ranks_are_cut_further(cut: object) -> None:
    store = MemoryStore()
    publish(store, range(1, 2))
    report(store, "one", COLUMNS, wc.Cut("a", axis=1, parts=2))

    def rank(number: int, peers: ThreadPeers) -> None:
        shard = Shard(number, 3, 1)
        with wc.Publisher(store, shard.weights, group=peers, threads=1, cut=cut) as publisher:  # type: ignore[arg-type]
            for step in (2, 3, 4):
                shard.at(step)
                publisher.publish(step=step).result(60)

    assert not errors_of(on_ranks(3, rank))
    found = boxes_of(store, 4)
    assert sorted(found["b"]) == [(0, at) for at in (0, 10, 14, 20, 28, 30)]  # ranks have 14, 14 and 12 columns
    assert sorted({column for _, column in found["a"]}) == [0, 12]
    must_follow(store, 4)


def test_bytes_of_boxes_are_those_of_an_encoder_that_has_the_base() -> None:
    store = MemoryStore()
    publish(store, range(1, 2), cut=[COLUMNS])
    (ref,) = Chain.open(store).manifest(1).objects
    before, after = whole(0), whole(1)
    assert store.get(ref.key) == wc.encode(wc.diff(before, after), old=before, cut=[COLUMNS])
    assert np.array_equal(followed(store).read("b"), after.read("b"))
