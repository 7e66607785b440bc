"""`attach`, with an engine in this process instead of a vLLM server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import USAGE, facts, run
from commands import Done

torch = pytest.importorskip("torch")

from local_engine import Local, Training, other_weights  # noqa: E402

from weightcast.engine.agent import Agent  # noqa: E402
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
    monkeypatch.setattr("weightcast.cli.attach.HttpEngine", lambda url: made)
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
    assert "Write http://host:port." in done.complaint


def test_one_version_and_every_version_exclude_each_other(training: Training, engine: Local, tmp_path: Path) -> None:
    assert attach(training, tmp_path, "--version", "1", "--every-version").code == USAGE


@pytest.fixture
def outage(engine: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not answer the first two requests; after two more rounds the agent is stopped."""
    real, asked = engine.ask, [0]

    def ask(request: Any) -> Any:
        asked[0] += 1
        if asked[0] <= 2:
            raise EngineGoneError("it does not answer", url=engine.url)
        return real(request)

    monkeypatch.setattr(engine, "ask", ask)
    step: Callable[[Agent], Any] = Agent.step

    def stepping(agent: Agent) -> Any:
        update = step(agent)
        if update is None:
            threading.Timer(0, agent.stop).start()
        return update

    monkeypatch.setattr(Agent, "step", stepping)


@pytest.mark.usefixtures("outage")
def test_begin_outage_and_its_end_are_events(training: Training, tmp_path: Path) -> None:
    done = attach(training, tmp_path, "--every", "0.01", "--replica", "rack-7", "--json")
    begun, warning, recovered, version, end = map(json.loads, done.out.splitlines())
    assert (begun["event"], begun["channel"], begun["replica"]) == ("begin", training.url, "rack-7")
    assert (begun["engine"], begun["mirror"]) == ("http://engine", str(tmp_path / "mirror"))
    assert (warning["event"], warning["kind"]) == ("warning", "EngineGoneError")
    assert recovered["event"] == "recovered"
    assert (version["event"], version["version"]) == ("version", 2)
    assert end == {"event": "end", "version": 2}


@pytest.mark.usefixtures("outage")
def test_begin_and_end_of_an_outage_are_lines_for_people(training: Training, tmp_path: Path) -> None:
    done = attach(training, tmp_path, "--every", "0.01", "--replica", "rack-7")
    begun, recovered, version, end = done.out.splitlines()
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  following {training.url} for http://engine, .* as rack-7", begun)
    assert "back to normal after " in recovered
    assert "version 2 " in version
    assert end == "stopped at version 2"
    assert done.err.count("it does not answer") == 1
