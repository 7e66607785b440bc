"""A sync returns when every engine that an agent follows for is live."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from scripted_store import ScriptedStore

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from local_engine import Local  # noqa: E402
from sharded_engine import SHAPES, stream, weights_of  # noqa: E402
from trl_transfer import (  # noqa: E402
    Attended,
    Bucket,
    Following,
    Opened,
    begun,
    holds,
    model,
    must_be_live,
    publish,
    step,
    sync,
    until_heard,
)

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.channel.heartbeats import heartbeats, put_heartbeat  # noqa: E402
from weightcast.channel.keys import Position, replica_key  # noqa: E402
from weightcast.channel.records import Heartbeat  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.followers import Followers  # noqa: E402
from weightcast.errors import (  # noqa: E402
    EngineError,
)


def test_sync_returns_once_every_following_engine_is_at_its_version(opened: Opened, tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engines = [Local(weights), Local(weights)]
    with (
        Following(store, engines[0], tmp_path / "0", "engine-0"),
        Following(store, engines[1], tmp_path / "1", "engine-1"),
    ):
        transfer = begun(opened(store, dtype=None), stream(weights))
        for number in range(1, 5):
            weights = changed(weights, 0.01, number)
            done = sync(transfer, stream(weights))
            assert [engine.served for engine in engines] == [str(number)] * 2
            assert (done.version, done.live) == (number, True)
            assert done.pause is not None
            assert done.pause > 0
            assert done.nbytes > 0
    for engine in engines:
        must_be_live(engine, store, 4)
    transfer.destroy()


def test_uploads_are_smaller_than_the_broadcast_of_trl(opened: Opened) -> None:
    store = Attended()
    tensors = {"w": torch.randn(400, 256)}
    transfer = begun(opened(store), tensors)
    step(tensors, 1)
    done = sync(transfer, tensors)
    assert 0 < done.nbytes < done.broadcast / 10


def test_late_engine_of_two_is_waited_for(opened: Opened) -> None:
    store, tensors = Bucket(lambda position: store.tell(position, "quick")), model()
    transfer = begun(opened(store, patience=0.3), tensors)
    head = Chain.open(store).head()
    assert head is not None
    store.tell(head.position, "slow")
    step(tensors, 1)
    done = sync(transfer, tensors)
    assert (done.version, done.live, done.pause) == (1, False, None)
    assert done.seconds["live"] > 0.1


def test_position_of_another_channel_does_not_count_as_live(opened: Opened) -> None:
    """A channel that was reset counts from 0 again: an engine that still holds what it had is not live."""
    store = Bucket(lambda position: store.tell(Position(position.version + 7, position.digest[::-1])))
    with pytest.raises(EngineError, match=r"engine is at 7.*patience"):
        begun(opened(store, patience=0.1), model())


def test_first_sync_without_followers_raises_with_the_remedy(opened: Opened) -> None:
    store, tensors = Bucket(), model()
    transfer = opened(store, patience=0.2)
    transfer.init_weight_transfer()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no engine follows.*weightcast attach memory://bucket --engine"):
        sync(transfer, tensors)
    assert time.monotonic() - began >= 0.2
    assert transfer.last is None
    holds(store, tensors)


def test_mirror_without_an_engine_does_not_count_as_a_follower(opened: Opened, tmp_path: Path) -> None:
    store, tensors = Bucket(), model()
    begun(opened(store, patience=0), tensors).destroy()
    with wc.Subscriber(store, tmp_path / "mirror", replica="pull", threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert list(store.list(replica_key("pull")))
    assert Followers(Chain.open(store)).now() == []
    with pytest.raises(EngineError, match="no engine follows"):
        begun(opened(store, patience=0.1), tensors)


@pytest.mark.parametrize(("age", "counts"), [(0, True), (80, True), (91, False), (1e6, False)])
def test_only_recent_heartbeats_by_the_clock_of_the_store_count(age: float, counts: bool) -> None:
    store = ScriptedStore(now=1e9)  # long ago, by ours
    head = wc.init(store, wc.Arrays({"w": np.zeros(3, np.float32)})).position
    chain = Chain.open(store)
    put_heartbeat(chain, Heartbeat("engine", head, time.time(), None, 0.0))
    store.now += age
    assert [found.replica for found in Followers(chain).now()] == ["engine"] * counts


def test_engine_with_an_old_heartbeat_is_neither_waited_for_nor_counted(opened: Opened, tmp_path: Path) -> None:
    store, weights = ScriptedStore(now=1e9), weights_of(SHAPES)
    head = wc.init(store, weights).position
    put_heartbeat(Chain.open(store), Heartbeat("gone", head, time.time(), None, 0.0))
    store.now += 91
    with pytest.raises(EngineError, match="no engine follows"):
        begun(opened(store, patience=0.1, dtype=None), stream(weights))
    engine = Local(weights)
    done = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights)).last
    assert done is not None
    assert done.live
    must_be_live(engine, store, 0)


def test_killed_agent_causes_a_warning_and_its_successor_catches_up(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = opened(store, dtype=None)
    with Following(store, engine, tmp_path / "mirror"):
        begun(transfer, stream(weights))
        last_word = store.get("replicas/engine-0.json")
    store.put("replicas/engine-0.json", last_word)  # one that is killed does not take it back
    transfer.patience = 0.3
    for number in (1, 2):
        weights = changed(weights, 0.05, number)
        caplog.clear()
        began = time.monotonic()
        done = sync(transfer, stream(weights))
        assert time.monotonic() - began >= 0.3
        assert (done.version, done.live, done.pause) == (number, False, None)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert f"version {number} is not live after 0.3 s: engine-0 is at 0; training goes on" in warning
        assert engine.served == "0"
    transfer.patience = 30.0
    with Following(store, engine, tmp_path / "mirror"):
        weights = changed(weights, 0.05, 3)
        done = sync(transfer, stream(weights))
        assert (done.version, done.live) == (3, True)
        assert engine.served == "3"
    must_be_live(engine, store, 3)


def test_engine_without_its_agent_is_taken_over_and_returned(opened: Opened, tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = opened(store, engine=engine, mirror=tmp_path / "own", dtype=None)
    with Following(store, engine, tmp_path / "mirror"):
        until_heard(store)
        begun(transfer, stream(weights))
        assert not (tmp_path / "own").exists()
    for number in (1, 2):  # the agent has left
        weights = changed(weights, 0.05, number)
        assert sync(transfer, stream(weights)).live
        assert engine.served == str(number)
    with Following(store, engine, tmp_path / "mirror") as other:
        until_heard(store)
        weights = changed(weights, 0.05, 3)
        assert sync(transfer, stream(weights)).live
        wc.Subscriber(store, tmp_path / "own", threads=1).close()  # refused while the trainer holds its mirror
        assert other.agent.position is not None
        assert other.agent.position.version == 3
    must_be_live(engine, store, 3)


def test_default_mirror_is_created_in_an_empty_home(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, dtype=None), stream(weights))
    assert sync(transfer, stream(changed(weights, 0.05, 1))).live
    must_be_live(engine, store, 1)


def test_heartbeat_of_a_killed_agent_expires(opened: Opened, tmp_path: Path) -> None:
    store, weights = ScriptedStore(), weights_of(SHAPES)
    head = wc.init(store, weights)
    put_heartbeat(Chain.open(store), Heartbeat("killed", head.position, time.time(), None, 0.0))
    store.age(88)  # it counts for two seconds more
    engine = Local(weights)
    transfer = opened(store, engine=engine, mirror=tmp_path / "own", dtype=None)
    begun(transfer, stream(weights))
    weights = changed(weights, 0.05, 1)
    assert sync(transfer, stream(weights)).live
    assert engine.served == "1"
    must_be_live(engine, store, 1)


def test_joining_engine_is_waited_for_longer_than_patience(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    transfer = opened(store, dtype=None, patience=0.1, joining=30.0)
    late: list[Following] = []
    timer = threading.Timer(0.6, lambda: late.append(Following(store, Local(weights), tmp_path / "mirror")))
    timer.start()
    try:
        assert begun(transfer, stream(weights)).last.live
    finally:
        timer.join()
        late[0].stop()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "waiting for version 0 to be live: no engine follows the channel"


def test_leaving_agent_deletes_its_heartbeat(tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    followers = Followers(Chain.open(store))
    with Agent(store, Local(weights), tmp_path / "mirror", replica="engine-0") as agent:
        assert followers.now() == []
        publish(store, changed(weights, 0.05, 1))
        next(agent.follow(every=0.01))
        assert [beat.replica for beat in followers.now()] == ["engine-0"]
    assert followers.now() == []
    assert list(store.list("replicas/")) == []


def test_engine_pinned_at_a_version_is_not_waited_for(tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    publish(store, changed(weights, 0.05, 1))
    other = Local(changed(weights, 0.5, 9))
    with Agent(store, other, tmp_path / "mirror", policy=wc.Pinned(0), replica="engine-0") as agent:
        next(agent.follow(every=0.01))
        assert len(heartbeats(Chain.open(store))) == 1
        assert Followers(Chain.open(store)).now() == []


@pytest.mark.parametrize("attended", [True, False])
def test_sync_without_patience_does_not_wait_and_loses_nothing(
    attended: bool, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store, tensors = Attended() if attended else Bucket(), model()
    transfer = begun(opened(store, patience=0), tensors)
    for number in range(1, 6):
        step(tensors, number)
        done = sync(transfer, tensors)
        assert not done.live
        assert done.version <= number
    transfer.destroy()
    holds(store, tensors)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_patience_may_be_endless(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store, patience=float("inf")), tensors)
    step(tensors, 1)
    assert sync(transfer, tensors).live
