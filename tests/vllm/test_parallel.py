"""Layers or experts on different ranks: every rank is counted, and all of them are brought to a version, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from engines import serving
from world import attached, must_be, report, training

COMPILED = ("--no-enforce-eager", "--compilation-config", json.dumps({"mode": 2, "backend": "eager"}))
"""On a CPU vLLM 0.32 makes what pipeline ranks send each other in its warm-up alone, which it leaves out when eager."""


def test_pipeline_ranks_that_hold_tied_embeddings_follow_with_and_without_a_mirror(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    begun = model("qwen3")  # its first and its last rank hold the embedding, each has one of the layers
    pipeline = ["--pipeline-parallel-size", "2", *COMPILED]
    with (
        training(begun, tmp_path / "channel") as trainer,
        serving(begun, ranks=2, extra_args=pipeline, env={"TORCH_COMPILE_DISABLE": "0"}) as engine,
    ):
        for mirror, versions in ((tmp_path / "mirror", (1, 2)), ("none", (3, 4))):
            with attached(trainer.channel, engine, mirror) as agent:
                for version in versions:
                    before = engine.generate([1, 2, 3], 12)
                    assert trainer.step() == version
                    event = agent.wait(version)
                    assert (event["reloaded"], event["unproven"]) == (0, [])
                    must_be(engine, trainer.channel, version)
                    assert engine.generate([1, 2, 3], 12).logprobs != before.logprobs
                assert not [event for event in agent.events if event["event"] == "warning"]
        assert [(worker.rank, worker.world) for worker in report(engine).workers] == [(0, 2), (1, 2)]


def test_ranks_that_hold_different_experts_follow(model: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM 0.32 starts so on a CPU, but dies of the first request: its kernel takes each rank to hold all experts."""
    begun = model("moe")
    with (
        training(begun, tmp_path / "channel") as trainer,
        serving(begun, tensor_parallel=2, extra_args=["--enable-expert-parallel"]) as engine,
        attached(trainer.channel, engine, tmp_path / "mirror") as agent,
    ):
        for version in (1, 2):
            assert trainer.step() == version
            event = agent.wait(version)
            assert (event["reloaded"], event["unproven"]) == (0, [])
            must_be(engine, trainer.channel, version)
        assert not [event for event in agent.events if event["event"] == "warning"]
