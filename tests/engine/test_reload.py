"""Engines that load a folder: whatever happens in between, they serve whole versions, and none is live too early."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from channels import LiveChannel, blank
from fake_clock import FakeClock
from sglang_server import Died, Refused, SGLang, bits_of, serving
from waiting import until

import weightcast as wc
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.keys import Position
from weightcast.channel.records import Heartbeat
from weightcast.engine.endpoint import Endpoint, Watch
from weightcast.engine.reload.agent import ReloadAgent
from weightcast.engine.reload.sglang import SGLangEngine
from weightcast.errors import BusyError, EngineError, EngineGoneError, WeightcastError
from weightcast.events.metrics import Metrics
from weightcast.follow.mirror_folder import MirrorFolder

UPDATE = "/update_weights_from_disk"


@pytest.fixture
def channel(tmp_path: Path) -> LiveChannel:
    return LiveChannel(tmp_path)


@pytest.fixture
def server(channel: LiveChannel) -> Iterator[SGLang]:
    with serving(blank(channel.model)) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def agent_of(channel: LiveChannel, server: SGLang, folder: Path, **options: Any) -> ReloadAgent:
    return ReloadAgent(str(channel.url), SGLangEngine(server.url), folder, **options)


@pytest.fixture
def agent(channel: LiveChannel, server: SGLang, folder: Path) -> Iterator[ReloadAgent]:
    with agent_of(channel, server, folder, replica="host") as made:
        yield made


def must_serve(server: SGLang, channel: LiveChannel, agent: ReloadAgent, version: int) -> None:
    assert server.weights == bits_of(channel.states[version])
    assert server.version == str(version)
    assert agent.position == channel.position(version)


def beat(channel: LiveChannel) -> Heartbeat:
    ((found, _),) = heartbeats(channel.chain)
    return found


def rounds_of(agent: ReloadAgent, count: int) -> list[WeightcastError]:
    """Let an agent follow for so many rounds; its errors."""
    errors: list[WeightcastError] = []
    for done, _ in enumerate(agent.rounds(0.01, errors.append), 1):
        if done == count:
            break
    return errors


# -- versions ----------------------------------------------------------------------------------------------------------


def test_each_version_is_one_request_with_the_folder_and_its_name(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent, folder: Path
) -> None:
    for version in range(3):
        update = agent.step()
        assert update is not None
        assert (update.position, update.tensors) == (channel.position(version), 3)
        must_serve(server, channel, agent, version)
        assert agent.step() is None
        channel.publish()
    assert server.calls[0] == (
        UPDATE,
        {"model_path": str(folder), "load_format": "safetensors", "weight_version": "0", "flush_cache": True},
    )
    assert server.paths == [UPDATE] * 3


@pytest.mark.parametrize(("policy", "loaded"), [(wc.Newest(), 2), (wc.Every(), 4)])
def test_versions_that_came_meanwhile_are_skipped_unless_all_are_asked_for(
    channel: LiveChannel, server: SGLang, folder: Path, policy: wc.Policy, loaded: int
) -> None:
    with agent_of(channel, server, folder, policy=policy) as agent:
        agent.step()
        for _ in range(3):
            channel.publish()
        while agent.step() is not None:
            pass
        must_serve(server, channel, agent, 3)
    assert len(server.loads) == loaded


def test_no_version_is_skipped_while_loads_fail(channel: LiveChannel, server: SGLang, folder: Path) -> None:
    with agent_of(channel, server, folder, policy=wc.Every()) as agent:
        agent.step()
        server.halfway = failing
        for _ in range(2):
            channel.publish()
            with pytest.raises(EngineError):
                agent.step()
        server.halfway = lambda folder: None
        for version in (1, 2):
            agent.step()
            must_serve(server, channel, agent, version)


def test_engine_goes_back_to_an_older_version(channel: LiveChannel, server: SGLang, folder: Path) -> None:
    channel.publish()
    for version in (1, 0, 1):
        with agent_of(channel, server, folder, policy=wc.Pinned(version)) as agent:
            agent.step()
            must_serve(server, channel, agent, version)


# -- who is at which version -------------------------------------------------------------------------------------------


def test_engine_that_restarts_gets_the_version_again(channel: LiveChannel, server: SGLang, agent: ReloadAgent) -> None:
    agent.step()
    server.restart(blank(channel.model))
    assert agent.step() is not None
    must_serve(server, channel, agent, 0)


def test_agent_that_restarts_finds_the_engine_there(channel: LiveChannel, server: SGLang, folder: Path) -> None:
    for _ in range(2):
        with agent_of(channel, server, folder) as agent:
            agent.step()
            must_serve(server, channel, agent, 0)
    assert len(server.loads) == 1


def test_name_of_a_version_is_not_believed_of_an_engine_that_the_mirror_does_not_know(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent
) -> None:
    server.version = "0"
    assert agent.step() is not None
    must_serve(server, channel, agent, 0)


def test_engine_that_names_another_version_than_it_loaded_is_not_live(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent
) -> None:
    server.answers["/model_info"] = 200, b'{"weight_version": "default"}'
    with pytest.raises(EngineError, match="loaded version 0 and names 'default'"):
        agent.step()
    assert agent.position is None
    server.answers.clear()
    agent.step()
    must_serve(server, channel, agent, 0)


def test_engine_that_restarts_during_an_outage_of_the_bucket_gets_what_the_mirror_has(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent, tmp_path: Path
) -> None:
    agent.step()
    server.restart(blank(channel.model))
    channel.url.rename(tmp_path / "away")
    with suppress(WeightcastError):  # the first poll need not notice it
        agent.step()
    (tmp_path / "away").rename(channel.url)
    must_serve(server, channel, agent, 0)


# -- loads that fail ---------------------------------------------------------------------------------------------------


def failing(folder: Path) -> None:
    raise Refused("size mismatch \x1b[2J for 'w'")


def test_failed_load_is_reported_and_tried_again(channel: LiveChannel, server: SGLang, agent: ReloadAgent) -> None:
    server.halfway = failing
    errors = rounds_of(agent, 2)
    assert [type(error) for error in errors] == [EngineError] * 2
    assert "could not load version 0: Failed to update weights: size mismatch" in str(errors[0])
    assert "\n" not in str(errors[0])
    assert agent.position is None
    assert server.version == "updating"  # SGLang itself leaves the name of the version before
    said = beat(channel)
    assert (said.pause, said.error is not None and "size mismatch \\x1b[2J" in said.error) == (None, True)
    server.halfway = lambda folder: None
    assert rounds_of(agent, 2) == []
    must_serve(server, channel, agent, 0)
    said = beat(channel)
    assert (said.position, said.error) == (channel.position(0), None)
    assert said.pause is not None


def test_heartbeats_name_the_live_version_alone(channel: LiveChannel, server: SGLang, agent: ReloadAgent) -> None:
    rounds_of(agent, 2)
    channel.publish()
    server.halfway = failing
    rounds_of(agent, 1)
    assert beat(channel).pause is None  # trainers do not wait for it: the mirror has the version, the engine has not


def test_mirror_follows_the_channel_while_the_engine_is_away(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent
) -> None:
    agent.step()
    server.stop()
    channel.publish()
    with pytest.raises(EngineGoneError):
        agent.step()
    assert agent.subscriber.position == channel.position(1)
    assert agent.position is None
    server.start()
    agent.step()
    must_serve(server, channel, agent, 1)


def test_attempts_are_rarer_the_longer_an_engine_is_away(channel: LiveChannel, folder: Path) -> None:
    clock, times = FakeClock(), []
    with ReloadAgent(str(channel.url), SGLangEngine("http://127.0.0.1:1"), folder, clock=clock) as agent:
        for _ in agent.rounds(1.0, lambda error: times.append(clock.time)):
            if len(times) == 12:
                break
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert waits[0] <= 2.4
    assert 24 <= waits[-1] <= 36


# -- loads without an end ----------------------------------------------------------------------------------------------


class Stall:
    """Halfway through a load the server waits until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, folder: Path) -> None:
        self.begun.set()
        assert self.released.wait(60)


