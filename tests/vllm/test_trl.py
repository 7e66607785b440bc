"""Real TRL trains a model whose rollouts come from real vLLM; a bucket is all that joins them."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import hub
import numpy as np
import pytest
import rgw
import trl
from engines import START_SECONDS, Engine, free_port, serving
from world import Attached

import weightcast as wc

STEPS = 5
PATIENCE = START_SECONDS + 60.0
LR = "1e-4"
ENGINE = (
    *("--middleware", "weightcast.engine.vllm.middleware.WeightVersions", "--middleware", "recorded.Recorded"),
    # A prompt that is prefilled in pieces, with a seed, ends vLLM's CPU engine: it asks a CPU's generator for offsets.
    *("--max-num-batched-tokens", "4096"),
)


class Training:
    """TRL's trainer as a process of its own, and its rollouts' process with it."""

    def __init__(self, model: Path, channel: str, engine: str, output: Path, environment: Mapping[str, str]):
        command = [sys.executable, str(Path(__file__).parent / "trl_on_cpu.py"), "--model", str(model)]
        command += ["--channel", channel, "--vllm", engine, "--output", str(output), "--steps", str(STEPS)]
        command += [
            "--save-every",
            "1",
            "--generations",
            "4",
            "--tokens",
            "16",
            "--lr",
            LR,
            "--patience",
            str(START_SECONDS),
        ]
        self.log = output.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.syncs: list[dict[str, Any]] = []
        self.rollouts: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def sync(self) -> dict[str, Any]:
        """The next sync, once it is done; the trainer stands still behind it."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no sync after {self.syncs[-1:]}:\n{self.tail()}")
            if not line.startswith('{"event"'):
                continue
            event = json.loads(line)
            if event["event"] == "rollout":
                self.rollouts.append(event["trl"])
                continue
            self.process.send_signal(signal.SIGSTOP)
            self.syncs.append(event)
            return event

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait(self) -> None:
        self.go_on()
        assert self.process.wait(PATIENCE) == 0, self.tail()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Deployment:
    """A trainer, an engine and an agent around a channel; each of them can be killed and started again."""

    def __init__(self, model: Path, channel: str, folder: Path, environment: Mapping[str, str]):
        self.model, self.channel, self._folder = model, channel, folder
        self._environment = {"HF_HUB_OFFLINE": "0", **environment}
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._stack = ExitStack()
        self.engine: Engine | None = None
        self.agent: Attached | None = None
        self.training: Training | None = None
        self.record = folder / "answers"

    def begin(self) -> None:
        self.weightcast("init", self.channel, str(self.model))
        self.start_engine()
        self.start_agent()
        self.start_training()

    def weightcast(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "weightcast", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self._environment})
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start_engine(self) -> None:
        environment = {"WEIGHTCAST_RECORD": str(self.record)}
        context = serving(self.model, port=self._port, extra_args=ENGINE, env=environment)
        self.engine = self._stack.enter_context(context)

    def start_agent(self) -> None:
        mirror = self._folder / "mirror"
        self.agent = Attached(self.channel, self._url, mirror, environment=self._environment)

    def start_training(self) -> None:
        output = self._folder / "checkpoints"
        self.training = Training(self.model, self.channel, self._url, output, self._environment)

    def kill_engine(self) -> None:
        self._stack.close()

    def must_be_live(self, version: int) -> None:
        """The live parameters, fused as they are, have the digests of that version's manifest."""
        found = json.loads(self.weightcast("verify", "--json", "--engine", self._url, self.channel))
        assert (found["version"], found["claimed"], found["wrong"]) == (version, version, {}), found

    def answered(self) -> list[str]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def must_be_sound(self) -> None:
        """Every object of the channel is what it should be, and leads where it should."""
        assert json.loads(self.weightcast("verify", "--deep", "--json", self.channel))["findings"] == []

    def close(self) -> None:
        if self.training is not None:
            self.training.kill()
        if self.agent is not None and self.agent.process.poll() is None:
            self.agent.kill()
        self._stack.close()


