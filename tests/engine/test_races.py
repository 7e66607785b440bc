"""What happens between two requests: an engine is updated, reloaded or paused by others while an agent is at work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached, must_be, saved  # noqa: E402
from sharded_engine import Engine, memory, stream  # noqa: E402
from waiting import until  # noqa: E402

from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.jobs import live_digests  # noqa: E402
from weightcast.engine.keep_alive import KeepAlive  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.messages import (  # noqa: E402
    ApplyUpdate,
    Digest,
    Hello,
    Outcome,
    SetPosition,
    StageWeights,
    UpdateEngine,
)
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.protocol import decode_request, encode  # noqa: E402
from weightcast.errors import EngineError  # noqa: E402

PACKED = {"gate", "up"}
"""What an engine that packs reorders."""


def before(engine: Local, kind: type, act: Callable[[], object], times: int = 1) -> None:
    """Do something each time before a request of a kind reaches the workers, as often as that."""
    real, left = engine.exchange, [None] * times

    def exchange(text: str) -> list[str]:
        if left and isinstance(decode_request(text), kind):
            left.pop()
            act()
        return real(text)

    engine.exchange = exchange  # type: ignore[method-assign]


def of_version(training: Training, ranks: int = 2) -> list[dict[str, bytes]]:
    """What the models of an engine hold that has loaded the trainer's weights."""
    models = []
    for rank in range(ranks):
        shard = Engine(rank, ranks)
        model = shard.make()
        shard.load(model, stream(training.weights))
        models.append(memory(model))
    return models


def packed(training: Training, folder: Path) -> Local:
    """An engine that reorders a parameter after loading: its tensors are reloaded when they change."""
    return Local(training.weights, saved(training.weights, folder / "checkpoint"), packed=True)


def live(engine: Local) -> list[dict[str, bytes]]:
    return [memory(model) for model in engine.models]


# -- looks -------------------------------------------------------------------------------------------------------------


def test_verification_that_an_update_interrupts_begins_again(engine: Local, agent: Agent) -> None:
    before(engine, Digest, agent.step)
    proof = prove(engine.other(), agent.subscriber.chain)
    assert (proof.version, proof.holds) == (1, True), proof.verdict


def test_verification_of_a_part_names_the_version_that_was_read(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, skips="norm")
    with attached(training, engine, tmp_path, allow_partial=True) as agent:
        agent.step()
        training.step(1)
        agent.step()
        training.step(2)
        before(engine, Digest, agent.step)
        proof = prove(engine.other(), agent.subscriber.chain)
        assert engine.served == "2"
        assert (proof.version, proof.holds) == (2, True), proof.verdict


def test_engine_that_is_always_updated_while_it_is_read_is_not_reported_as_wrong(
    engine: Local, agent: Agent, training: Training
) -> None:
    seeds = iter(range(2, 100))

    def follow() -> None:
        agent.step()
        training.step(next(seeds))

    before(engine, Digest, follow, times=50)
    with pytest.raises(EngineError, match="updated while it was read"):
        prove(engine.other(), agent.subscriber.chain)


# -- writes that somebody else makes -----------------------------------------------------------------------------------


def reloaded(engine: Local, training: Training) -> None:
    """The engine loads other weights by itself, as by vLLM's `reload_weights`."""
    for worker, model in zip(engine.workers, engine.models, strict=True):
        worker.forget()
        with torch.no_grad():
            model.norm.data.add_(1)


def test_position_is_not_set_of_parameters_that_changed_since_they_were_read(
    engine: Local, training: Training, tmp_path: Path
) -> None:
    before(engine, SetPosition, lambda: reloaded(engine, training))
    with attached(training, engine, tmp_path) as agent:
        with pytest.raises(EngineError, match="since they were digested"):
            agent.step()
        assert {one.position for one in engine.report().workers} == {None}
        assert engine.served == "default"
        agent.step()
        must_be(engine, agent, 0)


