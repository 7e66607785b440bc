"""Sharded publishing in real processes with gloo: every version is, bit for bit, what the gathered model is."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import sharded_runs  # noqa: E402
from sharded_models import run_together, run_with_a_victim  # noqa: E402

from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.store.file import FileStore  # noqa: E402

TWO = [sharded_runs.fsdp, sharded_runs.fsdp_mixed_precision, sharded_runs.fsdp_uneven, sharded_runs.ddp]
FOUR = [sharded_runs.fsdp_over_tensor_parallel, sharded_runs.hsdp]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(4, FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", [case.__name__ for case in TWO])
def test_versions_of_two_ranks(case: str, two_ranks: dict[str, str]) -> None:
    assert not two_ranks[case], two_ranks[case]


@pytest.mark.parametrize("case", [case.__name__ for case in FOUR])
def test_versions_of_four_ranks(case: str, four_ranks: dict[str, str]) -> None:
    assert not four_ranks[case], four_ranks[case]


@pytest.mark.parametrize(("moment", "victim"), [(0.05, 0), (0.1, 1), (0.23, 2), (0.4, 0)])
def test_killed_rank_leaves_a_channel_that_goes_on(moment: float, victim: int, tmp_path: Path) -> None:
    """SIGKILL of one of three ranks; then two ranks go on, and every version can be followed."""
    channel, killed, again = tmp_path / "channel", tmp_path / "killed", tmp_path / "again"
    killed.mkdir()
    again.mkdir()
    case = sharded_runs.UntilKilled(channel, moment, victim)
    assert run_with_a_victim(3, case, killed, victim) == ["", ""]
    before = Chain.open(FileStore(channel)).head()
    assert before is not None
    sharded_runs.followed(channel)
    found = run_together(2, [sharded_runs.Again(channel)], again)["again"]
    assert not found, found
    after = Chain.open(FileStore(channel)).head()
    assert after is not None
    assert after.position.version > before.position.version
    sharded_runs.followed(channel)
