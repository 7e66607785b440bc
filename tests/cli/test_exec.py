"""`pull --exec`: at least once for every version, across kills and failures, and a JSON stream that stays one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from cases import same_bits
from channels import LiveChannel
from fake_clock import FakeClock
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.keys import Position
from weightcast.cli import app
from weightcast.cli.command import Arrival, Command
from weightcast.follow.command_record import Ran, read_ran, write_ran
from weightcast.follow.mirror_reader import reading
from weightcast.store import open_store

PROGRAM = [sys.executable, "-m", "weightcast"]
SHORT = 13


@pytest.fixture
def channel(tmp_path: Path) -> LiveChannel:
    return LiveChannel(tmp_path)


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    """A verb in this process: its exit code, and what it tells a program."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


@contextmanager
def following(channel: LiveChannel, folder: Path, command: str) -> Iterator[subprocess.Popen[str]]:
    """`pull --follow --exec` as a process; its events are lines of JSON."""
    arguments = [*PROGRAM, "pull", str(channel.url), str(folder), "--follow", "--every", "0.05", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*arguments, "--exec", command], text=True, **pipes) as child:  # type: ignore[call-overload]
        try:
            assert event(child.stdout)["event"] == "begin"
            yield child
        finally:
            child.kill()


def event(stream: IO[str] | None) -> dict[str, Any]:
    assert stream is not None
    found: dict[str, Any] = json.loads(stream.readline())
    return found


# -- once --------------------------------------------------------------------------------------------------------------


def test_command_that_failed_is_run_by_the_next_pull(channel: LiveChannel, tmp_path: Path) -> None:
    folder, log = tmp_path / "replica", tmp_path / "log"
    command = f"echo $WEIGHTCAST_VERSION >> {log}; test -e {tmp_path}/ready"
    for code in (1, 1, 0, 0):
        if code == 0:
            (tmp_path / "ready").touch()
        assert run("pull", channel.url, folder, "--exec", command)[0] == code
    assert log.read_text().split() == ["0", "0", "0"]
    ran = read_ran(folder)
    assert ran is not None
    assert ran.position == channel.position(0)