def test_update_that_was_staged_before_another_write_is_refused(engine: Local, agent: Agent, tmp_path: Path) -> None:
    """It holds what differed then."""
    agent.step()
    agent.catch_up()
    assert agent.position is not None
    request = StageWeights(str(tmp_path / "mirror"), ("q",))
    engine.run(request)
    update = UpdateEngine(None, agent.position, str(tmp_path / "mirror"))
    assert engine.update(update).result == "live"
    outcome = engine.update(replace(update, job=request.job))
    assert (outcome.result, engine.served) == ("refused", "1")
    assert "since it was staged" in (outcome.problem or "")


def test_digests_that_were_read_before_a_write_are_not_remembered_after_it(
    engine: Local, agent: Agent, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed agent's look may end after the update of its successor."""
    agent.step()
    agent.catch_up()
    training.step(2)
    agent.subscriber.sync()
    two = agent.subscriber.position
    assert two is not None
    names = tuple(spec.name for spec in training.weights.table)
    update = UpdateEngine(None, two, str(tmp_path / "mirror"), names)
    real, lock = LiveParameters.digest_each, threading.Lock()

    def late(live: LiveParameters, *given: Any) -> Any:
        found = real(live, *given)
        with lock:
            if engine.served != "2":
                assert engine.update(update).result == "live"
        return found

    with monkeypatch.context() as slow:
        slow.setattr(LiveParameters, "digest_each", late)
        with pytest.raises(EngineError, match="written while they were digested"):
            engine.run(Digest())
    proof = prove(engine.other(), agent.subscriber.chain)
    assert (proof.version, proof.wrong) == (2, {})


def test_memory_that_was_replaced_is_not_read_in_place_of_the_parameters(
    engine: Local, agent: Agent, training: Training
) -> None:
    agent.step()
    model = engine.models[0]
    model.norm.data = model.norm.data.clone()
    with torch.no_grad():
        model.norm.data.add_(1)
    with pytest.raises(EngineError, match="moved its parameters"):
        prove(engine.other(), agent.subscriber.chain)
    agent.step()
    must_be(engine, agent, 1)
    assert live(engine) == of_version(training)


def test_mirror_that_went_on_is_not_loaded_under_the_name_of_the_version_before(
    training: Training, tmp_path: Path
) -> None:
    """The agent was killed once its update was under way, and its successor has taken the mirror further."""
    engine = packed(training, tmp_path)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1, PACKED)
        real = engine.update

        def late(update: UpdateEngine) -> Outcome:
            training.step(2, PACKED)
            agent.subscriber.sync()
            return real(update)

        engine.update = late  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the mirror is at 2"):
            agent.step()
        assert engine.paused
        assert engine.served == "updating"
        engine.update = real  # type: ignore[method-assign]
        agent.step()
        assert (live(engine), engine.served) == (live(Local(training.weights, packed=True)), "2")


def test_equal_elements_prove_no_layout(training: Training, tmp_path: Path) -> None:
    for name in PACKED:
        training.weights.write(name, np.zeros_like(training.weights.read(name)))
    training.publish()
    engine = packed(training, tmp_path)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1, PACKED)
        agent.step()
        assert live(engine) == live(Local(training.weights, packed=True))
        assert set(prove(engine, agent.subscriber.chain).unproven) == PACKED


def test_worker_that_missed_an_update_with_a_reload_is_noticed(training: Training, tmp_path: Path) -> None:
    engine = packed(training, tmp_path)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1, PACKED)
        real, missed = engine.workers[1].answer, []

        def answer(text: str) -> str:
            if isinstance(decode_request(text), ApplyUpdate) and not missed:
                missed.append(text)
                return real(encode(Hello()))
            return real(text)

        engine.workers[1].answer = answer  # type: ignore[method-assign]
        agent.step()
        assert missed
        assert live(engine) == live(Local(training.weights, packed=True))


