"""`attach`, with an engine in this process instead of a vLLM server."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import USAGE, facts, run
from commands import Done

torch = pytest.importorskip("torch")

from local_engine import Local, Training, other_weights  # noqa: E402

from weightcast.engine.address import RUNTIME  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.control_server import serving_control  # noqa: E402
from weightcast.errors import EngineGoneError  # noqa: E402


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A channel with three versions."""
    begun = Training(tmp_path)
    begun.step(1)
    begun.step(2)
    yield begun
    begun.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Local:
    """What `--engine URL` reaches, whatever the URL."""
    made = Local(other_weights())
    monkeypatch.setattr("weightcast.cli.attach.engine_named", lambda *named: made)
    return made


def attach(training: Training, tmp_path: Path, *more: str) -> Done:
    return run("attach", training.url, "--engine", "http://engine", "--mirror", tmp_path / "mirror", *more)


def test_engine_is_held_at_the_version_that_a_tag_names(training: Training, engine: Local, tmp_path: Path) -> None:
    facts("tag", training.url, 1, "best")
    done = attach(training, tmp_path, "--version", "best", "--once", "--json")
    assert (done.facts["event"], done.facts["version"]) == ("version", 1)
    assert engine.served == "1"
    there = attach(training, tmp_path, "--version", "best", "--once")
    assert there.out == "the engine is at version 1 already\n"


def test_versions_come_from_a_near_copy(training: Training, engine: Local, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    assert run("copy", training.url, copy).code == 0
    for objects in ("deltas", "anchors"):
        shutil.rmtree(Path(training.url) / objects)
    assert attach(training, tmp_path, "--once").code != 0
    assert engine.served == "default"
    assert attach(training, tmp_path, "--once", "--near", copy).code == 0
    assert engine.served == "2"


def test_events_of_agent_engine_and_mirror_are_lines_in_a_file(
    training: Training, engine: Local, tmp_path: Path
) -> None:
    file = tmp_path / "events.jsonl"
    assert attach(training, tmp_path, "--once", "--events", str(file)).code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["role"] for line in lines} == {"agent", "engine", "mirror"}
    assert {line["version"] for line in lines} == {2}
    paused = [line["phase"] for line in lines if line["role"] == "engine"]
    assert (paused[0], paused[-1]) == ("pause", "resume")


def test_engine_is_updated_from_a_near_copy_and_from_the_home_without_it(
    training: Training, engine: Local, tmp_path: Path
) -> None:
    copy, home = tmp_path / "copy", Path(training.url)
    assert run("copy", home, copy).code == 0
    (home / "deltas").rename(tmp_path / "deltas")
    assert attach(training, tmp_path, "--version", "1", "--once", "--near", str(copy)).code == 0
    assert engine.served == "1"
    (tmp_path / "deltas").rename(home / "deltas")
    copy.rename(tmp_path / "away")
    assert attach(training, tmp_path, "--once", "--near", str(copy)).code == 0
    assert engine.served == "2"


def test_tag_that_is_not_there_is_refused_before_the_engine_is_asked(
    training: Training, engine: Local, tmp_path: Path
) -> None:
    refused = attach(training, tmp_path, "--version", "worst", "--once")
    assert refused.code == USAGE
    assert "there is no tag" in refused.complaint
    assert engine.calls == []


@pytest.mark.parametrize("verb", ["attach", "verify"])
def test_engine_without_a_scheme_is_refused_instead_of_waited_for(training: Training, verb: str) -> None:
    done = run(verb, training.url, "--engine", "localhost:8000")
    assert done.code == USAGE
    assert "Write http://127.0.0.1:PORT" in done.complaint


def test_one_version_and_every_version_exclude_each_other(training: Training, engine: Local, tmp_path: Path) -> None:
    assert attach(training, tmp_path, "--version", "1", "--every-version").code == USAGE


