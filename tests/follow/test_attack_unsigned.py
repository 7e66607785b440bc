"""What no signature covers: hints, pins, tags, lists of the collector, the lease; and signed notes shown again.

Whoever writes them can delay, and can keep or lose what is not needed; no reader with a key holds other weights.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.heartbeats import heartbeats, put_heartbeat
from weightcast.channel.keys import CHANNEL, manifest_key, pin_key
from weightcast.channel.records import Heartbeat, channel_to_json, head_to_json
from weightcast.channel.retention import Retention
from weightcast.channel.tags import set_tag
from weightcast.engine.followers import Followers
from weightcast.errors import TrustError, WeightcastError
from weightcast.upkeep.collect import collect
from weightcast.upkeep.repair import repair

VERSIONS = 9
AT_ONCE = Retention(0, 0, 0)


@pytest.fixture
def channel(tmp_path: Path) -> SignedChannel:
    made = SignedChannel(tmp_path, VERSIONS)
    made.squash()
    return made


def holds_the_head(channel: SignedChannel, folder: str = "mirror") -> bool:
    position = channel.pull(folder, channel.trust)
    return position.version == VERSIONS and np.array_equal(channel.held(folder), bits_of(VERSIONS))


@pytest.mark.parametrize(
    "hint",
    [
        head_to_json(wc.Position(0, "0" * 64)),
        head_to_json(wc.Position(10**12 - 1, "f" * 64)),
        b"{" * 1000,
    ],
    ids=["old", "impossible", "garbage"],
)
def test_hint_of_an_attacker_hides_no_version(channel: SignedChannel, hint: bytes) -> None:
    channel.overwrite("head.json", hint)
    channel.overwrite("index.json", hint)
    assert holds_the_head(channel)


def test_pin_of_an_attacker_keeps_a_version_and_changes_no_weights(channel: SignedChannel) -> None:
    channel.overwrite(pin_key(3), b"\x1b[31m")
    chain = channel.chain("cutter")
    kept = collect(chain, AT_ONCE).kept
    assert 3 in kept
    assert holds_the_head(channel)


def test_pin_that_an_attacker_deletes_loses_that_version_alone(channel: SignedChannel) -> None:
    channel.overwrite(pin_key(3), b"{}")
    channel.path(pin_key(3)).unlink()
    assert 3 in collect(channel.chain("cutter"), AT_ONCE).versions
    assert holds_the_head(channel)
    with pytest.raises(WeightcastError):
        pulled_at(channel, 3)


def test_list_of_an_attacker_makes_the_collector_delete_nothing_that_is_kept(channel: SignedChannel) -> None:
    everything = [listed.key for listed in channel.store.list("")]
    channel.overwrite("doomed/" + "0" * 32 + ".json", json.dumps(everything).encode())
    gone = collect(channel.chain("cutter"), Retention(window=3600, grace=0)).objects
    assert not [key for key in gone if key.startswith(("manifests/", "deltas/", "anchors/", CHANNEL))]
    assert holds_the_head(channel)
    assert np.array_equal(pulled_at(channel, 3), bits_of(3))


def pulled_at(channel: SignedChannel, version: int) -> np.ndarray:
    held = arrays(bits_of(0))
    with wc.Subscriber(channel.url, held, wc.Pinned(version), threads=1, trust=channel.trust) as subscriber:
        subscriber.sync()
    return held.read("w")


def test_lease_of_an_attacker_stops_no_writer(channel: SignedChannel) -> None:
    channel.overwrite(
        "writer.json",
        b'{"format":1,"host":"evil","kind":"lease","pid":1,"time":%d,"writer":"evil"}' % time.time(),
    )
    channel.publish()
    assert channel.pull("mirror", channel.trust).version == VERSIONS + 1


def test_copy_of_the_record_without_its_signature_is_refused_after_a_repair(channel: SignedChannel) -> None:
    bare = channel_to_json(replace(channel.chain().channel, signer=None, signature=None))
    for path in channel.url.glob("anchors/*/channel.json"):
        path.write_bytes(bare)
    channel.path(CHANNEL).unlink()
    repair(channel.store)
    with pytest.raises(TrustError) as raised:
        channel.pull("mirror", channel.trust)
    assert raised.value.reason == "unsigned"


def test_tag_of_an_attacker_leads_a_follower_nowhere(channel: SignedChannel) -> None:
    """Only who names a tag asks for one, and with a key is refused (`tests/cli/test_key_verb.py`)."""
    chain = channel.chain()
    set_tag(chain, "best", chain.manifest(0).position)
    assert holds_the_head(channel)


def test_follower_that_runs_notices_a_frozen_bucket_and_goes_on_with_the_next_version(
    channel: SignedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust, real = wc.Trust(channel.trust, max_age=3600), time.time
    with wc.Subscriber(channel.url, held := arrays(bits_of(0)), threads=1, trust=trust) as subscriber:
        subscriber.sync()
        assert subscriber.sync() is None
        monkeypatch.setattr(time, "time", lambda: real() + 7200)
        for _ in range(2):
            with pytest.raises(TrustError) as raised:
                subscriber.sync()
            assert raised.value.reason == "stale"
        channel.publish()
        subscriber.sync()
    assert np.array_equal(held.read("w"), bits_of(VERSIONS + 1))


# -- heartbeats --------------------------------------------------------------------------------------------------------


def report(channel: SignedChannel, version: int) -> bytes:
    chain = channel.chain("replica")
    put_heartbeat(chain, Heartbeat("rack-7", chain.manifest(version).position, time.time(), pause=0.1))
    return channel.path("replicas/rack-7.json").read_bytes()


def test_heartbeat_under_another_name_does_not_count(channel: SignedChannel) -> None:
    channel.add("replica", "replica")
    data = report(channel, VERSIONS)
    channel.overwrite("replicas/rack-8.json", data)
    assert [beat.replica for beat, _ in heartbeats(channel.chain())] == ["rack-7"]


def test_heartbeat_that_is_shown_again_makes_a_trainer_wait_and_no_more(channel: SignedChannel) -> None:
    """The store's clock says when it came, so an old one looks new: the engine seems to be there, and behind."""
    channel.add("replica", "replica")
    followers = Followers(channel.chain())
    old = report(channel, 1)
    report(channel, VERSIONS)
    assert [beat.position.version for beat in followers.now()] == [VERSIONS]
    channel.overwrite("replicas/rack-7.json", old)
    assert [beat.position.version for beat in followers.now()] == [1]
    channel.path("replicas/rack-7.json").unlink()
    assert followers.now() == []
    assert holds_the_head(channel)


