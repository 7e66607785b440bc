"""Updates that fail, agents that are killed, engines that restart: the engine never serves a mix of versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached, must_be, other_weights, saved  # noqa: E402
from sharded_engine import SHAPES, weights_of  # noqa: E402

from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.messages import ApplyUpdate, Request, StagePatches, WorkerState  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.protocol import encode  # noqa: E402
from weightcast.errors import ChannelError, EngineError, EngineGoneError, StoreError  # noqa: E402

# -- workers that cannot be right --------------------------------------------------------------------------------------


def test_engine_that_claims_more_workers_than_answer_is_refused(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    real = engine.ask

    def ask(request: Request) -> list[Any]:
        return [replace(one, world=2**60) if isinstance(one, WorkerState) else one for one in real(request)]

    engine.ask = ask  # type: ignore[method-assign]
    with attached(training, engine, tmp_path) as agent, pytest.raises(EngineError, match="not all workers answer"):
        agent.step()


# -- updates that fail -------------------------------------------------------------------------------------------------


def test_update_that_fails_on_one_worker_is_repaired_before_the_engine_resumes(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        real, applied = LiveParameters.apply, []

        def apply(live: LiveParameters, *rest: Any) -> None:
            applied.append(live)
            if len(applied) == 2:  # the second worker's
                raise MemoryError("no room")
            real(live, *rest)

        monkeypatch.setattr(LiveParameters, "apply", apply)
        engine.calls.clear()
        update = agent.step()
        assert update is not None
        assert update.reloaded == len(SHAPES)
        assert engine.calls.count("resume") == 1
        assert engine.calls.index("resume") > engine.calls.index("reload 1")
        must_be(engine, agent, 1)


def test_worker_that_misses_an_update_is_reloaded_before_the_engine_resumes(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        real, texts = engine.workers[1].apply, []

        def apply(text: str) -> None:
            texts.append(text)
            if len(texts) > 1:
                real(text)

        monkeypatch.setattr(engine.workers[1], "apply", apply)
        engine.calls.clear()
        update = agent.step()
        assert update is not None
        assert update.reloaded == len(SHAPES)
        assert engine.calls.index("resume") > engine.calls.index("reload 1")
        must_be(engine, agent, 1)


def test_engine_that_cannot_be_updated_stays_paused_until_it_can(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)

    def apply(*_: object) -> None:
        raise ZeroDivisionError

    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
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


@pytest.mark.parametrize("known", [True, False], ids=["at a version", "at none"])
def test_update_whose_staged_job_is_lost_writes_nothing_and_resumes_the_engine(
    known: bool, training: Training, tmp_path: Path
) -> None:
    begun = weights_of(SHAPES) if known else other_weights()
    engine = Local(begun, saved(begun, tmp_path / "begun"))
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
        engine.pause = real  # type: ignore[method-assign]
        agent.step()
        must_be(engine, agent, 1 if known else 0)


def test_verification_during_an_update_does_not_drop_what_was_staged(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        real = engine.pause

        def pause(clear_cache: bool) -> None:
            prove(engine, agent.subscriber.chain)
            real(clear_cache)

        monkeypatch.setattr(engine, "pause", pause)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


# -- memory that somebody else changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("touched", [True, False])
def test_flipped_bit_is_named_and_repaired(touched: bool, training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
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


def test_engine_that_changes_its_own_weights_is_brought_back(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        for one, model in zip(engine.workers, engine.models, strict=True):
            one.forget()
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.zero_()
        assert agent.step() is not None
        must_be(engine, agent, 0)


# -- agents that are killed --------------------------------------------------------------------------------------------


def test_new_agent_finishes_what_a_killed_one_began(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
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


@pytest.mark.parametrize("known", [True, False], ids=["at a version", "at none"])
def test_interrupted_agent_resumes_an_engine_whose_weights_are_whole(
    known: bool, training: Training, tmp_path: Path
) -> None:
    begun = weights_of(SHAPES) if known else other_weights()
    engine = Local(begun, saved(begun, tmp_path / "begun"))
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


def test_interrupted_agent_leaves_an_engine_with_mixed_weights_paused_and_says_so(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Local(training.weights)
    agent = attached(training, engine, tmp_path)
    agent.step()

    def interrupted(update: ApplyUpdate) -> None:
        engine.workers[0].apply(encode(update))
        raise KeyboardInterrupt

    engine.update = interrupted  # type: ignore[method-assign]
    training.step(1)
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert engine.paused
    assert "stays paused: an update broke off, and its weights are mixed. Start the agent again" in caplog.text
    _live_again(engine)
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 1)


def test_engine_that_somebody_else_paused_is_updated_and_stays_paused(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        engine.paused = True
        agent.step()
        assert engine.paused
        assert engine.served == "1"


# -- engines that restart or are gone ----------------------------------------------------------------------------------


def test_engine_that_restarts_during_an_outage_gets_what_the_mirror_has(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        agent.step()
        Path(training.url).rename(tmp_path / "away")
        begun = weights_of(SHAPES)
        engine.restart(begun, saved(begun, tmp_path / "begun"))
        with pytest.raises((StoreError, ChannelError)):
            agent.step()
        (tmp_path / "away").rename(training.url)
        must_be(engine, agent, 1)


def test_engine_that_is_gone_has_no_position_and_the_mirror_moves_on(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        assert agent.position is not None
        training.step(1)

        def gone(request: Request[Any]) -> Any:
            raise EngineGoneError("it does not answer", url="a test")

        engine.ask = gone  # type: ignore[method-assign]
        with pytest.raises(EngineGoneError):
            agent.step()
        assert agent.position is None
        assert agent.subscriber.position is not None
        assert agent.subscriber.position.version == 1
