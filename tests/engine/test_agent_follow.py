"""An agent that follows for days: outages, refused heartbeats, replicas of the same name, damaged versions."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from scripted_store import ScriptedStore

torch = pytest.importorskip("torch")

from local_engine import Local, Training, must_be  # noqa: E402

from weightcast.channel.heartbeats import heartbeat_of, put_heartbeat  # noqa: E402
from weightcast.channel.keys import REPLICAS  # noqa: E402
from weightcast.channel.records import Heartbeat  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.errors import AccessError, EngineGoneError, WeightcastError  # noqa: E402
from weightcast.store import open_store  # noqa: E402

DAY = 86_400.0


class Rounds(FakeClock):
    """Records every wait, and does something during one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.then: dict[int, Any] = {}

    def wait(self, stopped: threading.Event, seconds: float) -> None:
        super().wait(stopped, seconds)
        self.waits.append(seconds)
        if act := self.then.get(len(self.waits)):
            act()


def test_agent_survives_a_day_without_its_engine(training: Training, tmp_path: Path) -> None:
    engine, clock = Local(training.weights), Rounds()
    real = engine.ask

    def gone(request: object) -> Any:
        if clock.time < DAY:
            raise EngineGoneError("it does not answer", url=engine.url)
        return real(request)  # type: ignore[arg-type]

    engine.ask = gone  # type: ignore[method-assign]
    errors: list[WeightcastError] = []
    with Agent(training.url, engine, tmp_path / "mirror", clock=clock) as agent:
        training.step(1)
        assert next(agent.follow(0.01, errors.append)).position.version == 1
        assert len(errors) > 1024  # the power of two that no float holds
        assert max(clock.waits) <= 36
        assert all(later > 1.2 * sooner for sooner, later in pairwise(clock.waits[:8]))
        must_be(engine, agent, 1)


def test_heartbeat_reports_the_engines_version(training: Training, tmp_path: Path) -> None:
    with Agent(training.url, Local(training.weights), tmp_path / "mirror", replica="gpu-1") as agent:
        training.step(1)
        assert next(agent.follow(every=0.01)).position.version == 1
        found = heartbeat_of(agent.subscriber.chain, "gpu-1")
        assert found is not None
        assert found.position.version == 1


def test_refused_heartbeat_is_sent_again(training: Training, tmp_path: Path) -> None:
    clock, store = Rounds(), ScriptedStore(open_store(training.url))
    refused = store.fail("put", REPLICAS, AccessError)
    with Agent(store, Local(training.weights), tmp_path / "mirror", replica="gpu-1", clock=clock) as agent:
        clock.then = {100: refused.end, 800: agent.stop}
        assert not list(agent.follow(10.0, print))
        found = heartbeat_of(agent.subscriber.chain, "gpu-1")
        assert found is not None
        assert found.position.version == 0
        assert int(found.instance, 16)
        assert clock.time < DAY


def test_leaving_agent_deletes_only_its_own_heartbeat(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    training.step(1)
    with Agent(training.url, engine, tmp_path / "mirror", replica="gpu-1") as agent:
        next(agent.follow(0.01))
        chain = agent.subscriber.chain
        own = heartbeat_of(chain, "gpu-1")
        assert own is not None
        assert own.position.version == 1
    assert heartbeat_of(chain, "gpu-1") is None
    training.step(2)
    with Agent(training.url, engine, tmp_path / "mirror", replica="gpu-1") as agent:
        next(agent.follow(0.01))
        again = heartbeat_of(chain, "gpu-1")
        assert again is not None
        assert again.instance != own.instance
        successor = Heartbeat("gpu-1", again.position, again.time, None, 0.0, "f" * 32)
        put_heartbeat(chain, successor)
    assert heartbeat_of(chain, "gpu-1") == successor


def test_damaged_head_is_reported_and_the_newest_whole_version_is_live(
    training: Training,
    tmp_path: Path,
) -> None:
    engine, clock = Local(training.weights), Rounds()
    with Agent(training.url, engine, tmp_path / "mirror", replica="gpu-1", clock=clock) as agent:
        agent.step()
        for version in (1, 2, 3):
            training.step(version)
        (delta,) = Path(training.url).glob("deltas/*000000000003-*")
        good = delta.read_bytes()
        delta.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        errors: list[WeightcastError] = []
        updates = agent.follow(1.0, errors.append)
        assert next(updates).position.version == 2
        must_be(engine, agent, 2)
        assert agent.trouble is errors[-1]
        assert "version 3 cannot be reached" in str(errors[-1])
        found = heartbeat_of(agent.subscriber.chain, "gpu-1")
        assert found is not None
        assert found.position.version == 2
        assert "version 3 cannot be reached" in (found.error or "")
        clock.then = {12: lambda: delta.write_bytes(good)}
        assert next(updates).position.version == 3
        assert max(clock.waits) > 20  # it does not spin meanwhile
        assert agent.trouble is None
        must_be(engine, agent, 3)