# -- all of it at once -------------------------------------------------------------------------------------------------


def _json_otherwise(data: bytes, chance: random.Random) -> bytes:
    """The same record in another form, or with another value."""
    fields = json.loads(data)
    name = chance.choice(sorted(fields))
    forms: list[Callable[[], bytes]] = [
        lambda: json.dumps(fields, indent=1).encode(),
        lambda: json.dumps(dict(reversed(fields.items())), separators=(",", ":")).encode(),
        lambda: b'{"%s":0,' % name.encode() + data[1:],
        lambda: data.replace(name[0].encode(), b"\\u%04x" % ord(name[0]), 1),
        lambda: json.dumps({**fields, name: chance.choice([None, [], "x", -1, 10**400, 1e308])}).encode(),
    ]
    return chance.choice(forms)()


def _disturb(objects: dict[str, bytes], others: dict[str, bytes], chance: random.Random) -> None:
    """Delete, swap, move, garble, cut or write otherwise one of the objects."""
    key = chance.choice(sorted(objects))
    kind = chance.randrange(6)
    if kind == 0:
        del objects[key]
    elif kind == 1:
        objects[key] = others.get(key) or others[chance.choice(sorted(others))]
    elif kind == 2:
        objects[chance.choice(sorted(objects))] = objects[key]
    elif kind == 3:
        at = chance.randrange(len(objects[key]))
        objects[key] = objects[key][:at] + bytes([objects[key][at] ^ 1 << chance.randrange(8)]) + objects[key][at + 1 :]
    elif kind == 4:
        objects[key] = objects[key][: chance.randrange(len(objects[key]))]
    elif objects[key].startswith(b"{") and objects[key].endswith(b"}"):
        objects[key] = _json_otherwise(objects[key], chance)


def test_no_mixture_of_objects_makes_a_reader_hold_other_weights(tmp_path: Path) -> None:
    """Old objects, those of another channel with the same keys, and damaged ones: an error, or a version's weights."""
    channel = SignedChannel(tmp_path, 3)
    old = channel.snapshot()
    channel.publish(VERSIONS - 3)
    channel.squash()
    whole = channel.snapshot()
    channel.pull("seen", channel.trust)
    channel.put_back({})
    wc.init(channel.url, arrays(bits_of(0) ^ np.uint16(64)), sign=channel.file("root"))
    channel.add("writer", "writer")
    another = channel.snapshot()
    chance, held = random.Random(0), 0
    for _ in range(60):
        objects = dict(whole)
        for _ in range(chance.choice([1, 2, 5])):
            _disturb(objects, chance.choice([old, another]), chance)
        channel.put_back({})
        channel.put_back(objects)
        bits = arrays(np.zeros_like(bits_of(0)))
        try:
            with wc.Subscriber(channel.url, bits, threads=1, trust=channel.trust) as subscriber:
                subscriber.sync()
                assert subscriber.position is not None
                assert np.array_equal(bits.read("w"), bits_of(subscriber.position.version))
                held += 1
        except WeightcastError:
            assert not bits.read("w").any()
        with suppress(WeightcastError):
            assert channel.pull("seen").version == VERSIONS
        assert np.array_equal(channel.held("seen"), bits_of(VERSIONS))
    assert held > 10


def test_deleting_the_manifest_that_was_seen_is_no_way_back(channel: SignedChannel) -> None:
    assert holds_the_head(channel)
    for version in range(4, VERSIONS + 1):
        channel.path(manifest_key(version)).unlink()
    with pytest.raises(WeightcastError):
        channel.pull("mirror")
    assert np.array_equal(channel.held("mirror"), bits_of(VERSIONS))
