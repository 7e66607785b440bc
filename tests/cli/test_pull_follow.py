"""`pull --follow`: every version as it comes, through outages, until a signal."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from cases import write_folder
from cli_world import RECORD, USAGE, VERSIONS, Folder, Web, World, ended, facts, following, holds, model, run, tree
from commands import COMMAND, at_once
from fake_clock import FakeClock

import weightcast as wc
from weightcast.channel.keys import Position
from weightcast.cli.following import Outage
from weightcast.cli.pull import follow_channel
from weightcast.cli.settings import settings
from weightcast.errors import SpaceError, StoreError
from weightcast.follow.loop import OnError
from weightcast.follow.subscriber import Subscriber
from weightcast.follow.update import Update
from weightcast.store.memory import MemoryStore


def test_follow_prints_every_version_and_folds_when_stopped(world: World, tmp_path: Path) -> None:
    folder, log = tmp_path / "replica", tmp_path / "log"
    command = RECORD.format(log=log) + f"cp -r $WEIGHTCAST_FOLDER {tmp_path}/seen; test $WEIGHTCAST_VERSION != 10"
    flags = ("--json", "--replica", "rack-7", "--exec", command)
    with following(world.url, folder, *flags) as child:
        assert child.stdout is not None
        begun, first, ran = (json.loads(child.stdout.readline()) for _ in range(3))
        assert (begun["event"], begun["replica"], begun["version"]) == ("begin", "rack-7", None)
        assert (first["event"], first["version"], first["step"]) == ("version", VERSIONS - 1, 90)
        assert first.keys() == {"event", "time", "version", "digest", "step", "bytes", "seconds", "lag"}
        assert ran == {"event": "command", "version": VERSIONS - 1, "exit_code": 0}
        shutil.rmtree(tmp_path / "seen")
        run("publish", world.url, world.checkpoints[VERSIONS], "--step", 100)
        second, failed = (json.loads(child.stdout.readline()) for _ in range(2))
        assert (second["version"], second["step"], failed["exit_code"]) == (VERSIONS, 100, 1)
        assert holds(tmp_path / "seen", world.states[VERSIONS]), "folded before the command runs"
        done = ended(child, signal.SIGTERM)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {"event": "end", "version": VERSIONS}
    assert holds(folder, world.states[VERSIONS])
    assert [line.split()[0] for line in log.read_text().splitlines()] == [str(VERSIONS - 1), str(VERSIONS)]
    assert [row["name"] for row in facts("status", world.url)["replicas"]] == ["rack-7"]


def test_follow_survives_an_outage_with_one_warning(world: World, tmp_path: Path) -> None:
    folder, web = tmp_path / "replica", Web(partial(Folder, directory=str(tmp_path)))
    with ExitStack() as running:
        with web:
            child = running.enter_context(following(f"{web.address}/channel", folder))
            assert child.stdout is not None
            assert child.stderr is not None
            line = child.stdout.readline()
            assert "following http://127.0.0.1" in line
            assert "no version yet" in line
            line = child.stdout.readline()
            assert re.fullmatch(r"\d\d:\d\d:\d\d  version 9 +step 90 +[\d.]+ kB +[\d.]+ s  lag \S+ \w+\n", line)
        assert child.stderr.readline().startswith("warning: nothing answers at that address")
        run("publish", world.url, world.checkpoints[VERSIONS])
        with web:
            assert "back to normal after " in child.stdout.readline()
            assert "version 10 " in child.stdout.readline()
            done = ended(child, signal.SIGINT)
    assert (done.code, done.out, done.err) == (0, "stopped at version 10\n", "")
    assert holds(folder, world.states[VERSIONS])


class Script(Subscriber):
    """Rounds that fail, find nothing or bring a version, as a script says."""

    script: tuple[str | int | None, ...] = ()
    clock = FakeClock()

    def rounds(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[Update | None]:
        assert on_error is not None
        for what in self.script:
            self.clock.time += 10
            if isinstance(what, str):
                on_error(StoreError(what, url="s3://bucket"))
            yield Update(Position(what, "0" * 64), None, 5, {"fetch": 0.1}) if isinstance(what, int) else None


def followed(script: tuple[str | int | None, ...], capsys: pytest.CaptureFixture[str]) -> list[str]:
    store, weights = MemoryStore("x"), model()
    wc.init(store, weights)
    with Script(store, weights) as subscriber:
        subscriber.script = script
        follow_channel(subscriber, Path("folder"), 1.0, None, subscriber.clock)
    return capsys.readouterr().out.splitlines()


def test_outage_is_warned_about_once_and_its_end_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "as_json", True)
    script = ("no answer", "no answer", "no route", "no answer", 1, None, "no answer", None, None)
    events = [json.loads(line) for line in followed(script, capsys)]
    told = [event.get("problem") or event.get("version") or event["seconds"] for event in events]
    assert told == ["no answer", "no route", 40, 1, "no answer", 10]
    assert [event["event"] for event in events].count("recovered") == 2


def test_full_disk_is_warned_about_once(capsys: pytest.CaptureFixture[str]) -> None:
    outage = Outage(fatal=())
    for free in (7, 8):
        outage.warn(SpaceError(f"9 bytes are needed, {free} are free"))
    assert capsys.readouterr().err.count("bytes are needed") == 1


def test_end_of_an_outage_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = followed(("no answer", "no answer", None, None), capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  back to normal after 20 s", line)


def test_follow_ends_at_an_error_that_does_not_pass(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_folder(other, model(seed=1))
    before = tree(other)
    (done,) = at_once(("pull", world.url, other, "--follow"))
    assert done.code == USAGE
    assert "other weights" in done.err
    assert tree(other) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_verb_without_traceback(tmp_path: Path, number: int, code: int) -> None:
    """While a store keeps us waiting."""
    asked, over = threading.Event(), threading.Event()

    class Mute(Folder):
        def do_GET(self) -> None:  # noqa: N802 - the base class's name
            asked.set()
            over.wait(60)

    with Web(Mute) as web:
        command = [*COMMAND, "pull", web.address, tmp_path / "replica"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert asked.wait(60)
            done = ended(child, number)
        over.set()
    assert (done.code, done.complaint) == (code, "error: interrupted\n")
    assert tree(tmp_path) == {}


def test_signal_reaches_the_command_and_its_end_is_awaited(world: World, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    ending = f"trap 'sleep 0.5; echo ended >> {mark}; exit 1' TERM"
    command = f"exec > /dev/null 2>&1; {ending}; touch {mark}; while :; do sleep 0.05; done"
    with following(world.url, tmp_path / "replica", "--exec", command, "--replica", "r") as child:
        while not mark.exists():
            time.sleep(0.02)
        done = ended(child, signal.SIGINT)
    assert done.code == 0
    assert mark.read_text() == "ended\n"
