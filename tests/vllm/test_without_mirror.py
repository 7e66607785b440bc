"""Workers of real vLLM that hold parts of tensors decode every version by themselves: no mirror is anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines import free_port, serving
from world import attached, must_be, training

import weightcast as wc

CUT = [
    *(wc.Cut(f"*.{name}_proj.weight", axis=0, parts=2) for name in ("q", "k", "v", "gate", "up")),
    *(wc.Cut(f"*.{name}_proj.weight", axis=1, parts=2) for name in ("o", "down")),
]


def test_two_workers_without_a_mirror_follow_and_go_on_after_a_restart_from_any_version(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    begun, port = model("qwen3"), free_port()
    with training(begun, tmp_path / "channel", cut=CUT) as trainer:
        for embedding in (trainer.model.get_input_embeddings(), trainer.model.get_output_embeddings()):
            embedding.requires_grad_(False)  # 520 rows, which vLLM pads: its workers do not hold halves
        with serving(begun, tensor_parallel=2, port=port) as engine:
            for version in (1, 2, 3, 4):
                with attached(trainer.channel, engine, "none") as agent:  # killed after each version
                    assert trainer.step() == version
                    event = agent.wait(version)
                    assert (event["reloaded"], event["unproven"]) == (0, [])
                    must_be(engine, trainer.channel, version)
                    agent.kill()
                if version == 2:
                    restart = trainer.save(tmp_path / "restart", begun)
        with (
            serving(restart, tensor_parallel=2, port=port) as engine,
            attached(trainer.channel, engine, "none") as agent,
        ):
            agent.wait(4)
            must_be(engine, trainer.channel, 4)
            trainer.step()
            agent.wait(5)
            must_be(engine, trainer.channel, 5)
            assert not [one for one in agent.events if one["event"] == "warning" and "reload" in str(one)]