def whole_versions(server: SGLang, channel: LiveChannel) -> list[int]:
    """Which version each load led to; fails for any other bits."""
    return [[bits_of(state) for state in channel.states].index(loaded) for loaded in server.loads]


def test_files_stay_as_they_are_until_a_load_without_an_answer_was_done_again(
    channel: LiveChannel, server: SGLang, folder: Path
) -> None:
    server.halfway = stall = Stall()
    with ReloadAgent(str(channel.url), SGLangEngine(server.url, patience=0.2), folder) as agent:
        with pytest.raises(EngineGoneError, match="no answer to /update_weights_from_disk came"):
            agent.step()
        channel.publish()
        with pytest.raises(EngineGoneError):
            agent.step()
        assert agent.subscriber.mirror.folded == channel.position(0)
        stall.released.set()
        until(lambda: len(server.loads) == 2)
        agent.step()
        must_serve(server, channel, agent, 1)
    assert whole_versions(server, channel) == [0, 0, 0, 1]


def test_engine_that_dies_in_a_load_gets_whole_weights_when_it_is_back(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent
) -> None:
    def die(folder: Path) -> None:
        server.halfway = lambda folder: None
        raise Died

    agent.step()
    channel.publish()
    server.halfway = die
    with pytest.raises(EngineGoneError, match="does not answer /update_weights_from_disk"):
        agent.step()
    assert agent.position is None
    server.restart(blank(channel.model))
    channel.publish()
    agent.step()
    must_serve(server, channel, agent, 2)
    assert whole_versions(server, channel) == [0, 1, 2]


