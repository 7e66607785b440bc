"""Engines behind a command: it loads the version that it is told, from files that do not change."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from channels import LiveChannel
from sglang_server import bits_of

from weightcast.engine.reload.agent import ReloadAgent
from weightcast.engine.reload.command import CommandEngine
from weightcast.errors import EngineError


@pytest.fixture
def channel(tmp_path: Path) -> LiveChannel:
    return LiveChannel(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


LOADER = """
import hashlib, json, os, pathlib, sys
from safetensors import safe_open
import ml_dtypes
found = {}
for file in pathlib.Path(os.environ["WEIGHTCAST_FOLDER"]).glob("*.safetensors"):
    with safe_open(file, "np") as weights:
        found |= {name: hashlib.sha256(weights.get_tensor(name).tobytes()).hexdigest() for name in weights.keys()}
version, digest = os.environ["WEIGHTCAST_VERSION"], os.environ["WEIGHTCAST_DIGEST"]
pathlib.Path(sys.argv[1]).write_text(json.dumps({"version": int(version), "digest": digest, "sha": found}))
"""


def test_command_loads_the_version_that_it_is_told(channel: LiveChannel, folder: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "load.py", tmp_path / "out"
    script.write_text(LOADER)
    with ReloadAgent(str(channel.url), CommandEngine(f"{sys.executable} {script} {out}"), folder) as agent:
        for version in range(2):
            agent.step()
            position = channel.position(version)
            sums = {name: hashlib.sha256(bits).hexdigest() for name, bits in bits_of(channel.states[version]).items()}
            assert json.loads(out.read_text()) == {"version": version, "digest": position.digest, "sha": sums}
            assert agent.position == position
            assert agent.step() is None
            channel.publish()


def test_files_cannot_change_while_a_command_runs(channel: LiveChannel, folder: Path) -> None:
    lock = "$WEIGHTCAST_FOLDER/.weightcast/lock"
    command = CommandEngine(f"flock -xn {lock} true && exit 9; flock -sn {lock} true")
    with ReloadAgent(str(channel.url), command, folder) as agent:
        assert agent.step() is not None


def test_command_that_fails_runs_again(channel: LiveChannel, folder: Path, tmp_path: Path) -> None:
    command = CommandEngine(f"echo $WEIGHTCAST_VERSION >> {tmp_path}/log; test -e {tmp_path}/ready")
    with ReloadAgent(str(channel.url), command, folder) as agent:
        with pytest.raises(EngineError) as caught:
            agent.step()
        assert "the command ended with exit code 1" in str(caught.value)
        assert agent.position is None
        (tmp_path / "ready").touch()
        assert agent.step() is not None
        assert agent.position == channel.position(0)
    assert (tmp_path / "log").read_text() == "0\n0\n"


def test_command_of_a_killed_agent_runs_again_on_the_same_files(
    channel: LiveChannel, folder: Path, tmp_path: Path
) -> None:
    log, mark = tmp_path / "log", tmp_path / "mark"
    os.mkfifo(mark)
    command = f"echo $WEIGHTCAST_VERSION >> {log}; test -e {tmp_path}/ready || (echo > {mark}; sleep 30)"
    arguments = [sys.executable, "-m", "weightcast", "attach", str(channel.url), "--command", command]
    with subprocess.Popen([*arguments, "--mirror", str(folder)], stdout=subprocess.DEVNULL) as child:
        mark.read_text()  # comes back once the command runs
        child.kill()
    channel.publish()
    (tmp_path / "ready").touch()
    with ReloadAgent(str(channel.url), CommandEngine(command), folder) as agent:
        agent.step()
        assert agent.position == channel.position(1)
    assert log.read_text().split() == ["0", "0", "1"]
