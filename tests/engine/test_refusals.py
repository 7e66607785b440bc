"""What an agent refuses before it pauses anything, and in what state it leaves an engine when it goes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import Bag

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from local_engine import Local, Training, attached, must_be  # noqa: E402
from sharded_engine import SHAPES, Engine, memory, stream, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.disk.checkpoint import save  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.meeting import MisfitError  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.worker import EngineWorker  # noqa: E402
from weightcast.errors import EngineError  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def saved(weights: Bag, folder: Path) -> Path:
    folder.mkdir()
    save(weights, folder)
    return folder


# -- a channel that does not fit ---------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Shapes, str]] = {
    "a tensor more": (SHAPES | {"sinks": ("BF16", (4,))}, "KeyError: 'sinks'"),
    "another shape": (SHAPES | {"norm": ("BF16", (16,))}, r"\[16\] does not fit into \[8\]"),
    "a tensor less": ({name: one for name, one in SHAPES.items() if name != "norm"}, "covers 1 parameter .*: norm"),
    "part of a fused parameter less": ({name: one for name, one in SHAPES.items() if name != "k"}, "covers .*: qkv"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("folder", [True, False], ids=["known checkpoint", "unknown checkpoint"])
def test_channel_of_another_model_is_refused_before_anything_is_paused_or_fetched(
    other: str,
    folder: bool,
    training: Training,
    tmp_path: Path,
) -> None:
    shapes, problem = OTHERS[other]
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun") if folder else None)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        before = [memory(model) for model in engine.models]
        wc.init(tmp_path / "wrong", weights_of(shapes))
        engine.calls.clear()
        with Agent(str(tmp_path / "wrong"), engine, tmp_path / "other") as wrong:
            with pytest.raises(MisfitError, match=problem) as refused:
                wrong.step()
            assert wrong.subscriber.position is None
        assert "Name the channel of the model" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert set(engine.calls) == {"hello", "survey"}
        assert [memory(model) for model in engine.models] == before
        training.step(1)  # the agent that follows the right channel notices nothing
        update = agent.step()
        assert update is not None
        assert (update.reloaded, update.position.version) == (0, 1)
        must_be(engine, agent, 1)
        with pytest.raises(EngineError, match="follows a channel of other tensors"):
            prove(engine, wrong.subscriber.chain)


def test_verify_of_an_engine_that_was_never_taught_refuses_the_wrong_channel(
    training: Training,
    tmp_path: Path,
) -> None:
    wc.init(tmp_path / "wrong", weights_of(OTHERS["a tensor less"][0]))
    engine = Local(training.weights)
    with Agent(str(tmp_path / "wrong"), engine, tmp_path / "other") as wrong, pytest.raises(MisfitError, match="norm"):
        prove(engine, wrong.subscriber.chain)


def through_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a tensor without memory cannot have."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(raw.copy()).view(tensor.dtype).reshape(tensor.shape)


class Unfollowed(Local):
    """An engine whose loader cannot be followed, whatever it is given."""

    def _worker(self, engine: Engine, model: torch.nn.Module, *rest: Any) -> EngineWorker:
        real = engine.load

        def load(model: torch.nn.Module, given: Any) -> None:
            real(model, ((name, through_numpy(x)) for name, x in given))

        object.__setattr__(engine, "load", load)
        return super()._worker(engine, model, *rest)


def test_engine_whose_loader_cannot_be_followed_is_reloaded_if_its_own_checkpoint_cannot_either(
    training: Training,
    tmp_path: Path,
) -> None:
    engine = Unfollowed(training.weights, saved(training.weights, tmp_path / "begun"))
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        update = agent.step()
        assert update is not None
        assert (update.reloaded, set(update.unproven)) == (len(SHAPES), set(SHAPES))
        assert not engine.paused
        for rank, model in enumerate(engine.models):
            same = Engine(rank).make()
            Engine(rank).load(same, stream(training.weights))
            assert memory(same) == memory(model)


# -- what can be neither placed nor reloaded ---------------------------------------------------------------------------


class Packed(Local):
    """An engine that packs after loading, and says that its own reload would not."""

    reason = "its reload leaves them unpacked"

    def _worker(
        self, engine: Engine, model: torch.nn.Module, folder: Path | None, packed: bool, rank: int
    ) -> EngineWorker:
        def reload(given: Any) -> None:
            raise AssertionError("it said that this is not possible")

        def learned(table: TensorTable) -> Any:
            return learn(model, lambda given: engine.load(model, given), table)

        return EngineWorker(model, learned, reload, str(folder or "nowhere"), rank, 2, lambda: self.reason)


@pytest.mark.parametrize("known", [True, False], ids=["found by comparing with its checkpoint", "nothing to compare"])
def test_engine_that_can_neither_be_patched_nor_reloaded_is_never_paused(
    known: bool,
    training: Training,
    tmp_path: Path,
) -> None:
    begun = changed(weights_of(SHAPES), 0.5, 99)
    engine = Packed(begun, saved(begun, tmp_path / "begun") if known else None, packed=True)
    before = [memory(model) for model in engine.models]
    with attached(training, engine, tmp_path) as agent, pytest.raises(MisfitError) as refused:
        agent.step()
    text = str(refused.value)
    assert "can neither place nor reload" in text
    assert engine.reason in text
    assert "gate, up" in text if known else "experts.0.down" in text
    assert "Restart vLLM from the mirror" in text
    assert not {"pause", "update"} & set(engine.calls)
    assert [memory(model) for model in engine.models] == before
    assert engine.served == "default"


def test_engine_that_cannot_reload_but_can_be_patched_follows(training: Training, tmp_path: Path) -> None:
    engine = Packed(training.weights)
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


# -- tensors and parameters without each other -------------------------------------------------------------------------


class Skipping(Local):
    """An engine that skips the tensor ``norm`` when it loads, and keeps what its parameter had."""

    def _worker(self, engine: Engine, model: torch.nn.Module, *rest: Any) -> EngineWorker:
        real = engine.load
        object.__setattr__(engine, "load", lambda m, given: real(m, ((n, t) for n, t in given if n != "norm")))
        return super()._worker(engine, model, *rest)


def test_what_has_no_counterpart_is_named_once_and_never_called_proven(
    training: Training,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Skipping(training.weights, saved(training.weights, tmp_path / "begun"))
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        agent.step()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [
            "the engine has no place for 1 tensor of the channel: norm",
            "neither the channel nor the engine's own checkpoint covers 1 parameter of the engine: norm",
        ]
        proof = prove(engine, agent.subscriber.chain)
        assert (proof.holds, proof.version, proof.absent, dict(proof.uncovered)) == (True, 1, ("norm",), {"norm": 8})
        assert "to the last bit" not in proof.verdict
        assert proof.verdict == (
            f"version 1: all {len(SHAPES) - 1} tensors of the channel that have a place in the engine, live on all "
            "workers; 1 tensor has no place: norm; 1 parameter is covered by no tensor: norm"
        )
        assert proof.as_json() == {"wrong": {}, "unproven": {}, "absent": ["norm"], "uncovered": {"norm": 8}}
        whole = Local(training.weights)
        with Agent(training.url, whole, tmp_path / "whole") as other:
            other.step()
            assert prove(whole, other.subscriber.chain).verdict == "version 1 to the last bit, live on all workers"


def test_engine_without_an_agent_and_with_absent_tensors_is_no_version_by_its_digest(
    training: Training,
    tmp_path: Path,
) -> None:
    engine = Skipping(training.weights, saved(training.weights, tmp_path / "begun"))
    with attached(training, engine, tmp_path) as agent:
        proof = prove(engine, agent.subscriber.chain)
    assert not proof.holds
    assert "where it lives was not proven" in proof.unproven["q"]


def test_coverage_counts_every_element_and_no_padding() -> None:
    for rank in (0, 1):
        engine = Engine(rank)
        model = engine.make()

        def load(given: Any, engine: Engine = engine, model: torch.nn.Module = model) -> None:
            engine.load(model, given)

        table = weights_of(SHAPES).table
        assert learn(model, load, table).uncovered == {}
        some = TensorTable.of([spec for spec in table if spec.name not in ("v", "experts.1.up", "scale")])
        assert learn(model, load, some).uncovered == {"qkv": 16, "w13": 24, "scale": 1}
        assert learn(model, load, TensorTable.of([TensorSpec("norm", "BF16", (9,))])).broken is not None


# -- how an agent leaves -----------------------------------------------------------------------------------------------


def test_update_that_wrote_nothing_resumes_an_engine_at_no_version(training: Training, tmp_path: Path) -> None:
    begun = changed(weights_of(SHAPES), 0.5, 99)
    engine = Local(begun, saved(begun, tmp_path / "begun"))
    real = engine.pause

    def pause(clear_cache: bool) -> None:
        for one in engine.workers:
            one.close()  # what was staged is gone
        real(clear_cache)

    engine.pause = pause  # type: ignore[method-assign]
    with attached(training, engine, tmp_path) as agent:
        with pytest.raises(EngineError, match="of no use"):
            agent.step()
        assert (engine.paused, engine.served) == (False, "default")
        engine.pause = real  # type: ignore[method-assign]
        agent.step()
        must_be(engine, agent, 0)


@pytest.mark.parametrize("known", [True, False], ids=["at a version", "at none"])
def test_agent_interrupted_in_a_pause_resumes_an_engine_whose_weights_are_whole(
    known: bool,
    training: Training,
    tmp_path: Path,
) -> None:
    begun = weights_of(SHAPES) if known else changed(weights_of(SHAPES), 0.5, 99)
    engine = Local(begun, saved(begun, tmp_path / "begun"))
    agent = attached(training, engine, tmp_path)
    if known:
        agent.step()

    def interrupted(info: object) -> None:
        raise KeyboardInterrupt

    real, engine.update = engine.update, interrupted  # type: ignore[method-assign]
    training.step(1)
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert (engine.paused, engine.served) == (False, "0" if known else "default")
    engine.update = real  # type: ignore[method-assign]
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 1)


def test_agent_interrupted_over_mixed_weights_leaves_the_engine_paused_and_says_so(
    training: Training,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Local(training.weights)
    agent = attached(training, engine, tmp_path)
    agent.step()

    def interrupted(info: Mapping[str, Any]) -> None:
        engine.workers[0].apply(info["job"], info["position"], info["mirror"], list(info["reload"]))
        raise KeyboardInterrupt

    real, engine.update = engine.update, interrupted  # type: ignore[method-assign]
    training.step(1)
    with pytest.raises(KeyboardInterrupt), agent:
        agent.step()
    assert engine.paused
    assert "stays paused: an update broke off, and its weights are mixed. Start the agent again" in caplog.text
    engine.update = real  # type: ignore[method-assign]
    with attached(training, engine, tmp_path) as after:
        after.step()
        must_be(engine, after, 1)
