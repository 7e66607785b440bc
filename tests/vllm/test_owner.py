"""Two agents fight for one engine and are killed: whatever it answers, the version that it names is the one it has."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from engines import Engine, Generated, serving
from world import Attached, live, must_be, report, training

SECONDS = 60.0
FEWEST = 3
"""Kills, and versions that are proven, however slow the machine is."""
PATIENCE = 90.0
PROMPT = [40, 41, 42, 43, 44, 45]


class Witness:
    """Asks one engine all the time, and proves what it has between two answers."""

    def __init__(self, engine: Engine, channel: str):
        self._engine, self._channel = engine, channel
        self.answers: list[tuple[str, Generated]] = []
        """Each with the version, or the two versions, that it names."""
        self.proven: dict[str, Generated] = {}
        """Answers of engines that had a version before, during and after."""

    def look(self) -> None:
        before = self._engine.generate_named(PROMPT, 12)
        proof = live(self._engine, self._channel)
        after = self._engine.generate_named(PROMPT, 12)
        self.answers += [before, after]
        if before[0] == after[0] and before[0].isdigit():
            assert proof.holds, proof
            assert str(proof.version) == before[0]
            self.proven[before[0]] = before[1]


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def serves(engine: Engine, version: int) -> bool:
    """Whether it serves that version, or a later one; not while an update has broken off."""
    served = report(engine).served
    return served.isdigit() and int(served) >= version


def test_engine_that_two_agents_fight_for_names_the_version_that_it_has_in_every_answer(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    begun = model("qwen3")
    stopped, failed = threading.Event(), list[BaseException]()
    with training(begun, tmp_path / "channel") as trainer, serving(begun) as engine:

        def until_stopped(act: Callable[[], object], every: float) -> None:
            try:
                while not stopped.wait(every):
                    act()
            except BaseException as error:  # noqa: BLE001 -- told by the thread that waits
                failed.append(error)

        agents = {"one": Attached(trainer.channel, engine.url, tmp_path / "one")}
        witness = Witness(engine, trainer.channel)
        threads = [
            threading.Thread(target=until_stopped, args=(trainer.step, 1.0)),
            threading.Thread(target=until_stopped, args=(witness.look, 0.2)),
        ]
        try:
            agents["one"].wait(trainer.step())
            agents["two"] = Attached(trainer.channel, engine.url, tmp_path / "two")
            for thread in threads:
                thread.start()
            chance, end = random.Random(1), time.monotonic() + SECONDS
            for number in count():
                if min(number, len(witness.proven)) >= FEWEST and time.monotonic() > end:
                    break
                until(lambda version=trainer.version + 1: failed or serves(engine, version))
                time.sleep(chance.uniform(0, 1))
                name = chance.choice(list(agents))
                agents[name].kill() if number % 2 else agents[name].close()  # which gives the engine to the other one
                agents[name] = Attached(trainer.channel, engine.url, tmp_path / name)
            stopped.set()
            for thread in threads:
                thread.join()
            assert not failed, failed
            until(lambda: serves(engine, trainer.version))
            must_be(engine, trainer.channel, trainer.version)
        finally:
            stopped.set()
            for agent in agents.values():
                agent.kill()
    said = [(version, answer) for version, answer in witness.answers if version in witness.proven]
    assert [version for version, answer in said if answer != witness.proven[version]] == []
