"""Heartbeats of a channel that is signed: whoever trusts a key counts those of replicas that have one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats, put_heartbeat
from weightcast.channel.records import Heartbeat
from weightcast.channel.trust import Signing, Trust
from weightcast.engine.followers import Followers


@pytest.fixture
def channel(tmp_path: Path) -> SignedChannel:
    made = SignedChannel(tmp_path)
    made.add("replica", "replica")
    return made


def beat(channel: SignedChannel, name: str, signer: str | None) -> None:
    """Report as an engine that follows, signed by a key or by none."""
    chain = Chain.open(channel.store)
    signing = Signing(Trust(channel.trust), channel.keys[signer]) if signer else Signing()
    position = chain.manifest(0).position
    put_heartbeat(Chain(chain.store, chain.channel, signing), Heartbeat(name, position, time.time(), pause=0.1))


def test_trainer_with_a_key_waits_only_for_replicas_that_have_one(channel: SignedChannel) -> None:
    for name, signer in (("good", "replica"), ("none", None), ("stranger", "stranger"), ("writer", "writer")):
        beat(channel, name, signer)
    assert {found.replica for found, _ in heartbeats(Chain.open(channel.store))} == {
        "good",
        "none",
        "stranger",
        "writer",
    }
    assert [found.replica for found in Followers(channel.chain()).now()] == ["good"]
    assert [found.replica for found, _ in heartbeats(channel.chain())] == ["good"]


def test_changed_heartbeat_does_not_count(channel: SignedChannel) -> None:
    beat(channel, "good", "replica")
    channel.rewrite("replicas/good.json", pause=99.0)
    assert heartbeats(channel.chain()) == []


def test_subscriber_signs_its_heartbeats(channel: SignedChannel) -> None:
    held = arrays(np.zeros_like(bits_of(0)))
    with wc.Subscriber(
        channel.url, held, threads=1, replica="mine", trust=channel.trust, sign=channel.file("replica")
    ) as subscriber:
        subscriber.sync()
    record = json.loads(channel.path("replicas/mine.json").read_text())
    assert record["signer"] == channel.public("replica").id
    assert [found.replica for found, _ in heartbeats(channel.chain())] == ["mine"]


def test_trainer_that_runs_learns_which_replicas_have_a_key_and_which_no_more(channel: SignedChannel) -> None:
    beat(channel, "late", "stranger")
    followers = Followers(channel.chain())
    assert followers.now() == []
    channel.add("stranger", "replica")
    assert [found.replica for found in followers.now()] == ["late"]
    channel.revoke("stranger")
    assert followers.now() == []
