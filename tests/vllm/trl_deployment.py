"""A training by TRL, a vLLM with its agent, and a channel between them; each can be killed and started again."""

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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import hub
import numpy as np
import rgw
import trl
from engines import START_SECONDS, Engine, free_port, serving
from world import Attached

import weightcast as wc

STEPS = 5
PATIENCE = START_SECONDS + 60.0
LR = "1e-4"
ENGINE = (
    *("--middleware", "recorded.Recorded"),
    # A prompt that is prefilled in pieces, with a seed, ends vLLM's CPU engine: it asks a CPU's generator for offsets.
    *("--max-num-batched-tokens", "4096"),
)


class Training:
    """TRL's trainer as processes of their own, one for each rank, and its rollouts' process with the first."""

    def __init__(
        self,
        model: Path,
        channel: str,
        engine: str,
        output: Path,
        environment: Mapping[str, str],
        ranks: int = 1,
        steps: int = STEPS,
    ):
        """Several ``ranks`` share the model with FSDP2."""
        command = [sys.executable, str(Path(__file__).parent / "trl_on_cpu.py"), "--model", str(model)]
        command += ["--channel", channel, "--vllm", engine, "--output", str(output), "--steps", str(steps)]
        command += ["--save-every", "1", "--generations", "4", "--tokens", "16", "--lr", LR]
        command += ["--patience", str(START_SECONDS)]
        self.log = output.with_suffix(".log")
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        self.processes = []
        for rank in range(ranks):
            place = {**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            with self.log.open("ab") as log:
                started = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                    env={**os.environ, **environment, **place},
                )
            self.processes.append(started)
        self.process = self.processes[0]
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
        for process in self.processes:
            assert process.wait(PATIENCE) == 0, self.tail()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Deployment:
    """A trainer, an engine and an agent around a channel; each of them can be killed and started again."""

    def __init__(self, model: Path, channel: str, folder: Path, environment: Mapping[str, str], ranks: int, steps: int):
        self.model, self.channel, self.folder = model, channel, folder
        self._ranks, self.steps = ranks, steps
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
        mirror = self.folder / "mirror"
        self.agent = Attached(self.channel, self._url, mirror, environment=self._environment)

    def start_training(self) -> None:
        output = self.folder / "checkpoints"
        self.training = Training(
            self.model, self.channel, self._url, output, self._environment, self._ranks, self.steps
        )

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
def deployed(kind: str, model: Path, folder: Path, ranks: int = 1, steps: int = STEPS) -> Iterator[Deployment]:
    with bucket(kind, folder) as (channel, environment):
        deployment = Deployment(model, channel, folder, environment, ranks, steps)
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


def check_rollouts(deployment: Deployment) -> None:
    """What TRL trains on is tagged with a sync, and the engine has answered with that sync's version."""
    versions = {sync["trl"]: str(sync["version"]) for sync in deployment.training.syncs}
    answered = deployment.answered()
    assert all(part.isdigit() for version in answered for part in version.split("-"))
    begun = {version.partition("-")[0] for version in answered}
    tags = set(deployment.training.rollouts)
    assert tags
    assert {versions[tag] for tag in tags} <= begun


def assert_checkpoint_is_pulled(deployment: Deployment) -> list[str]:
    """The head has the bits of the last checkpoint that TRL saved, rounded; the names of its tensors."""
    pulled_at = deployment.folder / "pulled"
    deployment.weightcast("pull", deployment.channel, str(pulled_at))
    saved_at = deployment.folder / "checkpoints" / f"checkpoint-{deployment.steps}"
    with wc.Checkpoint(saved_at) as saved, wc.Checkpoint(pulled_at) as pulled:
        names = [spec.name for spec in pulled.table]
        more = {spec.name for spec in saved.table} - set(names)
        assert more <= {"lm_head.weight"}  # with FSDP2 it is saved although it is tied
        assert len(names) + len(more) == len(saved.table)
        for spec in saved.table:
            masters = saved.read(spec.name).view("<f4")
            name = "model.embed_tokens.weight" if spec.name in more else spec.name
            assert np.array_equal(wc.round_to("BF16", masters), pulled.read(name)), spec.name
        return names


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
