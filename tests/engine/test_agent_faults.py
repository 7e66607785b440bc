"""Updates that fail, agents that are killed, engines that restart: the engine never serves a mix of versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached, must_be, other_weights, saved  # noqa: E402
from sharded_engine import SHAPES, weights_of  # noqa: E402

from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.messages import ApplyUpdate, EngineReport, Hello, Outcome, UpdateEngine  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.protocol import decode_request, encode  # noqa: E402
from weightcast.errors import ChannelError, EngineError, EngineGoneError, StoreError  # noqa: E402


def engine_at(known: bool, folder: Path) -> Local:
    """An engine at version 0, or with weights of no version."""
    begun = weights_of(SHAPES) if known else other_weights()
    return Local(begun, saved(begun, folder))


either_way = pytest.mark.parametrize("known", [True, False], ids=["at a version", "at none"])


# -- workers that cannot be right --------------------------------------------------------------------------------------


def test_engine_with_fewer_workers_than_claimed_is_refused(engine: Local, agent: Agent) -> None:
    real = engine.meet

    def meet(name: str) -> EngineReport:
        report = real(name)
        return replace(report, workers=tuple(replace(one, world=2**60) for one in report.workers))

    engine.meet = meet  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="not all workers answer"):
        agent.step()


def test_answer_of_another_engine_is_no_update(engine: Local, agent: Agent) -> None:
    """A load balancer, or an engine that has restarted in between, under the same address."""
    real = engine.update

    def update(request: UpdateEngine) -> Outcome:
        outcome = real(request)
        return replace(outcome, workers=tuple(replace(one, instance="f" * 32) for one in outcome.workers))

    engine.update = update  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="another engine has answered"):
        agent.step()
    assert agent.position is None


# -- updates that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [True, False], ids=["missed", "failed"])
def test_update_missed_or_failed_on_one_worker_is_repaired_before_resume(
    missed: bool, engine: Local, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_answer, real_write, calls = engine.workers[1].answer, LiveParameters.apply, []

    def answer(text: str) -> str:
        if isinstance(decode_request(text), ApplyUpdate):
            calls.append(text)
            if len(calls) == 1:
                return real_answer(encode(Hello()))
        return real_answer(text)

    def write(live: LiveParameters, *rest: Any) -> None:
        calls.append(live)
        if len(calls) == 2:  # the second worker's
            raise MemoryError("no room")
        real_write(live, *rest)

    if missed:
        monkeypatch.setattr(engine.workers[1], "answer", answer)
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
    known: bool, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(known, tmp_path / "begun")
    with attached(training, engine, tmp_path) as agent:
        if known:
            agent.step()
            training.step(1)
        real = engine.pause

        def pause() -> None:
            for one in engine.workers:
                one.close()  # what was staged is gone
            real()

        with monkeypatch.context() as losing:
            losing.setattr(engine, "pause", pause)
            with pytest.raises(EngineError, match=r"the workers refuse what was staged: .* is not here any more"):
                agent.step()
        assert (engine.paused, engine.served) == (False, "0" if known else "default")
        agent.step()
        must_be(engine, agent, 1 if known else 0)


def test_verification_during_update_keeps_what_was_staged(
    engine: Local, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.pause

    def pause() -> None:
        prove(engine.other(), agent.subscriber.chain)
        real()

    monkeypatch.setattr(engine, "pause", pause)
    update = agent.step()
    assert update is not None
    assert update.reloaded == 0
    must_be(engine, agent, 1)


@pytest.mark.parametrize("call", ["pause", "clear_caches", "name_version", "resume"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("proving", [False, True], ids=["", "proving"])
def test_engine_that_fails_within_an_update_goes_on_at_the_right_version(
    call: str, done: bool, proving: bool, engine: Local, training: Training, tmp_path: Path
) -> None:
    with attached(training, engine, tmp_path, prove=proving) as agent:
        agent.step()
        training.step(1)
        real = getattr(engine, call)

        def failing(*given: Any) -> None:
            if done:
                real(*given)
            raise EngineError("no answer in time", url="a test")

        setattr(engine, call, failing)
        with pytest.raises(EngineError, match="no answer"):
            agent.step()
        engine.__dict__.pop(call)
        engine.calls.clear()
        agent.step()
        assert not engine.paused
        if call != "pause":  # what was computed from old weights is dropped before the engine goes on
            assert (done and call == "resume") or engine.calls.index("clear") < engine.calls.index("resume")
        must_be(engine, agent, 1)


# -- verified only by its own proof ------------------------------------------------------------------------------------


def test_version_that_fails_its_proof_is_never_named(engine: Local, training: Training, tmp_path: Path) -> None:
    with attached(training, engine, tmp_path, prove=True) as agent:
        agent.step()
        training.step(1, {"o"})
        real, flipped = engine.exchange, []

        def flipping(text: str) -> list[str]:
            answers = real(text)
            if isinstance(decode_request(text), ApplyUpdate):
                assert not any('"version":1' in one for one in answers), "not before it was verified"
                if not flipped:
                    with torch.no_grad():
                        engine.models[1].qkv.view(torch.int16)[0, 0] ^= 4
                    flipped.append(text)
            return answers

        engine.exchange = flipping  # type: ignore[method-assign]
        engine.calls.clear()
        update = agent.step()
        assert update is not None
        assert update.reloaded == len(SHAPES)
        assert engine.calls.count("resume") == 1
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


@pytest.mark.parametrize("call", ["meet", "run", "update"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_agent_killed_at_any_call_is_succeeded_by_the_next(
    call: str, done: bool, engine: Local, training: Training, tmp_path: Path
) -> None:
    with attached(training, engine, tmp_path) as agent:
        agent.step()
    training.step(1)
    agent = attached(training, engine, tmp_path)
    real = getattr(engine, call)

    def dying(*given: Any) -> Any:
        if done:
            real(*given)
        raise KeyboardInterrupt

    setattr(engine, call, dying)
    with pytest.raises(KeyboardInterrupt):
        agent.step()
    agent.subscriber.close()  # a dead process releases its files, and nothing else
    assert not engine.paused
    assert engine.served == ("1" if call == "update" and done else "0")
    engine.__dict__.pop(call)
    with attached(training, engine, tmp_path) as after:  # under the same id: its lease is still the old one's
        after.step()
        must_be(engine, after, 1)


@either_way
def test_interrupted_agent_leaves_no_pause(known: bool, training: Training, tmp_path: Path) -> None:
    engine = engine_at(known, tmp_path / "begun")
    agent = attached(training, engine, tmp_path)
    if known:
        agent.step()
        training.step(1)

    def interrupted() -> None:
        engine.paused = True
        raise KeyboardInterrupt

    engine.pause = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert (engine.paused, engine.served) == (False, "0" if known else "default")
    engine.__dict__.pop("pause")
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 1 if known else 0)


@pytest.mark.parametrize("by", ["us", "somebody else"])
def test_interrupted_agent_leaves_engine_with_mixed_weights_paused_and_warns(
    by: str, engine: Local, training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = attached(training, engine, tmp_path)
    agent.step()
    training.step(1)
    real = engine.exchange

    def interrupted(text: str) -> list[str]:
        if not isinstance(decode_request(text), ApplyUpdate):
            return real(text)
        engine.workers[0].answer(text)
        raise KeyboardInterrupt

    engine.exchange = interrupted  # type: ignore[method-assign]
    engine.paused = by == "somebody else"
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert (engine.paused, engine.served) == (True, "updating")
    said = {
        "us": "a test stays paused: an update broke off, and its weights are mixed. Start the agent again",
        "somebody else": "do not resume a test: an update broke off in a pause of somebody else, and its weights are "
        "mixed. Start the agent again",
    }
    assert [text for text in said.values() if text in caplog.text] == [said[by]]
    engine.__dict__.pop("exchange")
    with attached(training, engine, tmp_path) as after:
        after.step()
        assert engine.paused is (by == "somebody else")
        engine.paused = False
        must_be(engine, after, 1)


def test_engine_that_was_resumed_with_mixed_weights_is_paused_again(
    engine: Local, training: Training, tmp_path: Path
) -> None:
    with attached(training, engine, tmp_path) as agent:
        agent.step()
    engine.workers[0].answer(encode(ApplyUpdate(None, agent.subscriber.chain.head().position, "", ("q",), True)))  # type: ignore[union-attr]
    report = engine.meet("a test")
    assert report.paused_by_update
    assert engine.paused
    assert engine.served == "updating"
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 0)


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
    agent.catch_up()
    Path(training.url).rename(tmp_path / "away")
    begun = weights_of(SHAPES)
    engine.restart(begun, saved(begun, tmp_path / "begun"))
    with pytest.raises((StoreError, ChannelError)):
        agent.step()
    (tmp_path / "away").rename(training.url)
    must_be(engine, agent, 1)


def test_engine_that_is_gone_has_no_position_and_the_mirror_follows(engine: Local, agent: Agent) -> None:
    assert agent.position is not None

    def gone(name: str) -> EngineReport:
        raise EngineGoneError("it does not answer", url="a test")

    engine.meet = gone  # type: ignore[method-assign]
    with pytest.raises(EngineGoneError):
        agent.step()
    assert agent.position is None
    assert agent.subscriber.position is not None
    assert agent.subscriber.position.version == 1