def test_another_command_is_run(channel: LiveChannel, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run("pull", channel.url, tmp_path / "replica", "--exec", f"touch {tmp_path}/{name}")
        assert (tmp_path / name).exists()


def test_command_runs_for_an_earlier_version_too(channel: LiveChannel, tmp_path: Path) -> None:
    channel.publish()
    command = f"echo $WEIGHTCAST_VERSION >> {tmp_path}/log"
    for version in (1, 0, 1):
        run("pull", channel.url, tmp_path / "replica", "--version", version, "--exec", command)
    assert (tmp_path / "log").read_text().split() == ["1", "0", "1"]


def test_files_cannot_change_while_a_command_runs(channel: LiveChannel, tmp_path: Path) -> None:
    """The lock is shared: writers wait, readers do not."""
    folder = tmp_path / "replica"
    lock = "$WEIGHTCAST_FOLDER/.weightcast/lock"
    command = f"flock -xn {lock} true && exit 9; flock -sn {lock} true"
    assert run("pull", channel.url, folder, "--exec", command)[0] == 0


def test_damaged_head_has_an_exit_code_of_its_own(channel: LiveChannel, tmp_path: Path) -> None:
    channel.publish()
    channel.publish()
    path = channel.url / channel.chain.manifest(2).objects[0].key
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    folder = tmp_path / "replica"
    for new in (True, False):
        code, told = run("pull", channel.url, folder)
        assert (code, told["version"], told["new"]) == (SHORT, 1, new)
        assert "version 2 cannot be reached" in told["short"]["text"]
    text = CliRunner().invoke(app, ["pull", str(channel.url), str(folder)])
    assert text.exit_code == SHORT
    assert "this is version 1, not the newest: version 2 cannot be reached" in text.stderr
    with reading(folder) as files:
        assert same_bits(files, channel.states[1])
    assert run("pull", channel.url, folder, "--version", 2)[0] == 9
    path.write_bytes(good)
    code, told = run("pull", channel.url, folder)
    assert (code, told["version"], told["short"]) == (0, 2, None)


# -- for ever ----------------------------------------------------------------------------------------------------------


def test_follower_killed_while_its_command_runs_runs_it_again(channel: LiveChannel, tmp_path: Path) -> None:
    folder, log, mark = tmp_path / "replica", tmp_path / "log", tmp_path / "mark"
    os.mkfifo(mark)
    command = f"echo $WEIGHTCAST_VERSION >> {log}; echo > {mark}; test -e {tmp_path}/ready || sleep 5"
    with following(channel, folder, command) as child:
        mark.read_text()  # comes back once the command runs
        child.kill()
        child.wait()
    assert read_ran(folder) is None
    (tmp_path / "ready").touch()
    threading.Thread(target=mark.read_text, daemon=True).start()
    with following(channel, folder, command) as child:
        assert event(child.stdout) == {"event": "command", "version": 0, "exit_code": 0}
        child.send_signal(signal.SIGTERM)
        assert event(child.stdout) == {"event": "end", "version": 0}
    assert log.read_text().split() == ["0", "0"]


def test_failing_command_is_tried_again_until_it_succeeds(channel: LiveChannel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"echo $WEIGHTCAST_VERSION >> {log}; test $(wc -l < {log}) -ge 2"
    with following(channel, tmp_path / "replica", command) as child:
        assert event(child.stdout)["event"] == "version"
        assert event(child.stdout) == {"event": "command", "version": 0, "exit_code": 1}
        ((beat, _),) = heartbeats(channel.chain)
        assert beat.ran is None
        assert event(child.stdout) == {"event": "command", "version": 0, "exit_code": 0}
        child.send_signal(signal.SIGTERM)
        assert event(child.stdout)["event"] == "end"
    ((beat, _),) = heartbeats(channel.chain)
    assert (beat.ran, beat.error) == (0, None)
    rows = run("status", channel.url)[1]["replicas"]
    assert [row["ran"] for row in rows] == [0]
    assert "at 0" in CliRunner().invoke(app, ["status", str(channel.url)]).stdout


def test_signal_right_after_the_command_does_not_lose_its_result(
    channel: LiveChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fields: dict[str, Any]) -> None:
        if fields["event"] == "command":
            raise KeyboardInterrupt

    monkeypatch.setattr("weightcast.cli.command.tell", interrupted)
    folder = str(tmp_path / "replica")
    arguments = ["pull", str(channel.url), folder, "--follow", "--exec", "true", "--json"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    ((beat, _),) = heartbeats(channel.chain)
    assert (beat.ran, beat.error) == (0, None)


def test_output_of_a_command_stays_out_of_the_json_stream(channel: LiveChannel, tmp_path: Path) -> None:
    """Whole lines, half lines, and whatever other files of ours a child might find open."""
    others = 'for fd in 3 4 5 6 7 8 9; do eval "echo stray >&$fd" 2>/dev/null; done'
    command = f"echo line; printf half; echo complaint >&2; {others}; (sleep 0.05; echo late) & true"
    with following(channel, tmp_path / "replica", command) as child:
        assert [event(child.stdout)["event"] for _ in range(2)] == ["version", "command"]
        channel.publish()
        assert [event(child.stdout)["event"] for _ in range(2)] == ["version", "command"]
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate()
    assert json.loads(out)["event"] == "end"
    assert err.count("line") == 2
    assert err.count("half") == 2
    assert err.count("complaint") == 2
    assert "stray" not in out


# -- when it is due ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    (tmp_path / "m" / ".weightcast").mkdir(parents=True)
    return tmp_path / "m"


def at(version: int) -> Position:
    return Position(version, f"{version:064x}")


def test_failed_command_waits_longer_each_time_and_a_newer_version_does_not(mirror: Path) -> None:
    clock = FakeClock()
    command = Command("exit 3", mirror, clock=clock)
    waits = []
    for _ in range(8):
        assert command.is_due("c", at(1))
        assert command.run("c", Arrival(at(1), None, 0, 0.0, None)) == 3
        began = clock.time
        while not command.is_due("c", at(1)):
            clock.time += 0.1
        waits.append(clock.time - began)
        clock.time = began
        assert command.is_due("c", at(2))
        clock.time += waits[-1]
    assert waits[0] <= 2.5
    assert 40 <= waits[-1] <= 73
    assert command.problem == "the command ended with exit code 3"


def test_record_of_a_command_belongs_to_one_channel_and_one_command(mirror: Path) -> None:
    write_ran(mirror, Ran.of("c", "true", at(4)))
    assert Command("true", mirror).ran("c") == at(4)
    assert not Command("true", mirror).is_due("c", at(4))
    assert Command("true", mirror).is_due("c", at(5))
    assert Command("true", mirror).is_due("d", at(4))
    assert Command("false", mirror).is_due("c", at(4))


@pytest.mark.parametrize("data", [b"", b"{", b'{"format":1,"kind":"ran"}', b"\xff\xfe"])
def test_malformed_record_of_a_command_counts_as_not_run(mirror: Path, data: bytes) -> None:
    (mirror / ".weightcast" / "ran.json").write_bytes(data)
    assert read_ran(mirror) is None


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_forget_deletes_a_heartbeat(channel: LiveChannel, tmp_path: Path) -> None:
    run("pull", channel.url, tmp_path / "replica", "--replica", "old-host")
    assert [row["name"] for row in run("status", channel.url)[1]["replicas"]] == ["old-host"]
    assert run("forget", channel.url, "old-host") == (0, {"forgotten": "old-host"})
    assert run("status", channel.url)[1]["replicas"] == []
    code, told = run("forget", channel.url, "old-host")
    assert code == 2
    assert "there is no replica 'old-host'" in told["error"]["text"]


# -- where a folder stands ---------------------------------------------------------------------------------------------


def test_digest_and_status_of_a_mirror_distinguish_files_and_log(channel: LiveChannel, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    run("pull", channel.url, folder, "--exec", "true")
    channel.publish()
    subscriber = wc.Subscriber(channel.url, folder, threads=1, fold=False)
    with subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    code, told = run("digest", folder)
    assert code == 0
    assert told["digest"] == channel.position(0).digest
    assert (told["version"], told["log_leads_to"]) == (0, 1)
    assert run("status", folder)[1] == {
        "channel": open_store(channel.url).url,
        "files_at": 0,
        "log_leads_to": 1,
        "changing": False,
        "command_ran_at": 0,
    }
    run("pull", channel.url, folder)
    told = run("digest", folder)[1]
    assert (told["digest"], told["version"], told["log_leads_to"]) == (channel.position(1).digest, 1, None)
