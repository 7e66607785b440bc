"""`WeightcastCallback` where accelerate shards the model with FSDP2 over two processes: each publishes its shards."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import sharded_trainers
from sharded_models import run_together


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(2, sharded_trainers.TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", [case.__name__ for case in sharded_trainers.TWO])
def test_versions_are_the_gathered_model(case: str, two_ranks: dict[str, str]) -> None:
    assert not two_ranks[case], two_ranks[case]