def test_update_that_only_some_workers_answer_is_never_served(
    engine: Local, agent: Agent, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, resumed = engine.exchange, list[list[dict[str, bytes]]]()

    def first_alone(text: str) -> list[str]:
        return [engine.workers[0].answer(text)] if isinstance(decode_request(text), ApplyUpdate) else real(text)

    def resume() -> None:
        resumed.append(live(engine))
        engine.paused = False

    monkeypatch.setattr(engine, "resume", resume)
    with monkeypatch.context() as partly:
        partly.setattr(engine, "exchange", first_alone)
        with pytest.raises(EngineError, match="not all workers answer"):
            agent.step()
        assert (engine.served, engine.paused, resumed) == ("updating", True, [])
    agent.step()
    must_be(engine, agent, 1)
    assert resumed == [of_version(training)]


# -- names and pauses --------------------------------------------------------------------------------------------------


def test_engine_that_changed_its_own_weights_names_no_version(engine: Local, agent: Agent, training: Training) -> None:
    agent.step()
    reloaded(engine, training)
    named: list[str] = []
    before(engine, Digest, lambda: named.append(engine.served))
    agent.step()
    assert named == ["unknown"]
    must_be(engine, agent, 1)


def test_position_is_named_before_the_next_update_begins(
    engine: Local, agent: Agent, training: Training, tmp_path: Path
) -> None:
    """Else the name of the version before could come last, in place of the one that is live."""
    agent.step()
    agent.catch_up()
    one = agent.position
    training.step(2)
    agent.subscriber.sync()
    two = agent.subscriber.position
    assert one is not None
    assert two is not None
    names = tuple(spec.name for spec in training.weights.table)
    update = threading.Thread(target=engine.update, args=(UpdateEngine(None, two, str(tmp_path / "mirror"), names),))
    real = engine.name_version

    def slowly(version: str) -> None:
        engine.name_version = real  # type: ignore[method-assign]
        update.start()
        update.join(0.3)
        real(version)

    engine.run(Digest())
    engine.name_version = slowly  # type: ignore[method-assign]
    engine.ask(SetPosition(one))
    update.join()
    assert engine.served == "2"
    assert {worker.position for worker in engine.report().workers} == {two}


def test_pause_of_another_client_is_kept_after_one_of_ours_failed(
    engine: Local, agent: Agent, training: Training
) -> None:
    real = engine.pause

    def failing() -> None:
        raise EngineError("vLLM: no pause", url=engine.url)

    engine.pause = failing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no pause"):
        agent.step()
    engine.pause = real  # type: ignore[method-assign]
    engine.meet("agent")
    engine.paused = True  # by somebody else
    assert agent.step() is not None
    assert engine.paused
    assert engine.served == "1"


def test_owner_may_read_while_others_verify(
    engine: Local, agent: Agent, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they could keep an engine paused: what is reloaded is read back before it is resumed."""
    going_on, real, begun = threading.Event(), LiveParameters.digest_each, []

    def stuck(*given: Any) -> Any:
        begun.append(given)
        assert going_on.wait(60)
        return real(*given)

    with monkeypatch.context() as hung:
        hung.setattr(LiveParameters, "digest_each", stuck)
        looks = [threading.Thread(target=engine.other().run, args=(Digest(remember=False),)) for _ in range(4)]
        for look in looks:
            look.start()
        until(lambda: len(begun) == 4 * len(engine.workers))
    try:
        live_digests(engine, training.weights.table)
    finally:
        going_on.set()
        for look in looks:
            look.join()


# -- leases ------------------------------------------------------------------------------------------------------------


def test_lease_is_renewed_while_a_heartbeat_does_not_end() -> None:
    renewed, hung = threading.Semaphore(0), threading.Event()
    alive = KeepAlive(lambda: renewed.release(), lambda: hung.wait(60) and None, every=0.01)
    alive.start()
    try:
        assert all(renewed.acquire(timeout=20) for _ in range(5))
    finally:
        hung.set()
        alive.stop()
