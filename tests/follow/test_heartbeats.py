"""Heartbeats: names of replicas, retries where they are refused, and rivals under the same name."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from fake_clock import FakeClock
from scripted_store import ScriptedStore
from worlds import World

from weightcast.channel.heartbeats import heartbeats, put_heartbeat
from weightcast.channel.records import Heartbeat
from weightcast.errors import (
    AccessError,
)
from weightcast.follow.heartbeat_sender import default_replica
from weightcast.follow.subscriber import Subscriber


def test_refused_heartbeat_is_sent_again_later(world: World) -> None:
    clock, store = FakeClock(), ScriptedStore(world.store)
    refused = store.fail("put", "replicas/", AccessError)
    with Subscriber(store, world.mirror, threads=1, replica="r", clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert heartbeats(world.chain) == []
        refused.end()
        subscriber.poll()
        assert heartbeats(world.chain) == [], "not at once"
        clock.time += 3600 * 1.2
        subscriber.poll()
        ((beat, _),) = heartbeats(world.chain)
    assert beat.position.version == 4
    assert beat.seconds.keys() == {"find", "fetch", "decode", "verify", "stage", "apply"}


def test_two_folders_of_one_host_have_two_names(tmp_path: Path) -> None:
    names = {default_replica(tmp_path / name) for name in ("a", "b")} | {default_replica()}
    assert len(names) == 3
    assert default_replica(tmp_path / "a") == default_replica(tmp_path / "b" / ".." / "a")


def test_name_of_another_running_replica_is_warned_about(world: World, caplog: pytest.LogCaptureFixture) -> None:
    position = world.chain.manifest(1).position
    put_heartbeat(world.chain, Heartbeat("r", position, time.time(), instance="a" * 32))
    with caplog.at_level(logging.WARNING, "weightcast"):
        with Subscriber(world.store, world.mirror, threads=1, replica="r") as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
        assert caplog.text.count("another process reports as replica r, or did a moment ago") == 1


def test_replica_whose_heartbeat_is_overwritten_warns(world: World, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with Subscriber(world.store, world.mirror, threads=1, replica="r", clock=clock) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        for _ in range(3):
            clock.time += 31
            put_heartbeat(world.chain, Heartbeat("r", world.chain.manifest(1).position, 1.0, instance="b" * 32))
            subscriber.poll()
    assert caplog.text.count("another process reports as replica r, or did a moment ago") == 1


def test_restarted_replica_is_not_its_own_rival(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with Subscriber(world.store, world.mirror, threads=1, replica="r") as subscriber:
            staged = subscriber.poll()
            if staged is not None:
                subscriber.apply(staged)
    assert "another process" not in caplog.text
