"""What a test has beside an engine: a trainer that publishes, an agent, and clients that never stop asking."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import Engine, Generated
from transformers import AutoModelForCausalLM

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.trust import Signing, as_trust
from weightcast.engine.client import HttpEngine
from weightcast.engine.messages import EngineReport
from weightcast.engine.proof import Proof, prove

PATIENCE = 90.0
PROMPTS = ([1, 2, 3], [40, 41, 42, 43, 44, 45], [500, 7])


class Trainer:
    """A model that is trained for real, and published to a channel in a folder."""

    def __init__(self, model: Path, channel: Path, lr: float = 3e-4, cut: Sequence[wc.Cut] = ()):
        self.channel = str(channel)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self._generator = torch.Generator().manual_seed(1)
        self._publisher = wc.Publisher(self.channel, self.model, optimizer=self._optimizer, cut=cut)
        self.version = 0

    def step(self) -> int:
        """Train and publish; the version that came of it."""
        tokens = torch.randint(1, 500, (2, 16), generator=self._generator)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self.publish()

    def publish(self) -> int:
        self.version = self._publisher.publish().result(60).position.version
        return self.version

    def save(self, folder: Path, model: Path) -> Path:
        """The full checkpoint, with the tokenizer of the model that training began from."""
        self.model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((model / name).read_bytes())
        return folder

    def close(self) -> None:
        self._publisher.close()


@contextmanager
def training(model: Path, channel: Path, lr: float = 3e-4, cut: Sequence[wc.Cut] = ()) -> Iterator[Trainer]:
    trainer = Trainer(model, channel, lr, cut)
    try:
        yield trainer
    finally:
        trainer.close()


class Attached:
    """`weightcast attach`, as a process of its own."""

    def __init__(
        self,
        channel: str,
        engine: str,
        mirror: Path | str,
        *more: str,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        arguments = ["attach", channel, "--engine", engine, "--mirror", str(mirror), "--every", "0.05", "--json", *more]
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*(command or [sys.executable, "-m", "weightcast"]), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._errors: list[str] = []
        for stream, take in ((self.process.stdout, self._take), (self.process.stderr, self._errors.append)):
            threading.Thread(target=self._read, args=(stream, take), daemon=True).start()

    def _read(self, stream: Any, take: Any) -> None:
        for line in stream:
            take(line)
        with self._news:
            self._news.notify_all()

    def _take(self, line: str) -> None:
        with self._news:
            self.events.append(json.loads(line))
            self._news.notify_all()

    def wait(self, version: int, patience: float = PATIENCE) -> dict[str, Any]:
        """The event that says that this version, or a later one, is live."""
        end = time.monotonic() + patience
        with self._news:
            while True:
                for event in self.events:
                    if event["event"] == "version" and event["version"] >= version:
                        return event
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"version {version} is not live: {self.events[-5:]} {''.join(self._errors)}")
                self._news.wait(0.2)

    def wait_for_warning(self, text: str, patience: float = PATIENCE) -> dict[str, Any]:
        end = time.monotonic() + patience
        with self._news:
            while True:
                for event in self.events:
                    if event["event"] == "warning" and text in json.dumps(event):
                        return event
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"no warning of {text!r}: {self.events[-5:]} {''.join(self._errors)}")
                self._news.wait(0.2)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@contextmanager
def attached(channel: str, engine: Engine, mirror: Path | str, *more: str) -> Iterator[Attached]:
    agent = Attached(channel, engine.url, mirror, *more)
    try:
        yield agent
    finally:
        if agent.process.poll() is None:
            agent.close()


class Clients:
    """Requests that are always in flight; one that fails fails the test."""

    def __init__(self, many: int, ask: Callable[[int], object]):
        """``ask`` makes one, for the client of that number."""
        self._request = ask
        self._stopped = threading.Event()
        self.done = 0
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(many)]
        for thread in self._threads:
            thread.start()

    def _ask(self, which: int) -> None:
        while not self._stopped.is_set():
            try:
                self._request(which)
                self.done += 1
                time.sleep(0.05)  # two cores have to do for all
            except BaseException as error:  # noqa: BLE001 -- told by the thread that waits
                self.errors.append(error)
                return

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors
        assert self.done


def client_of(engine: Engine) -> Clients:
    """One that asks an engine to continue a prompt."""

    def ask(which: int) -> None:
        assert len(engine.generate([which + 1, 5, 9], 24).tokens) == 24

    return Clients(1, ask)


def live(engine: Engine, channel: str, trust: str | None = None) -> Proof:
    """The live parameters of an engine, proven against a channel."""
    return prove(HttpEngine(engine.url), Chain.open(wc.open_store(channel), Signing(as_trust(trust))))


def report(engine: Engine) -> EngineReport:
    """The state of an engine, by its control server."""
    return HttpEngine(engine.url).report()


def must_be(engine: Engine, channel: str, version: int) -> None:
    proof = live(engine, channel)
    assert (proof.version, dict(proof.wrong), dict(proof.unproven)) == (version, {}, {}), proof
    assert proof.holds
    found = report(engine)
    assert (found.served, found.paused) == (str(version), False)


def answers(engine: Engine) -> list[Generated]:
    """Greedy continuations, one request at a time: what else is in a batch changes the last digits."""
    return [engine.generate(prompt, 12) for prompt in PROMPTS]
