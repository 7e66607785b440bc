"""Channels in buckets of the Hub, by the command line and in processes of their own; the Hub itself is a stand-in."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub
import numpy as np
import pytest
from cases import same_bits, write_folder
from channels import small_model, train
from typer.testing import CliRunner
from worlds import nothing_like, states

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.cli import app
from weightcast.upkeep.verify import verify

HERE = Path(__file__).parents[1] / "support"
WEIGHTCAST = [sys.executable, "-m", "weightcast"]


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub.Hub]:
    with hub.found(tmp_path_factory.mktemp("hub")) as found:
        yield found


@pytest.fixture
def url(hugging_face: hub.Hub) -> str:
    return hugging_face.make_bucket(f"c-{secrets.token_hex(8)}") + "/run-42"


def run(*arguments: str | Path, code: int = 0) -> Any:
    """The JSON that a command prints."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    return json.loads(result.stdout.splitlines()[-1])


def test_every_verb_that_takes_a_channel_works_on_the_hub(url: str, tmp_path: Path) -> None:
    model = small_model()
    write_folder(tmp_path / "0", model)
    assert run("init", url, tmp_path / "0")["version"] == 0
    for version in range(1, 9):
        train(model, version)
        write_folder(tmp_path / str(version), model)
        run("publish", url, tmp_path / str(version), "--mirror", tmp_path / "mirror", "--step", str(version))
    assert run("pull", url, tmp_path / "replica", "--replica", "here")["version"] == 8
    assert len(run("log", url)["versions"]) == 9
    assert run("show", url, "5")["version"] == 5
    assert run("squash", url, "--folder", tmp_path / "squasher", "--anchor")["squashes"]
    assert len(run("plan", url, "--from", "0")["route"]) == 1
    assert run("status", url)["head"]["version"] == 8
    assert run("verify", url, "--deep")["findings"] == []
    assert run("verify", tmp_path / "replica", url)["version"] == 8
    assert run("pin", url, "3")
    assert run("gc", url, "--dry-run")
    run("gc", url, "--window", "0s", "--grace", "0s", "--patience", "0s")
    assert run("verify", url, "--deep")["findings"] == []
    assert run("pull", url, tmp_path / "late")["version"] == 8
    assert run("unpin", url, "3")
    assert run("init", url, tmp_path / "0", code=10)["error"]["kind"] == "ConflictError"
    run("reset", url, "--yes")
    assert list(wc.open_store(url).list("")) == []
    assert run("init", url, tmp_path / "8")["version"] == 0
    assert run("pull", url, tmp_path / "replica")["version"] == 0


def test_errors_are_one_line_and_an_exit_code(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = run("log", "hf://buckets/tester/missing", code=9)["error"]
    assert "`hf buckets create tester/missing --private`" in missing["hint"]
    assert run("log", url, code=9)["error"]["text"].startswith("there is no channel here")
    assert "hf://buckets/OWNER/NAME" in run("log", "hf://tester/model", code=2)["error"]["hint"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "hf auth login" in run("log", url, code=8)["error"]["hint"]


def test_missing_bucket_has_one_remedy(hugging_face: hub.Hub, tmp_path: Path) -> None:
    """The command that is named makes a bucket that only its owner sees."""
    url, name = "hf://buckets/tester/new", "tester/new"
    write_folder(tmp_path / "0", small_model())
    error = run("init", url, tmp_path / "0", code=7)["error"]
    command = re.search(r"`(.*)`", error["hint"])
    assert command is not None
    program = [str(Path(sys.executable).with_name("hf")), *command[1].split()[1:]]
    subprocess.run(program, check=True, capture_output=True, timeout=60)
    assert name in hugging_face.private
    assert run("init", url, tmp_path / "0")["version"] == 0


def test_follower_follows_a_running_publisher(url: str, tmp_path: Path) -> None:
    """Two processes and this one, at the same bucket at the same time."""
    model = small_model()
    wc.init(url, model)
    command = [*WEIGHTCAST, "pull", url, str(tmp_path / "replica"), "--follow", "--every", "0.05", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        with wc.Publisher(url, model, threads=1) as publisher:
            for version in range(1, 6):
                train(model, version)
                publisher.publish(step=version).result(30)
        assert json.loads(follower.stdout.readline())["event"] == "begin"
        seen = [json.loads(follower.stdout.readline())["version"]]
        while seen[-1] < 5:
            seen.append(json.loads(follower.stdout.readline())["version"])
        follower.send_signal(signal.SIGTERM)
        follower.wait(30)
        assert follower.stderr.read() == ""
    assert seen == sorted(set(seen))
    with wc.Checkpoint(tmp_path / "replica") as replica:
        assert same_bits(replica, model)


PUBLISHER = """
import sys
sys.path.insert(0, sys.argv[1])
import weightcast as wc
from worlds import states

wc.warm_up()
bits = states(8)
begin = int(sys.argv[3])
with wc.Publisher(sys.argv[2], wc.Arrays.copy_of(bits[begin]), threads=1) as publisher:
    for weights in bits[begin + 1 :]:
        print(publisher.publish(weights=weights).result(60).position.version, flush=True)
"""


def test_restarted_publisher_continues_after_a_kill(url: str) -> None:
    """Wherever it is killed, the channel is intact and the next publisher continues from the head."""
    bits = states(8)
    wc.init(url, bits[0])
    chain = Chain.open(wc.open_store(url))
    rng = np.random.default_rng(0)
    for _ in range(2):
        head = chain.head()
        assert head is not None
        command = [sys.executable, "-c", PUBLISHER, str(HERE), url, str(head.position.version)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.15))
            process.kill()
        assert list(verify(chain)) == []
        fresh = nothing_like(bits[0])
        with wc.Subscriber(url, fresh, threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            reached = subscriber.apply(staged).version
        assert reached > head.position.version
        assert same_bits(fresh, bits[reached])


def on_a_terminal(*arguments: str | Path) -> str:
    """All that a command draws."""
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update(COLUMNS="100", LINES="30", TERM="xterm")
        os.execv(sys.executable, [*WEIGHTCAST, *map(str, arguments)])
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 1 << 16)
        except OSError:
            break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, drawn.decode()
    return drawn.decode()


def test_progress_of_an_anchor_upload_is_shown_only_on_a_terminal(
    hugging_face: hub.Hub, url: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 1 << 16, (36, 1 << 19), dtype=np.uint16)
    write_folder(tmp_path / "0", wc.Arrays({"layer": weights}, {"layer": "BF16"}), shards=1)
    hugging_face.delays = {"xet-xorb": 0.4}
    try:
        drawn = on_a_terminal("init", url, tmp_path / "0")
    finally:
        hugging_face.delays = {}
    run("init", f"{url}-2", tmp_path / "0")  # in no terminal, nothing
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn))
    assert len({line for line in lines if "sending" in line}) > 1, "hf_xet's own progress, in our bar"
    assert "Processing Files" not in drawn