def test_engine_at_a_version_is_followed_without_a_mirror(
    training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Local(training.weights, ranks=1)
    monkeypatch.setattr("weightcast.cli.attach.engine_named", lambda *named: engine)
    monkeypatch.chdir(tmp_path)
    assert run("attach", training.url, "--mirror", "none", "--once").out == "the engine is at version 2 already\n"
    training.step(3)
    done = run("attach", training.url, "--mirror", "none", "--once", "--json")
    assert (done.facts["event"], done.facts["version"], engine.served) == ("version", 3, "3")
    assert not (tmp_path / "none").exists()
    refused = run("attach", training.url, "--mirror", "none", "--command", "true")
    assert (refused.code, "loads the mirror" in refused.complaint) == (USAGE, True)


def test_engine_at_no_version_is_refused_without_a_mirror(training: Training, engine: Local) -> None:
    refused = run("attach", training.url, "--mirror", "none", "--once")
    assert refused.code == 12
    assert "the engine holds no version of the channel" in refused.complaint
    assert engine.served == "default"


@pytest.fixture
def outage(engine: Local, stopped_when_idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not answer the first two requests."""
    real, asked = engine.ask, [0]

    def ask(request: Any) -> Any:
        asked[0] += 1
        if asked[0] <= 2:
            raise EngineGoneError("it does not answer", url=engine.url)
        return real(request)

    monkeypatch.setattr(engine, "ask", ask)


@pytest.fixture
def stopped_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is stopped after the first round that has nothing to do."""
    step: Callable[[Agent], Any] = Agent.step

    def stepping(agent: Agent) -> Any:
        update = step(agent)
        if update is None:
            threading.Timer(0, agent.stop).start()
        return update

    monkeypatch.setattr(Agent, "step", stepping)


@pytest.mark.usefixtures("stopped_when_idle")
def test_engine_that_is_at_the_head_already_is_said_to_be(training: Training, engine: Local, tmp_path: Path) -> None:
    assert attach(training, tmp_path, "--once").code == 0
    begun, there, end = attach(training, tmp_path).out.splitlines()
    assert " following " in begun
    assert there.endswith("version 2      is live already")
    assert end == "stopped at version 2"
    events = [json.loads(line) for line in attach(training, tmp_path, "--json").out.splitlines()]
    assert [(one["event"], one.get("version")) for one in events] == [("begin", None), ("there", 2), ("end", 2)]


@pytest.mark.usefixtures("outage")
def test_begin_outage_and_its_end_are_events(training: Training, tmp_path: Path) -> None:
    done = attach(training, tmp_path, "--every", "0.01", "--replica", "rack-7", "--json")
    begun, warning, recovered, version, end = map(json.loads, done.out.splitlines())
    assert (begun["event"], begun["channel"], begun["replica"]) == ("begin", training.url, "rack-7")
    assert (begun["engine"], begun["mirror"]) == ("a test", str(tmp_path / "mirror"))
    assert (warning["event"], warning["kind"]) == ("warning", "EngineGoneError")
    assert recovered["event"] == "recovered"
    assert (version["event"], version["version"]) == ("version", 2)
    assert end == {"event": "end", "version": 2}


@pytest.mark.usefixtures("outage")
def test_begin_and_end_of_an_outage_are_lines_for_people(training: Training, tmp_path: Path) -> None:
    done = attach(training, tmp_path, "--every", "0.01", "--replica", "rack-7")
    begun, recovered, version, end = done.out.splitlines()
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  following {training.url} for a test, .* as rack-7", begun)
    assert "back to normal after " in recovered
    assert "version 2 " in version
    assert end == "stopped at version 2"
    assert done.err.count("it does not answer") == 1


def test_engine_of_this_host_need_not_be_named_unless_there_are_several(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME, str(tmp_path / "run"))
    done = run("attach", training.url, "--mirror", str(tmp_path / "mirror"), "--once")
    assert done.code == USAGE
    assert "no engine of this host can be controlled" in done.complaint
    assert "--middleware weightcast_vllm.Middleware" in done.complaint
    local = Local(training.weights)
    with serving_control(local.control, tmp_path / "run", 8000):
        done = run("attach", training.url, "--mirror", str(tmp_path / "mirror"), "--once")
        assert done.code == 0, done
        assert local.served == "2"
        with serving_control(local.control, tmp_path / "run", 8001):
            done = run("attach", training.url, "--mirror", str(tmp_path / "mirror"), "--once")
            assert done.code == USAGE
            assert "http://127.0.0.1:8000, http://127.0.0.1:8001" in done.complaint


def test_engine_elsewhere_needs_its_token_and_tls(training: Training, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of some length\n")
    plain = run("attach", training.url, "--engine", "http://gpu-7:9000", "--engine-token", str(token))
    assert (plain.code, "clear text" in plain.complaint) == (USAGE, True)
    without = run("attach", training.url, "--engine", "https://gpu-7:9000")
    assert (without.code, "--engine-token" in without.complaint) == (USAGE, True)
    token.write_text("short")
    short = run("attach", training.url, "--engine", "https://gpu-7:9000", "--engine-token", str(token))
    assert (short.code, "too short" in short.complaint) == (USAGE, True)
