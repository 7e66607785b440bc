"""`attach --sglang` and `attach --command`, with a server that has SGLang's routes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import create_server
from typing import IO, Any

import pytest
from channels import LiveChannel, blank
from cli_world import RECORD, USAGE, facts, run
from commands import COMMAND, Done
from sglang_server import Refused, SGLang, bits_of, serving

from weightcast.channel.heartbeats import heartbeats

ENGINE = 12


@pytest.fixture
def channel(tmp_path: Path) -> LiveChannel:
    return LiveChannel(tmp_path)


@pytest.fixture
def server(channel: LiveChannel) -> Iterator[SGLang]:
    with serving(blank(channel.model)) as started:
        yield started


def attach(channel: LiveChannel, *more: str | Path) -> Done:
    return run("attach", channel.url, "--mirror", channel.url.parent / "mirror", *more)


@contextmanager
def attached(channel: LiveChannel, *more: str | Path) -> Iterator[subprocess.Popen[str]]:
    """An agent as a process; its lines are to be read one by one."""
    command = [*COMMAND, "attach", channel.url, "--mirror", channel.url.parent / "mirror", "--every", "0.05", *more]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def event(stream: IO[str] | None) -> dict[str, Any]:
    assert stream is not None
    found: dict[str, Any] = json.loads(stream.readline())
    return found


# -- once --------------------------------------------------------------------------------------------------------------


def test_sglang_is_brought_to_the_newest_version_once(channel: LiveChannel, server: SGLang) -> None:
    channel.publish()
    done = attach(channel, "--sglang", server.url, "--once")
    assert re.fullmatch(r"\d\d:\d\d:\d\d  version 1 .* fetched  loaded in .* s\n", done.out)
    assert (server.version, server.weights) == ("1", bits_of(channel.states[1]))
    assert attach(channel, "--sglang", server.url, "--once").out == "the engine is at version 1 already\n"
    assert len(server.loads) == 1


def test_sglang_is_held_at_the_version_that_a_tag_names(channel: LiveChannel, server: SGLang) -> None:
    channel.publish()
    facts("tag", channel.url, 0, "best")
    told = attach(channel, "--sglang", server.url, "--once", "--version", "best", "--json").facts
    assert (told["event"], told["version"], told["tensors"]) == ("version", 0, 3)
    assert server.weights == bits_of(channel.states[0])


def test_command_is_told_the_version_once(channel: LiveChannel, tmp_path: Path) -> None:
    command = RECORD.format(log=tmp_path / "log")
    for event in ("version", "there"):
        told = attach(channel, "--command", command, "--once", "--json").facts
        assert (told["event"], told["version"]) == (event, 0)
    at = channel.position(0)
    assert (tmp_path / "log").read_text() == f"0 {tmp_path / 'mirror'} {at.digest}\n"


def test_load_that_fails_has_the_exit_code_of_engines(channel: LiveChannel, server: SGLang) -> None:
    def fail(folder: Path) -> None:
        raise Refused("no room \x1b[2J")

    server.halfway = fail
    failed = attach(channel, "--sglang", server.url, "--once")
    assert failed.code == ENGINE
    assert "could not load version 0: Failed to update weights: no room" in failed.complaint
    assert "\x1b" not in failed.err
    failed = attach(channel, "--command", "exit 3", "--once")
    assert failed.code == ENGINE
    assert "the command ended with exit code 3" in failed.complaint


def test_key_is_read_from_a_file(channel: LiveChannel, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    with serving(blank(channel.model), key="secret") as server:
        assert attach(channel, "--sglang", server.url, "--once").code == ENGINE
        assert attach(channel, "--sglang", server.url, "--once", "--api-key-file", tmp_path / "key").code == 0


def test_prefixes_are_kept_if_that_is_asked_for(channel: LiveChannel, server: SGLang) -> None:
    assert attach(channel, "--sglang", server.url, "--once", "--keep-cache").code == 0
    assert server.calls[0][1]["flush_cache"] is False


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--sglang", "http://a", "--command", "b"),
        ("--engine", "http://a", "--command", "b"),
        ("--engine", "http://a", "--sglang", "http://b"),
        ("--engine", "http://a", "--api-key-file", "/b"),
        ("--command", "a", "--prove"),
        ("--command", "a", "--keep-cache"),
        ("--command", "a", "--api-key-file", "/b"),
        ("--sglang", "localhost:30000"),
        ("--sglang", "http://a", "--api-key-file", "/nowhere"),
        ("--sglang", "http://a", "--version", "0", "--every-version"),
        ("--sglang", "http://a", "--listen", "here"),
    ],
)
def test_options_that_do_not_go_together_are_refused(channel: LiveChannel, options: tuple[str, ...]) -> None:
    done = attach(channel, *options)
    assert (done.code, done.out) == (USAGE, "")
    assert not (channel.url.parent / "mirror" / "model.safetensors").exists()


def test_events_of_mirror_and_engine_are_lines_in_a_file(channel: LiveChannel, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert attach(channel, "--command", "true", "--once", "--events", file).code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["role"], line["phase"]) for line in lines[-2:]] == [("mirror", "fold"), ("engine", "load")]
    assert {line["version"] for line in lines} == {0}


def test_endpoint_without_its_library_is_refused_in_one_line(
    channel: LiveChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "weightcast.engine.endpoint", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = attach(channel, "--command", "true", "--listen", "0")
    assert done.code == USAGE
    assert "--listen needs prometheus_client, which is not installed" in done.complaint


# -- continuously ------------------------------------------------------------------------------------------------------


def test_versions_an_outage_and_a_restart_are_events(channel: LiveChannel, server: SGLang) -> None:
    with attached(channel, "--sglang", server.url, "--replica", "rack-7", "--json") as child:
        begun = event(child.stdout)
        assert (begun["event"], begun["engine"], begun["replica"]) == ("begin", server.url, "rack-7")
        assert event(child.stdout)["version"] == 0
        channel.publish()
        assert event(child.stdout)["version"] == 1
        server.stop()
        warning = event(child.stdout)
        assert (warning["event"], warning["kind"]) == ("warning", "EngineGoneError")
        server.weights, server.version = bits_of(blank(channel.model)), "default"
        server.start()
        assert [event(child.stdout)["event"] for _ in range(2)] == ["recovered", "version"]
        assert server.weights == bits_of(channel.states[1])
        ((beat, _),) = heartbeats(channel.chain)
        assert (beat.replica, beat.position) == ("rack-7", channel.position(1))
        child.send_signal(signal.SIGINT)
        assert event(child.stdout) == {"event": "end", "version": 1}
        assert child.wait(60) == 0
    assert list(heartbeats(channel.chain)) == []  # trainers do not wait for an agent that has ended


def test_failing_command_is_warned_of_once_and_runs_until_it_succeeds(channel: LiveChannel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"echo $WEIGHTCAST_VERSION >> {log}; echo noise; test $(wc -l < {log}) -ge 3"
    with attached(channel, "--command", command, "--json") as child:
        events = [event(child.stdout) for _ in range(4)]
        assert [one["event"] for one in events] == ["begin", "warning", "recovered", "version"]
        assert "exit code 1" in events[1]["text"]
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert json.loads(out)["event"] == "end"
    assert err.count("noise") == 3
    assert log.read_text().split() == ["0"] * 3


def test_interrupt_ends_the_command_and_is_no_success(channel: LiveChannel, tmp_path: Path) -> None:
    mark, log = tmp_path / "mark", tmp_path / "log"
    os.mkfifo(mark)
    # The subshell has no trap any more when it writes: no signal is lost between a fork and an exec of the shell's.
    command = f"trap 'echo ended >> {log}; exit 0' TERM; (echo > {mark}; exec sleep 60) & wait"
    with attached(channel, "--command", command, "--json") as child:
        mark.read_text()  # comes back once the command runs
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["begin", "end"]
    assert json.loads(out.splitlines()[-1])["version"] is None
    assert "Traceback" not in err
    assert log.read_text() == "ended\n"
    assert attach(channel, "--command", "true", "--once", "--json").facts["event"] == "version"


def test_status_is_served(channel: LiveChannel, server: SGLang) -> None:
    with closing(create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with attached(channel, "--sglang", server.url, "--listen", str(port), "--json") as child:
        assert [event(child.stdout)["event"] for _ in range(2)] == ["begin", "version"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/wait?version=0&seconds=30") as answer:
            status = json.load(answer)
    assert (status["engine"], status["version"], status["unproven"]) == (server.url, 0, None)