@pytest.fixture(scope="module")
def chatting(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose tokenizer has the chat template that TRL knows for it."""
    return with_template(model("qwen3"), tmp_path_factory.mktemp("chatting") / "qwen3")


def with_template(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    shutil.copy(Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja", folder / "chat_template.jinja")
    return folder


@contextmanager
def bucket(kind: str, folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A channel's address in a bucket of that kind, and what its clients find it by."""
    if kind == "folder":
        yield str(folder / "channel"), {}
    elif kind == "hf":
        with hub.serving(folder / "hub") as stand_in:
            yield f"{stand_in.make_bucket('run')}/channel", stand_in.environment
    else:
        with rgw.serving() as gateway:
            yield f"{gateway.make_bucket('run')}/channel", gateway.environment()


@contextmanager
def deployed(kind: str, model: Path, folder: Path) -> Iterator[Deployment]:
    with bucket(kind, folder) as (channel, environment):
        deployment = Deployment(model, channel, folder, environment)
        try:
            deployment.begin()
            yield deployment
        finally:
            deployment.close()


def step(deployment: Deployment) -> dict[str, Any]:
    """Let the trainer go on to its next sync, and prove what is live then."""
    deployment.training.go_on()
    sync = deployment.training.sync()
    assert sync["live"], sync
    deployment.must_be_live(sync["version"])
    return sync


def test_every_step_of_trl_is_live_in_vllm_and_rollouts_carry_their_version(
    chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed("s3", chatting, tmp_path) as deployment:
        syncs = [step(deployment) for _ in range(1 + STEPS)]
        deployment.training.wait()
        assert [sync["version"] for sync in syncs] == list(range(1 + STEPS))
        check_rollouts(deployment)
        deployment.must_be_sound()
    check_sizes(syncs[1:])
    with capsys.disabled():
        tell("s3", syncs[1:])


def test_experts_that_trl_streams_fused_are_live_in_vllm_and_are_those_of_its_checkpoint(
    model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = with_template(model("moe"), tmp_path / "moe")
    with deployed("folder", mixture, tmp_path) as deployment:
        syncs = [step(deployment) for _ in range(1 + STEPS)]
        deployment.training.wait()
        assert [sync["version"] for sync in syncs] == list(range(1 + STEPS))
        check_rollouts(deployment)
        deployment.weightcast("pull", deployment.channel, str(tmp_path / "pulled"))
    check_sizes(syncs[1:])
    with (
        wc.Checkpoint(tmp_path / "checkpoints" / f"checkpoint-{STEPS}") as saved,
        wc.Checkpoint(tmp_path / "pulled") as pulled,
    ):
        assert any(spec.name.endswith("experts.3.gate_proj.weight") for spec in saved.table)
        assert [spec.name for spec in saved.table] == [spec.name for spec in pulled.table]
        for spec in saved.table:
            masters = saved.read(spec.name).view("<f4")
            assert np.array_equal(wc.round_to("BF16", masters), pulled.read(spec.name)), spec.name
    with capsys.disabled():
        tell("a mixture", syncs[1:])


def test_training_continues_after_agent_engine_and_trainer_are_killed(
    chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed("hf", chatting, tmp_path) as deployment:
        syncs = [step(deployment) for _ in range(2)]
        deployment.agent.kill()
        deployment.training.go_on()
        deployment.start_agent()
        syncs.append(step(deployment))
        deployment.kill_engine()
        deployment.training.go_on()
        deployment.start_engine()
        syncs.append(step(deployment))
        check_rollouts(deployment)
        deployment.training.kill()
        deployment.start_training()
        while syncs[-1]["step"] < STEPS:
            syncs.append(step(deployment))
        deployment.training.wait()
        check_rollouts(deployment)
        deployment.must_be_sound()
    versions = [sync["version"] for sync in syncs]
    assert versions == sorted(versions)
    assert versions[-1] >= STEPS
    learned = [sync for sync in syncs if "detect" in sync["seconds"]]  # not those that took up the channel
    check_sizes(learned)
    with capsys.disabled():
        tell("hf", learned)


def check_rollouts(deployment: Deployment) -> None:
    """What TRL trains on is tagged with a sync, and the engine has answered with that sync's version."""
    versions = {sync["trl"]: str(sync["version"]) for sync in deployment.training.syncs}
    answered = deployment.answered()
    assert all(part.isdigit() for version in answered for part in version.split("-"))
    begun = {version.partition("-")[0] for version in answered}
    tags = set(deployment.training.rollouts)
    assert tags
    assert {versions[tag] for tag in tags} <= begun


def check_sizes(syncs: list[dict[str, Any]]) -> None:
    for sync in syncs:
        assert sync["changed"] > 0
        assert 0 < sync["nbytes"] < sync["broadcast"] / 10
        assert sync["pause"] > 0


def tell(kind: str, syncs: list[dict[str, Any]]) -> None:
    """What a sync took, for whoever runs the tests."""
    middle = len(syncs) // 2
    nbytes = sorted(sync["nbytes"] for sync in syncs)[middle]
    pause = sorted(sync["pause"] for sync in syncs)[middle]
    phases = {name: sorted(sync["seconds"][name] for sync in syncs)[middle] for name in syncs[0]["seconds"]}
    sizes = f"{nbytes:,} bytes of {syncs[0]['broadcast']:,}"
    print(f"\n{kind}: a sync took {sizes}, a pause of {1000 * pause:.0f} ms; seconds of its phases: {phases}")
