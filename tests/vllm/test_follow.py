"""A trainer, a bucket, an agent and vLLM, each a process of its own but the trainer: every version arrives, proven."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import Generated, serving
from world import answers, attached, client_of, must_be, training

VERSIONS = 20
COMPARED = (1, 11, 20)


@pytest.mark.parametrize(("kind", "tensor_parallel"), [("qwen3", 1), ("qwen3", 2), ("llama", 1), ("moe", 1)])
def test_engine_after_twenty_versions_generates_what_a_fresh_engine_does(
    kind: str, tensor_parallel: int, model: Callable[[str], Path], tmp_path: Path
) -> None:
    begun, channel = model(kind), tmp_path / "channel"
    said: dict[Path, list[Generated]] = {}
    with (
        training(begun, channel) as trainer,
        serving(begun, tensor_parallel=tensor_parallel) as engine,
        attached(trainer.channel, engine, tmp_path / "mirror") as agent,
    ):
        clients = client_of(engine)
        for version in range(1, VERSIONS + 1):
            assert trainer.step() == version
            agent.wait(version)
            must_be(engine, trainer.channel, version)
            if version in COMPARED:
                clients.close()
                said[trainer.save(tmp_path / f"version-{version}", begun)] = answers(engine)
                clients = client_of(engine)
        clients.close()
        assert not [event for event in agent.events if event["event"] == "warning"]

    def fresh(folder: Path) -> list[Generated]:
        with serving(folder, tensor_parallel=tensor_parallel) as other:
            return answers(other)

    with ThreadPoolExecutor(2 if tensor_parallel == 1 else 1) as pool:
        assert dict(zip(said, pool.map(fresh, said), strict=True)) == said
    assert len({str(one) for one in said.values()}) == len(COMPARED)  # the versions do differ
