"""Sharded publishing in real processes with gloo: every version is, bit for bit, what the gathered model is."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import sharded_runs  # noqa: E402
from sharded_models import FORKED, run_together, start_forking  # noqa: E402

TWO = [
    sharded_runs.fsdp,
    sharded_runs.fsdp_mixed_precision,
    sharded_runs.fsdp_uneven,
    sharded_runs.fsdp_of_fused_experts,
    sharded_runs.ddp,
]
FOUR = [sharded_runs.fsdp_over_tensor_parallel, sharded_runs.hsdp, sharded_runs.experts_in_parallel]


@pytest.fixture(scope="module", autouse=True)
def _forking() -> None:
    start_forking()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(2, TWO, tmp_path_factory.mktemp("two"), FORKED)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(4, FOUR, tmp_path_factory.mktemp("four"), FORKED)


@pytest.mark.parametrize("case", [case.__name__ for case in TWO])
def test_versions_of_two_ranks(case: str, two_ranks: dict[str, str]) -> None:
    assert not two_ranks[case], two_ranks[case]


@pytest.mark.parametrize("case", [case.__name__ for case in FOUR])
def test_versions_of_four_ranks(case: str, four_ranks: dict[str, str]) -> None:
    assert not four_ranks[case], four_ranks[case]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("late", [sharded_runs.Late, sharded_runs.LateToSums])
def test_rank_that_is_late_is_named_by_all_others(late: type[sharded_runs.Late], victim: int, tmp_path: Path) -> None:
    """gloo ends all connections of a rank that gives up waiting, so the others must learn from it whom it missed."""
    found = run_together(3, [late(victim)], tmp_path, FORKED)["late"]
    assert not found, found