def test_agent_killed_during_a_load_is_succeeded_by_one_that_loads_the_same_files_first(
    channel: LiveChannel, server: SGLang, folder: Path
) -> None:
    server.halfway = stall = Stall()
    command = [sys.executable, "-m", "weightcast", "attach", str(channel.url), "--sglang", server.url]
    with subprocess.Popen([*command, "--mirror", str(folder)], stdout=subprocess.DEVNULL) as child:
        assert stall.begun.wait(60)
        child.kill()
    channel.publish()
    with agent_of(channel, server, folder) as agent:
        threading.Timer(0.2, stall.released.set).start()
        agent.step()
        must_serve(server, channel, agent, 1)
    assert whole_versions(server, channel) == [0, 0, 1]


def test_files_cannot_change_during_a_load(
    channel: LiveChannel, server: SGLang, agent: ReloadAgent, folder: Path
) -> None:
    order: list[str] = []

    def change() -> None:
        with MirrorFolder(folder).exclusive(60):
            order.append("changed")

    changing = threading.Thread(target=change)

    def halfway(folder: Path) -> None:
        with pytest.raises(BusyError), MirrorFolder(folder).exclusive(0):
            pass
        changing.start()
        time.sleep(0.1)  # a lock that is not held would be had by now
        order.append("loaded")

    server.halfway = halfway
    agent.step()
    changing.join()
    assert order == ["loaded", "changed"]


def test_reader_that_keeps_the_files_delays_a_version_and_is_named(channel: LiveChannel, server: SGLang) -> None:
    folder = channel.url.parent / "mirror"
    with agent_of(channel, server, folder) as agent:
        agent.step()
        channel.publish()
        agent.subscriber.sync()
        with wc.reading(folder), pytest.raises(BusyError, match="a reader of the mirror's files"):
            agent.subscriber.mirror.fold(patience=0.05)
        agent.step()
        must_serve(server, channel, agent, 1)


def test_heartbeats_go_on_during_a_load(channel: LiveChannel, folder: Path) -> None:
    class Clock(FakeClock):
        def wait(self, stopped: threading.Event, seconds: float) -> None:
            time.sleep(0.001)
            super().wait(stopped, seconds)

    class Engine:
        url = "a test"

        def version(self) -> None:
            return None

        def load(self, folder: Path, position: Position, step: int | None) -> None:
            if position.version == 1:
                times = {beat(channel).time}
                until(lambda: times.add(beat(channel).time) or len(times) == 3)

    with ReloadAgent(str(channel.url), Engine(), folder, replica="host", clock=Clock()) as agent:
        rounds_of(agent, 2)
        channel.publish()
        agent.step()
        assert beat(channel).position == channel.position(0)  # live until the load has ended


def test_signal_in_a_load_ends_the_agent_at_once(channel: LiveChannel, server: SGLang, folder: Path) -> None:
    server.halfway = stall = Stall()
    command = [sys.executable, "-m", "weightcast", "attach", str(channel.url), "--sglang", server.url]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--mirror", str(folder)], stdout=pipe, stderr=pipe, text=True) as child:
        assert stall.begun.wait(60)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    stall.released.set()
    assert child.returncode == 0
    assert out.splitlines()[-1] == "stopped before any version came"
    assert f"{server.url} may still be loading the files of {folder}" in err
    assert "Traceback" not in err


# -- what an agent shows -----------------------------------------------------------------------------------------------


def test_endpoint_shows_the_agent_of_any_engine(channel: LiveChannel, server: SGLang, folder: Path) -> None:
    kept, told = Metrics(), []
    agent = agent_of(channel, server, folder, on_event=[kept, told.append])
    watch = Watch(agent, kept)
    with agent, closing(Endpoint(watch, "127.0.0.1", 0, None)) as endpoint:
        update = agent.step()
        assert update is not None
        watch.updated(update)
        with urlopen(f"http://127.0.0.1:{endpoint.port}/status") as answer:
            status = json.load(answer)
        with urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
            metrics = answer.read().decode()
    assert (status["engine"], status["version"], status["lag"]) == (server.url, 0, 0)
    assert (status["unproven"], status["last"]["tensors"]) == (None, 3)
    assert "weightcast_unproven_tensors NaN" in metrics
    assert 'weightcast_phase_seconds_count{phase="load",role="engine"} 1.0' in metrics
    assert {event.role: event.phase for event in told} == {"mirror": "fold", "engine": "load"}  # the last of each
    assert f"weightcast_written_elements_total {channel.model.table.elements:.1f}" in metrics


# -- the guide ---------------------------------------------------------------------------------------------------------


def test_engine_of_the_guide_runs(channel: LiveChannel, folder: Path) -> None:
    class Runtime:
        weights_name: str | None = None

        def load_safetensors(self, folder: Path, name: str) -> None:
            with wc.Checkpoint(folder) as found:
                assert bits_of(found) == bits_of(channel.states[int(name)])
            self.weights_name = name

    def show(version: int, load: float) -> None:
        raise InterruptedError(version)

    guide = (Path(__file__).parents[2] / "docs/guides/engines.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "ReloadAgent" in block)
    example = example.replace("s3://bucket/run-7", str(channel.url)).replace("/data/mirror", str(folder))
    with pytest.raises(InterruptedError, match="0"):  # else it would follow for ever
        exec(example, {"runtime": Runtime(), "print": show})
