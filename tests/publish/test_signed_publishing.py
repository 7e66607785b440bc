"""Publishing to a channel that is signed: by one writer, by ranks, from a stream and from folders."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ranks import Shard, ThreadPeers, errors_of, on_ranks, whole
from scripted_store import ScriptedStore
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import manifest_key
from weightcast.channel.trust import Signing, Trust, signing_of
from weightcast.disk.checkpoint import save
from weightcast.errors import TrustError, UsageError
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.store.file import FileStore
from weightcast.upkeep.keyring import add_key
from weightcast.upkeep.verify import verify


@pytest.fixture
def channel(tmp_path: Path) -> SignedChannel:
    return SignedChannel(tmp_path)


def test_versions_are_signed_in_one_chain(channel: SignedChannel) -> None:
    channel.publish(3)
    found = [channel.chain().manifest(version) for version in range(4)]
    assert [manifest.signer for manifest in found] == [
        channel.public(name).id for name in ("root", "writer", "writer", "writer")
    ]
    assert found[0].previous is None
    assert len({manifest.previous for manifest in found}) == 4
    assert [manifest.keyring for manifest in found] == [0, 2, 2, 2]


def test_publisher_without_a_key_writes_nothing_into_a_signed_channel(channel: SignedChannel) -> None:
    before = channel.snapshot()
    with pytest.raises(UsageError, match="this channel is signed"):
        wc.Publisher(channel.url, arrays(bits_of(1)))
    assert {key for key in channel.snapshot() if not key.startswith("probe/")} == before.keys()


def test_signing_needs_a_key_to_trust(channel: SignedChannel) -> None:
    with pytest.raises(UsageError, match="must check those that they follow"):
        wc.Publisher(channel.url, arrays(bits_of(0)), sign=channel.file("writer"))


def test_publisher_with_the_root_key_begins_a_signed_channel(channel: SignedChannel, tmp_path: Path) -> None:
    url = tmp_path / "another"
    with wc.Publisher(url, arrays(bits_of(0)), sign=channel.file("root"), trust=channel.trust):
        pass
    assert Chain.open(FileStore(url), Signing(Trust(channel.trust))).manifest(0).signer == channel.public("root").id
    with pytest.raises(UsageError, match="only the root key begins"):
        wc.Publisher(tmp_path / "third", arrays(bits_of(0)), sign=channel.file("writer"), trust=channel.trust)


def test_publisher_does_not_continue_what_it_cannot_trust(channel: SignedChannel) -> None:
    channel.publish()
    channel.rewrite(manifest_key(1), signature=None, signer=None)
    with pytest.raises(TrustError) as raised:
        channel.publish()
    assert raised.value.reason == "unsigned"


def test_key_that_has_ended_commits_nothing(channel: SignedChannel) -> None:
    channel.publish(2)
    channel.revoke("writer", last=2)
    with pytest.raises(TrustError) as raised:
        channel.publish()
    assert raised.value.reason == "not allowed"
    assert not channel.path(manifest_key(3)).exists()
    channel.version = 2
    channel.add("stranger", "writer", first=3)
    channel.publish(writer="stranger")
    assert channel.pull("mirror", channel.trust).version == 3


def test_lost_answer_to_a_signed_commit_is_not_a_conflict(channel: SignedChannel) -> None:
    store = ScriptedStore(FileStore(channel.url))
    weights = arrays(bits_of(0))
    with wc.Publisher(
        store, weights, threads=1, retry_after=0.01, sign=channel.file("writer"), trust=channel.trust
    ) as publisher:
        store.fail("create", "manifests/", lost=True, times=1)
        weights.write("w", bits_of(1))
        assert publisher.publish().result(60).position.version == 1
    assert channel.chain().head() is not None


def requests(home: Path, signer: str | None) -> tuple[Counter[str], Counter[str]]:
    """What a publisher and a subscriber ask for each of ten versions, once both have begun."""
    keys = SignedChannel(home)
    url = home / "counted"
    options = {"sign": keys.file(signer), "trust": keys.trust} if signer else {}
    weights, held = arrays(bits_of(0)), arrays(bits_of(0))
    wc.init(url, weights, sign=keys.file("root") if signer else None)
    if signer == "writer":
        add_key(
            Chain.open(FileStore(url), signing_of(keys.trust, keys.file("root"))), keys.public(signer), ["writer"], 0
        )
    written, read = ScriptedStore(FileStore(url)), ScriptedStore(FileStore(url))
    with (
        wc.Publisher(written, weights, threads=1, **options) as publisher,  # type: ignore[arg-type]
        wc.Subscriber(read, held, threads=1, trust=keys.trust if signer else None) as subscriber,
    ):
        for version in range(1, 3):
            weights.write("w", bits_of(version))
            publisher.publish().result(60)
            subscriber.sync()
        before = len(written.calls), len(read.calls)
        for version in range(3, 13):
            weights.write("w", bits_of(version))
            publisher.publish().result(60)
            subscriber.sync()
        counted = tuple(
            Counter(verb for verb, _ in store.calls[first:])
            for store, first in zip((written, read), before, strict=True)
        )
    assert np.array_equal(held.read("w"), bits_of(12))
    return counted[0], counted[1]


def test_signatures_take_nobody_a_request_for_a_version(tmp_path: Path) -> None:
    found = {}
    for name in ("root", "writer", None):
        home = tmp_path / str(name)
        home.mkdir()
        found[name] = requests(home, name)
    assert found["root"] == found["writer"] == found[None]


def test_ranks_of_a_sharded_training_sign_together(channel: SignedChannel, tmp_path: Path) -> None:
    url = tmp_path / "sharded"

    def rank(number: int, peers: ThreadPeers) -> wc.Position:
        shard = Shard(number, 2, 0)
        options = {"sign": channel.file("root") if number == 0 else None, "trust": channel.trust}
        with wc.Publisher(url, shard.weights, group=peers, threads=1, **options) as publisher:  # type: ignore[arg-type]
            for step in (1, 2):
                shard.at(step)
                assert publisher.publish(step=step).result(60).signer == channel.public("root").id
            return publisher.flush(60)

    found = on_ranks(2, rank)
    assert not errors_of(found), found
    chain = Chain.open(FileStore(url), Signing(Trust(channel.trust)))
    assert list(verify(chain)) == []
    assert chain.manifest(2).position.digest == wc.fingerprint(whole(2)).digest
    with wc.Subscriber(url, tmp_path / "mirror", trust=channel.trust) as subscriber:
        subscriber.sync()
        assert subscriber.position == chain.manifest(2).position


def test_stream_is_published_signed(channel: SignedChannel) -> None:
    torch = pytest.importorskip("torch")
    words = [torch.from_numpy(bits_of(version).view(np.int16)).view(torch.bfloat16) for version in range(2)]
    with wc.StreamPublisher(channel.url, sign=channel.file("writer"), trust=channel.trust) as publisher:
        for step, word in enumerate(words):
            publisher.send([("w", word)], step=step).result(60)
    assert channel.pull("mirror", channel.trust).version == 1


def test_folder_is_published_signed_and_cut_as_an_anchor(channel: SignedChannel, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(arrays(bits_of(1)), folder)
    signing = signing_of(channel.trust, channel.file("writer"))
    assert (
        publish(channel.url, folder, tmp_path / "head", signing=signing).manifest.signer == channel.public("writer").id
    )
    with wc.Subscriber(channel.url, tmp_path / "head", trust=channel.trust) as subscriber:
        subscriber.sync()
        cut_anchor(channel.chain("cutter"), subscriber.mirror)
    assert list(verify(channel.chain())) == []
    for key in [listed.key for listed in channel.store.list("manifests/")][:1]:
        assert json.loads(channel.path(key).read_text())["signer"] == channel.public("root").id


def test_channel_without_create_if_absent_is_signed_too(channel: SignedChannel) -> None:
    store = ScriptedStore()
    store.overwrite()
    weights = arrays(bits_of(0))
    options = {"sign": channel.file("root"), "trust": channel.trust}
    with wc.Publisher(store, weights, threads=1, **options) as publisher:  # type: ignore[arg-type]
        weights.write("w", bits_of(1))
        publisher.publish().result(60)
    chain = Chain.open(store, Signing(Trust(channel.trust)))
    assert chain.channel.fence == "list"
    assert chain.manifest(1).previous is not None


def test_writer_whose_key_was_revoked_while_it_ran_commits_nothing(channel: SignedChannel) -> None:
    weights = arrays(bits_of(0))
    with wc.Publisher(channel.url, weights, threads=1, sign=channel.file("writer"), trust=channel.trust) as old:
        channel.add("stranger", "writer", first=1)
        channel.revoke("writer", last=0)
        weights.write("w", bits_of(1))
        with pytest.raises(TrustError) as raised:
            old.publish(step=1).result(60)
    assert raised.value.reason == "not allowed"
    channel.publish(writer="stranger")
    assert channel.pull("mirror", channel.trust).version == 1
