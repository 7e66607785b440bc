"""Updates that fail, agents that are killed, engines that restart: the engine never serves a mix of versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached, must_be, other_weights, saved  # noqa: E402
from sharded_engine import SHAPES, weights_of  # noqa: E402

from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.messages import ApplyUpdate, Request, StagePatches, WorkerState  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.protocol import encode  # noqa: E402
from weightcast.errors import ChannelError, EngineError, EngineGoneError, StoreError  # noqa: E402


@pytest.fixture
def engine(training: Training) -> Local:
    return Local(training.weights)


@pytest.fixture
def agent(training: Training, engine: Local, tmp_path: Path) -> Iterator[Agent]:
    """Its engine is at version 0, and version 1 is published."""
    with attached(training, engine, tmp_path) as following:
        following.step()
        training.step(1)
        yield following


def engine_at(known: bool, folder: Path) -> Local:
    """An engine at version 0, or with weights of no version."""
    begun = weights_of(SHAPES) if known else other_weights()
    return Local(begun, saved(begun, folder))


either_way = pytest.mark.parametrize("known", [True, False], ids=["at a version", "at none"])


# -- workers that cannot be right --------------------------------------------------------------------------------------


def test_engine_with_fewer_workers_than_claimed_is_refused(engine: Local, agent: Agent) -> None:
    real = engine.ask

    def ask(request: Request) -> list[Any]:
        return [replace(one, world=2**60) if isinstance(one, WorkerState) else one for one in real(request)]

    engine.ask = ask  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="not all workers answer"):
        agent.step()


# -- updates that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [True, False], ids=["missed", "failed"])
def test_update_missed_or_failed_on_one_worker_is_repaired_before_resume(
    missed: bool, engine: Local, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_update, real_write, calls = engine.workers[1].apply, LiveParameters.apply, []

    def update(text: str) -> None:
        calls.append(text)
        if len(calls) > 1:
            real_update(text)

    def write(live: LiveParameters, *rest: Any) -> None:
        calls.append(live)
        if len(calls) == 2:  # the second worker's
            raise MemoryError("no room")
        real_write(live, *rest)

    if missed:
        monkeypatch.setattr(engine.workers[1], "apply", update)
    else:
        monkeypatch.setattr(LiveParameters, "apply", write)
    engine.calls.clear()
    done = agent.step()
    assert done is not None
    assert done.reloaded == len(SHAPES)
    assert engine.calls.count("resume") == 1
    assert engine.calls.index("resume") > engine.calls.index("reload 1")
    must_be(engine, agent, 1)


def test_engine_that_cannot_be_updated_stays_paused_until_it_can(
    engine: Local, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(*_: object) -> None:
        raise ZeroDivisionError

    engine.loader_error = ZeroDivisionError("no loader either")
    with monkeypatch.context() as broken:
        broken.setattr(LiveParameters, "apply", apply)
        with pytest.raises(EngineError, match="cannot be updated: ZeroDivisionError: no loader"):
            agent.step()
    assert engine.paused
    assert engine.served == "updating"
    assert agent.position is None
    engine.loader_error = None
    assert agent.step() is not None
    must_be(engine, agent, 1)


@either_way
def test_update_without_its_staged_job_writes_nothing_and_resumes(
    known: bool, training: Training, tmp_path: Path
) -> None:
    engine = engine_at(known, tmp_path / "begun")
    with attached(training, engine, tmp_path) as agent:
        if known:
            agent.step()
            training.step(1)
        real = engine.pause

        def pause(clear_cache: bool) -> None:
            for one in engine.workers:
                one.close()  # what was staged is gone
            real(clear_cache)

        engine.pause = pause  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"the workers refuse what was staged: .* is not here any more"):
            agent.step()
        assert (engine.paused, engine.served) == (False, "0" if known else "default")
        _live_again(engine)
        agent.step()
        must_be(engine, agent, 1 if known else 0)


def test_verification_during_update_keeps_what_was_staged(engine: Local, agent: Agent) -> None:
    real = engine.pause

    def pause(clear_cache: bool) -> None:
        prove(engine, agent.subscriber.chain)
        real(clear_cache)

    engine.pause = pause  # type: ignore[method-assign]
    update = agent.step()
    assert update is not None
    assert update.reloaded == 0
    must_be(engine, agent, 1)


# -- memory that something else changes --------------------------------------------------------------------------------


@pytest.mark.parametrize("touched", [True, False], ids=["in a changed tensor", "elsewhere"])
def test_flipped_bit_is_named_and_repaired(touched: bool, engine: Local, training: Training, tmp_path: Path) -> None:
    with attached(training, engine, tmp_path, prove=True) as agent:
        agent.step()
        with torch.no_grad():
            engine.models[1].qkv.view(torch.int16)[0, 0] ^= 4
        proof = prove(engine, agent.subscriber.chain)
        assert (proof.version, list(proof.wrong)) == (None, ["q"])
        training.step(1, {"q", "o"} if touched else {"o"})
        for _ in range(3):
            try:
                if agent.step() is None:
                    break
            except EngineError as error:
                assert error.tensor == "q"  # noqa: PT017
        must_be(engine, agent, 1)


def test_engine_that_changes_its_own_weights_is_brought_back(engine: Local, agent: Agent) -> None:
    agent.step()
    for one, model in zip(engine.workers, engine.models, strict=True):
        one.forget()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
    assert agent.step() is not None
    must_be(engine, agent, 1)


# -- agents that are killed --------------------------------------------------------------------------------------------


def test_agent_killed_at_any_point_is_succeeded_by_the_next(engine: Local, training: Training, tmp_path: Path) -> None:
    points = ["stage_patches", "pause", "update", "finish", "resume"]
    with attached(training, engine, tmp_path) as agent:
        agent.step()
    for version, point in enumerate([*points, *points], 1):
        training.step(version)
        agent = attached(training, engine, tmp_path)
        _die_at(engine, point, before=version <= len(points))
        with pytest.raises(KeyboardInterrupt):
            agent.step()
        agent.subscriber.close()  # a dead process releases its files, and nothing else
        _live_again(engine)
        with attached(training, engine, tmp_path) as agent:
            agent.step()
            must_be(engine, agent, version)


def _die_at(engine: Local, point: str, before: bool) -> None:
    method = "ask" if point == "stage_patches" else point
    real = getattr(engine, method)

    def dying(*args: Any) -> Any:
        if method == "ask" and not isinstance(args[0], StagePatches):
            return real(*args)
        if not before:
            real(*args)
        raise KeyboardInterrupt

    setattr(engine, method, dying)


def _live_again(engine: Local) -> None:
    for method in ("ask", "pause", "update", "finish", "resume"):
        engine.__dict__.pop(method, None)


@either_way
def test_interrupted_agent_resumes_engine_with_whole_weights(known: bool, training: Training, tmp_path: Path) -> None:
    engine = engine_at(known, tmp_path / "begun")
    agent = attached(training, engine, tmp_path)
    if known:
        agent.step()

    def interrupted(update: object) -> None:
        raise KeyboardInterrupt

    engine.update = interrupted  # type: ignore[method-assign]
    training.step(1)
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert (engine.paused, engine.served) == (False, "0" if known else "default")
    _live_again(engine)
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 1)


def test_interrupted_agent_leaves_engine_with_mixed_weights_paused_and_warns(
    engine: Local, training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = attached(training, engine, tmp_path)
    agent.step()
    training.step(1)

    def interrupted(update: ApplyUpdate) -> None:
        engine.workers[0].apply(encode(update))
        raise KeyboardInterrupt

    engine.update = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert engine.paused
    assert "stays paused: an update broke off, and its weights are mixed. Start the agent again" in caplog.text
    _live_again(engine)
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 1)


def test_engine_paused_by_another_client_is_updated_and_stays_paused(engine: Local, agent: Agent) -> None:
    engine.paused = True
    agent.step()
    assert engine.paused
    assert engine.served == "1"


# -- engines that restart or are gone ----------------------------------------------------------------------------------


def test_engine_restarted_during_an_outage_gets_what_the_mirror_has(
    engine: Local, agent: Agent, training: Training, tmp_path: Path
) -> None:
    agent.step()
    Path(training.url).rename(tmp_path / "away")
    begun = weights_of(SHAPES)
    engine.restart(begun, saved(begun, tmp_path / "begun"))
    with pytest.raises((StoreError, ChannelError)):
        agent.step()
    (tmp_path / "away").rename(training.url)
    must_be(engine, agent, 1)


def test_engine_that_is_gone_has_no_position_and_the_mirror_follows(engine: Local, agent: Agent) -> None:
    assert agent.position is not None

    def gone(request: Request[Any]) -> Any:
        raise EngineGoneError("it does not answer", url="a test")

    engine.ask = gone  # type: ignore[method-assign]
    with pytest.raises(EngineGoneError):
        agent.step()
    assert agent.position is None
    assert agent.subscriber.position is not None
    assert agent.subscriber.position.version == 1
