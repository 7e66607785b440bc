"""Whatever dies or goes wrong: an engine never serves mixed or unverified weights, and it comes back by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, serving
from world import Attached, Clients, Trainer, attached, client_of, live, must_be, report, training

DYING = Path(__file__).parent / "dying.py"
SLOW = "WEIGHTCAST_TEST_SLOW"  # as in site/faults.py
PATIENCE = 60.0
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
QKV_PROJ = "model.layers.0.self_attn.qkv_proj.weight"  # begins with it
SPARSE = 3e-5  # a learning rate that changes few elements: a tensor that is written whole shows no flipped bit
EXTENSION = ("--worker-extension-cls", "faults.Flipping")


def weightcast(*arguments: str, fault: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, perhaps with something wrong with it."""
    command = [sys.executable, *(["-m", "weightcast"] if fault is None else [str(DYING), fault]), *arguments]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        raise AssertionError(f"{fault} {arguments} hangs:\n{process.communicate()[1]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def attach(channel: str, engine: Engine, mirror: Path, *more: str, fault: str | None = None) -> Any:
    """`weightcast attach --once`."""
    arguments = [channel, "--engine", engine.url, "--mirror", str(mirror), "--once", "--json", *more]
    return weightcast("attach", *arguments, fault=fault)


def bring(channel: str, engine: Engine, mirror: Path, *more: str) -> dict[str, Any]:
    """What an ordinary agent says that brought the engine to the head."""
    end = time.monotonic() + PATIENCE
    while "updates this engine" in (done := attach(channel, engine, mirror, *more)).stderr + done.stdout:
        assert time.monotonic() < end, "the lease of an agent that was killed ends"
        time.sleep(1)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def is_paused(engine: Engine) -> bool:
    return report(engine).paused


def named(engine: Engine) -> str:
    return report(engine).served


def must_be_whole(engine: Engine, channel: str, *versions: int) -> None:
    """It serves one of some versions to the last bit, and says which; or it is paused, and serves none."""
    if not is_paused(engine):
        proof = live(engine, channel)
        assert proof.holds, proof
        assert proof.version in versions, proof
        assert named(engine) == str(proof.version)
        assert len(engine.generate([1, 2, 3], 4).tokens) == 4


def wait_for(what: Callable[[], object], patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def flip(engine: Engine, parameter: str, index: int, bit: int = 0) -> None:
    engine.post("/collective_rpc", {"method": "flip", "args": [parameter, index, bit]})


def flat(trainer: Trainer, tensor: str) -> torch.Tensor:
    return trainer.model.get_parameter(tensor).detach().clone().view(-1).view(torch.int16)


# -- engines of their own; before the one that is shared, as two cores are not enough for two -----------------------


def test_worker_killed_during_update_recovers(model: Callable[[str], Path], tmp_path: Path) -> None:
    begun, switch = model("qwen3"), tmp_path / "slow"
    with training(begun, tmp_path / "channel") as trainer:
        with serving(begun, tensor_parallel=2, env={SLOW: str(switch)}) as engine:
            agent = Attached(trainer.channel, engine.url, tmp_path / "mirror")
            try:
                agent.wait(trainer.step())
                must_be(engine, trainer.channel, 1)
                switch.write_text("0.2")
                trainer.step()
                engine_pid, workers = engine.pid, engine.worker_pids()
                assert len(workers) == 2
                wait_for((tmp_path / "slow.begun").exists)  # whatever is asked of the engine now waits for the update
                subprocess.run(["kill", "-s", "KILL", str(workers[1])], check=True)
                wait_for(lambda: engine_pid not in engine.pids())  # vLLM ends as a whole
                switch.unlink()
            except BaseException:
                agent.kill()
                raise
            engine.kill()
            port = int(engine.url.rpartition(":")[2])
        try:
            assert agent.process.poll() is None
            assert [event["version"] for event in agent.events if event["event"] == "version"] == [1]
            with serving(begun, tensor_parallel=2, port=port) as engine:
                agent.wait(2)
                must_be(engine, trainer.channel, 2)
                agent.wait(trainer.step())  # and on it goes, by patches
                must_be(engine, trainer.channel, 3)
        finally:
            agent.close()


def test_engine_without_the_plug_in_is_refused_with_the_remedy(model: Callable[[str], Path], tmp_path: Path) -> None:
    begun = model("qwen3")
    with training(begun, tmp_path / "channel") as trainer, serving(begun, backend=None) as engine:
        before = engine.generate([1, 2, 3], 8)
        trainer.step()
        refused = attach(trainer.channel, engine, tmp_path / "mirror")
        assert refused.returncode == 12
        text = json.loads(refused.stdout or refused.stderr)["error"]["text"]
        assert """--weight-transfer-config '{"backend": "weightcast"}'""" in text
        assert engine.url in text
        assert "Traceback" not in refused.stderr
        assert engine.generate([1, 2, 3], 8) == before


# -- one engine for all the rest --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writing it makes updates slow."""
    return tmp_path_factory.mktemp("switch") / "slow"


@pytest.fixture(scope="module")
def shared(model: Callable[[str], Path], slow: Path) -> Iterator[Engine]:
    with serving(model("qwen3"), extra_args=EXTENSION, env={SLOW: str(slow), "VLLM_SERVER_DEV_MODE": "1"}) as engine:
        yield engine


class World:
    """A channel of its own, whose version 1 the shared engine is at."""

    def __init__(self, engine: Engine, trainer: Trainer, mirror: Path):
        self.engine, self.trainer, self.channel, self.mirror = engine, trainer, trainer.channel, mirror
        trainer.step()
        self.bring()
        self.must_be(1)

    def attach(self, *more: str, fault: str | None = None) -> Any:
        return attach(self.channel, self.engine, self.mirror, *more, fault=fault)

    def bring(self, *more: str) -> dict[str, Any]:
        return bring(self.channel, self.engine, self.mirror, *more)

    def attached(self, *more: str) -> Any:
        return attached(self.channel, self.engine, self.mirror, *more)

    def must_be(self, version: int) -> None:
        must_be(self.engine, self.channel, version)


@pytest.fixture
def world(shared: Engine, model: Callable[[str], Path], tmp_path: Path) -> Iterator[World]:
    with training(model("qwen3"), tmp_path / "channel", lr=SPARSE) as trainer:
        yield World(shared, trainer, tmp_path / "mirror")


@contextmanager
def asking(engine: Engine) -> Iterator[Clients]:
    """Requests in flight; none may fail."""
    clients = client_of(engine)
    yield clients
    clients.close()


def test_next_agent_finishes_after_a_kill_at_any_step(world: World, tmp_path: Path) -> None:
    """Before each call to the engine and each step of the mirror, and at the very end."""
    engine, trainer = world.engine, world.trainer
    trainer.step()
    assert world.attach(fault=f"tell:{tmp_path / 'steps'}").returncode == 0
    steps = (tmp_path / "steps").read_text().split()
    for needed in ("meet", "poll", "stage_patches", "mirror", "update", "leave"):
        assert needed in steps
    for fault in [*(f"before:{number}" for number in range(len(steps))), f"after:{len(steps) - 1}"]:
        version = trainer.step()
        killed = world.attach(fault=fault)
        assert killed.returncode == -signal.SIGKILL, (fault, steps, killed)
        must_be_whole(engine, world.channel, version - 1, version)
        world.bring()
        world.must_be(version)


@pytest.mark.parametrize("lost", [False, True], ids=["same mirror", "mirror lost"])
def test_engine_finishes_an_update_whose_agent_is_killed(world: World, slow: Path, tmp_path: Path, lost: bool) -> None:
    """The next agent may have an empty mirror: one restarted on another host has nothing else."""
    engine, trainer = world.engine, world.trainer
    version = trainer.step()
    assert world.attach(fault=f"tell:{tmp_path / 'steps'}").returncode == 0
    number = (tmp_path / "steps").read_text().split().index("update")
    version = trainer.step()
    slow.write_text("0.1")
    try:
        assert world.attach(fault=f"during:{number}").returncode == -signal.SIGKILL
    finally:
        slow.unlink()
    wait_for(lambda: named(engine) == str(version))
    world.must_be(version)
    if lost:
        world.mirror = tmp_path / "another"
    world.bring()
    world.must_be(version)


def test_engine_keeps_serving_while_the_bucket_is_unreachable(world: World) -> None:
    """Some seconds here, in place of the minutes of a real outage."""
    folder = Path(world.channel)
    with world.attached() as agent, asking(world.engine) as clients:
        agent.wait(world.trainer.step())
        world.must_be(2)
        away = folder.rename(folder.with_name("away"))
        agent.wait_for_warning("the folder does not exist")
        served = clients.done
        time.sleep(3)
        assert agent.process.poll() is None
        assert clients.done > served
        assert named(world.engine) == "2"
        away.rename(folder)
        world.must_be(2)
        world.trainer.step()
        agent.wait(world.trainer.step())
        world.must_be(4)
        assert len([event for event in agent.events if event["event"] == "warning"]) == 1


def test_damaged_delta_is_not_applied_and_an_anchor_repairs_it(
    world: World, model: Callable[[str], Path], tmp_path: Path
) -> None:
    with world.attached() as agent, asking(world.engine):
        agent.wait(world.trainer.step())
    world.trainer.step()
    (delta,) = Path(world.channel).glob("deltas/*000003*")
    data = bytearray(delta.read_bytes())
    data[len(data) // 2] ^= 0x10
    delta.write_bytes(data)
    with world.attached() as agent, asking(world.engine):
        agent.wait_for_warning("cannot be reached")
        time.sleep(1)
        world.must_be(2)
        world.trainer.close()
        saved = world.trainer.save(tmp_path / "saved", model("qwen3"))
        mended = weightcast("publish", world.channel, str(saved), "--anchor", "--mirror", str(tmp_path / "keeper"))
        assert mended.returncode == 0, mended.stderr
        agent.wait(3)
        proof = live(world.engine, world.channel)
        assert proof.version is not None
        world.must_be(proof.version)


def test_agent_of_another_protocol_is_refused_with_the_remedy(world: World) -> None:
    world.trainer.step()
    refused = world.attach(fault="protocol:2")
    assert refused.returncode == 12
    text = json.loads(refused.stdout or refused.stderr)["error"]["text"]
    assert "the engine's plug-in uses protocol 1, this agent uses 2" in text
    assert "Install the same weightcast on the agent's side and on the engine's, and restart both." in text
    world.must_be(1)
    world.bring()
    world.must_be(2)


def verify(world: World) -> tuple[int, dict[str, Any]]:
    done = weightcast("verify", "--engine", world.engine.url, world.channel, "--json")
    return done.returncode, json.loads(done.stdout)


def test_flipped_bit_is_named_and_blocks_updates(world: World) -> None:
    before = flat(world.trainer, Q_PROJ)
    world.trainer.step()
    changes = (flat(world.trainer, Q_PROJ) != before).nonzero()
    flip(world.engine, QKV_PROJ, int(changes[0]))
    code, found = verify(world)
    assert (code, found["version"], list(found["wrong"])) == (3, None, [Q_PROJ])
    with world.attached() as agent:
        warning = agent.wait_for_warning("Something else changed")
        assert Q_PROJ in warning["text"]
        agent.wait(2)
    world.must_be(2)
    assert verify(world)[0] == 0


def test_flipped_bit_outside_an_update_is_found_by_verification(world: World) -> None:
    before = flat(world.trainer, Q_PROJ)
    world.trainer.step()
    same = (flat(world.trainer, Q_PROJ) == before).nonzero()
    with world.attached("--prove", "--version", "1") as agent:
        wait_for(lambda: agent.process.poll() is not None or named(world.engine) == "1")
        time.sleep(1)  # it has met the engine
    flip(world.engine, QKV_PROJ, int(same[0]), bit=14)
    assert verify(world)[0] == 3
    world.bring("--prove")
    world.must_be(2)


def test_engine_paused_by_someone_else_is_updated_and_stays_paused(world: World) -> None:
    world.engine.post("/pause", mode="keep")
    try:
        version = world.trainer.step()
        world.bring()
        assert is_paused(world.engine)
        proof = live(world.engine, world.channel)
        assert (proof.holds, proof.version, named(world.engine)) == (True, version, str(version))
        version = world.trainer.step()
        with world.attached() as agent:
            agent.wait(version)
            assert is_paused(world.engine)
    finally:
        world.engine.post("/resume")
    world.must_be(version)
