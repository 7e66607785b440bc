"""What an agent refuses before it pauses anything, and what it says about tensors and parameters left out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached, must_be, other_weights, saved  # noqa: E402
from sharded_engine import SHAPES, Engine, memory, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.errors import EngineError, MisfitError  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


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
        training.step(1)  # the agent of the right channel is not disturbed
        update = agent.step()
        assert update is not None
        assert (update.reloaded, update.position.version) == (0, 1)
        must_be(engine, agent, 1)
        with pytest.raises(EngineError, match="follows a channel of other tensors"):
            prove(engine, wrong.subscriber.chain)


def test_verification_against_the_wrong_channel_is_refused(
    training: Training,
    tmp_path: Path,
) -> None:
    wc.init(tmp_path / "wrong", weights_of(OTHERS["a tensor less"][0]))
    engine = Local(training.weights)
    with Agent(str(tmp_path / "wrong"), engine, tmp_path / "other") as wrong, pytest.raises(MisfitError, match="norm"):
        prove(engine, wrong.subscriber.chain)


# -- what can be neither placed nor reloaded ---------------------------------------------------------------------------


REASON = "its reload leaves them unpacked"


@pytest.mark.parametrize("known", [True, False], ids=["found by comparing with its checkpoint", "nothing to compare"])
def test_engine_that_can_neither_be_patched_nor_reloaded_is_never_paused(
    known: bool,
    training: Training,
    tmp_path: Path,
) -> None:
    begun = other_weights()
    folder = saved(begun, tmp_path / "begun") if known else None
    engine = Local(begun, folder, packed=True, cannot_reload=REASON)
    before = [memory(model) for model in engine.models]
    with attached(training, engine, tmp_path) as agent, pytest.raises(MisfitError) as refused:
        agent.step()
    text = str(refused.value)
    assert "can neither place nor reload" in text
    assert REASON in text
    assert "gate, up" in text if known else "experts.0.down" in text
    assert "Restart vLLM from the mirror" in text
    assert not {"pause", "update"} & set(engine.calls)
    assert [memory(model) for model in engine.models] == before
    assert engine.served == "default"


def test_engine_that_cannot_reload_but_can_be_patched_follows(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, cannot_reload=REASON)
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


# -- tensors and parameters without each other -------------------------------------------------------------------------


def test_tensor_without_a_place_is_refused_unless_a_part_is_allowed(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), skips="norm")
    with attached(training, engine, tmp_path) as agent, pytest.raises(MisfitError) as refused:
        agent.step()
    assert "no place for 1 tensor of the channel: norm" in str(refused.value)
    assert "--allow-partial" in (refused.value.hint or "")
    assert set(engine.calls) == {"hello", "survey"}
    assert engine.served == "default"


def test_channel_without_some_of_the_engines_tensors_is_followed_if_a_part_is_allowed(
    training: Training, tmp_path: Path
) -> None:
    wc.init(tmp_path / "less", weights_of({name: one for name, one in SHAPES.items() if name != "norm"}))
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"))
    with Agent(str(tmp_path / "less"), engine, tmp_path / "mirror", allow_partial=True) as agent:
        agent.step()
        assert engine.served == "0"
        proof = prove(engine, agent.subscriber.chain)
        assert (proof.holds, dict(proof.uncovered)) == (True, {"norm": 8})
        assert "to the last bit" not in proof.verdict


def test_tensor_and_parameter_without_counterpart_are_named_once_and_never_verified(
    training: Training,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), skips="norm")
    with attached(training, engine, tmp_path, allow_partial=True) as agent:
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


def test_engine_with_absent_tensors_and_no_agent_is_at_no_version(
    training: Training,
    tmp_path: Path,
) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), skips="norm")
    with attached(training, engine, tmp_path) as agent:
        proof = prove(engine, agent.subscriber.chain)
    assert not proof.holds
    assert "its layout was not verified" in proof.unproven["q"]


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


def test_agent_that_is_refused_gives_the_engine_back(training: Training, tmp_path: Path) -> None:
    wc.init(tmp_path / "wrong", weights_of(OTHERS["another shape"][0]))
    engine = Local(training.weights)
    with Agent(str(tmp_path / "wrong"), engine, tmp_path / "other") as wrong:
        with pytest.raises(MisfitError):
            wrong.step()
        assert engine.report().owner is not None
    assert engine.report().owner is None
