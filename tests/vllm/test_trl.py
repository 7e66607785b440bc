"""Real TRL trains a model whose rollouts come from real vLLM; a bucket is all that joins them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trl_deployment import (
    STEPS,
    assert_checkpoint_is_pulled,
    check_rollouts,
    check_sizes,
    deployed,
    step,
    tell,
    with_template,
)


def test_every_step_of_trl_is_live_in_vllm_and_rollouts_carry_their_version(
    chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed("s3", chatting, tmp_path) as deployment:
        syncs = [step(deployment) for _ in range(1 + STEPS)]
        deployment.training.wait()
        assert [sync["version"] for sync in syncs] == list(range(1 + STEPS))
        check_rollouts(deployment)
        deployment.must_be_sound()
    check_sizes(syncs[1:])
    with capsys.disabled():
        tell("s3", syncs[1:])


def test_experts_that_trl_streams_fused_are_live_in_vllm_and_are_those_of_its_checkpoint(
    model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = with_template(model("moe"), tmp_path / "moe")
    with deployed("folder", mixture, tmp_path) as deployment:
        syncs = [step(deployment) for _ in range(1 + STEPS)]
        deployment.training.wait()
        assert [sync["version"] for sync in syncs] == list(range(1 + STEPS))
        check_rollouts(deployment)
        names = assert_checkpoint_is_pulled(deployment)
    check_sizes(syncs[1:])
    assert any(name.endswith("experts.3.gate_proj.weight") for name in names)
    with capsys.disabled():
        tell("a mixture", syncs[1:])


def test_training_continues_after_agent_engine_and_trainer_are_killed(
    chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed("hf", chatting, tmp_path) as deployment:
        syncs = [step(deployment) for _ in range(2)]
        deployment.agent.kill()
        deployment.training.go_on()
        deployment.start_agent()
        syncs.append(step(deployment))
        deployment.kill_engine()
        deployment.training.go_on()
        deployment.start_engine()
        syncs.append(step(deployment))
        check_rollouts(deployment)
        deployment.training.kill()
        deployment.start_training()
        while syncs[-1]["step"] < STEPS:
            syncs.append(step(deployment))
        deployment.training.wait()
        check_rollouts(deployment)
        deployment.must_be_sound()
    versions = [sync["version"] for sync in syncs]
    assert versions == sorted(versions)
    assert versions[-1] >= STEPS
    learned = [sync for sync in syncs if "detect" in sync["seconds"]]  # not those that took up the channel
    check_sizes(learned)
    with capsys.disabled():
        tell("hf", learned)
