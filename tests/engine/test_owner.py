"""One agent owns an engine at a time: two of them fight for one, are killed, and never bring it to anything wrong."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fake_clock import FakeClock  # noqa: E402
from local_engine import Host, Local, Training  # noqa: E402
from sharded_engine import Engine, memory, stream  # noqa: E402
from waiting import until  # noqa: E402

from weightcast.engine.address import RUNTIME  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.client import LocalEngine  # noqa: E402
from weightcast.engine.control import Control  # noqa: E402
from weightcast.engine.control_server import serving_control  # noqa: E402
from weightcast.engine.lease import Lease  # noqa: E402
from weightcast.engine.messages import ApplyUpdate, Learn  # noqa: E402
from weightcast.engine.protocol import decode_request  # noqa: E402
from weightcast.errors import EngineBusyError  # noqa: E402

A, B = "a" * 32, "b" * 32
PORT = 8000
SECONDS, FEWEST = 10.0, 4


def test_lease_is_renewed_released_and_taken_over_when_it_ends() -> None:
    clock = FakeClock()
    lease = Lease("an engine", clock, seconds=30)
    lease.take(A, "first")
    clock.time += 29
    with pytest.raises(EngineBusyError, match="first updates this engine") as busy:
        lease.take(B, "second")
    assert busy.value.holder == "first"
    lease.renew(A)
    clock.time += 29
    with pytest.raises(EngineBusyError):
        lease.refuse_others(B)
    clock.time += 1
    assert lease.holder() is None
    lease.renew(A)
    assert not lease.is_held_by(A), "a lease that ended is not renewed: another agent may have been here"
    lease.take(B, "second")
    with pytest.raises(EngineBusyError, match="second"):
        lease.renew(A)
    lease.release(A)
    assert lease.is_held_by(B)
    lease.release(B)
    lease.take(A, "first")


def test_lease_does_not_end_during_an_update(training: Training, tmp_path: Path) -> None:
    """A reload may take minutes, and its agent may be gone: nobody else changes what the workers know meanwhile."""
    engine, clock = Local(training.weights, ranks=1), FakeClock()
    control = Control(Host(engine), "an engine", clock)
    mine, other = LocalEngine(control), LocalEngine(control)
    with Agent(training.url, mine, tmp_path / "mirror") as agent:
        agent.step()
        training.step(1)
        real, refused = engine.exchange, []

        def slow(text: str) -> list[str]:
            if isinstance(decode_request(text), ApplyUpdate):
                clock.time += 3600
                with pytest.raises(EngineBusyError):
                    other.ask(Learn(agent.subscriber.chain.channel))
                refused.append(text)
            return real(text)

        engine.exchange = slow  # type: ignore[method-assign]
        assert agent.step() is not None
        assert len(refused) == 1
        clock.time += 14
        with pytest.raises(EngineBusyError):
            other.meet("another")
        clock.time += 2
        other.meet("another")
        other.leave()


def test_two_agents_that_fight_for_an_engine_and_are_killed_never_make_it_serve_anything_else(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each resume, which is when tokens are computed again, the version that is named is the one that is live."""
    monkeypatch.setenv(RUNTIME, str(tmp_path / "run"))
    engine = Local(training.weights, ranks=1)
    expected = {memory_of(training): "0"}
    served: list[str] = []
    wrong: list[tuple[str, str | None]] = []
    real = engine.resume

    def resume() -> None:
        found = expected.get(hashed(engine.models[0]))
        served.append(engine.served)
        if found != engine.served:
            wrong.append((engine.served, found))
        real()

    engine.resume = resume  # type: ignore[method-assign]
    stopped = threading.Event()

    def train() -> None:
        for version in range(1, 10_000):
            if stopped.wait(0.1):
                return
            training.change(version)
            expected[memory_of(training)] = str(version)
            assert training.publish() == version

    with serving_control(Control(Host(engine), "an engine", lease=1.0), tmp_path / "run", PORT):
        trainer = threading.Thread(target=train)
        trainer.start()
        agents = {name: started(training.url, tmp_path, name) for name in ("one", "two")}
        chance, end = random.Random(1), time.monotonic() + SECONDS
        patience, before = 1, 0
        while time.monotonic() < end or len(set(served)) < FEWEST:
            time.sleep(chance.uniform(0.2, 3) * patience)
            # On a busy machine an agent takes long to start: as long as none gets anywhere, each may live longer.
            patience, before = (1 if len(served) > before else patience + 1), len(served)
            name = chance.choice(list(agents))
            agents[name].kill()
            agents[name].wait()
            agents[name] = started(training.url, tmp_path, name)
        stopped.set()
        trainer.join()
        head = str(max(map(int, expected.values())))
        until(lambda: engine.served == head and not engine.paused)
        for agent in agents.values():
            agent.kill()
            agent.wait()
    assert not wrong
    assert expected[hashed(engine.models[0])] == head


def started(channel: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """`weightcast attach`, with a mirror of its own."""
    command = [sys.executable, "-m", "weightcast", "attach", channel, "--engine", f"http://127.0.0.1:{PORT}"]
    more = ["--mirror", str(folder / name), "--every", "0.05", "--replica", name]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, *more], stdout=log, stderr=log)


def hashed(model: torch.nn.Module) -> str:
    """Of every bit of the parameters."""
    return hashlib.sha256(b"".join(memory(model).values())).hexdigest()


def memory_of(training: Training) -> str:
    """What an engine holds that has loaded the trainer's weights."""
    shard = Engine(0, 1)
    model = shard.make()
    shard.load(model, stream(training.weights))
    return hashed(model)
