"""Each rank publishes its own boxes of a sharded model: real processes, compared with the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from sharded_cases import FOUR, TWO, Odd  # noqa: E402
from sharded_models import run_together  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh  # noqa: E402

from weightcast.errors import UsageError  # noqa: E402
from weightcast.format.boxes import Box  # noqa: E402
from weightcast.torch import TorchTarget  # noqa: E402
from weightcast.torch.sharded import ShardedModel, box_of_run, is_sharded  # noqa: E402


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_together(4, FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", [case.__name__ for case in TWO])
def test_boxes_of_two_ranks(case: str, two_ranks: dict[str, str]) -> None:
    assert not two_ranks[case], two_ranks[case]


@pytest.mark.parametrize("case", [case.__name__ for case in FOUR])
def test_boxes_of_four_ranks(case: str, four_ranks: dict[str, str]) -> None:
    assert not four_ranks[case], four_ranks[case]


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Any]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_plain_models_are_not_sharded_and_no_process_group_is_needed() -> None:
    assert not is_sharded(Odd())
    assert not is_sharded(torch.compile(Odd(), backend="eager"))


def test_models_are_not_shared_without_a_process_group() -> None:
    with pytest.raises(UsageError, match="no process group"):
        ShardedModel(Odd())


def test_sharded_and_copied_models_are_recognised(one_process: Any) -> None:
    assert is_sharded(nn.Sequential(nn.parallel.DistributedDataParallel(Odd())))
    model = Odd()
    model.scale = distribute_tensor(model.scale, one_process, [Shard(0)])
    assert is_sharded(model)


def test_patches_are_not_written_into_sharded_models(one_process: Any) -> None:
    model = nn.ParameterDict({"weight": distribute_tensor(torch.ones(2), one_process, [Shard(0)])})
    with pytest.raises(UsageError, match="sharded parameters are not supported yet"):
        TorchTarget(model)


def test_summands_are_refused(one_process: Any) -> None:
    model = Odd()
    model.scale = DTensor.from_local(torch.ones(3), one_process, [Partial()])
    with pytest.raises(UsageError, match="summands") as caught:
        ShardedModel(model)
    assert (caught.value.tensor, bool(caught.value.hint)) == ("scale", True)


def test_rank_that_holds_another_shape_than_its_placements_say_is_refused(one_process: Any) -> None:
    model = Odd()
    wrong = torch.Size((4,))
    model.scale = DTensor.from_local(torch.ones(3), one_process, [Shard(0)], shape=wrong, stride=(1,))
    with pytest.raises(UsageError, match=r"holds \[3\] of the tensor, but by its placements \[4\]") as caught:
        ShardedModel(model)
    assert (caught.value.tensor, bool(caught.value.hint)) == ("scale", True)


def test_sharded_parameters_that_share_memory_are_refused(one_process: Any) -> None:
    weight = distribute_tensor(torch.ones(2), one_process, [Shard(0)])
    model = nn.Module()
    model.a, model.b = nn.Parameter(weight), nn.Parameter(weight.view(2))
    with pytest.raises(UsageError, match="shares memory with a"):
        ShardedModel(model)
    model.b = model.a
    assert ShardedModel(model).whole.aliases == (("b", "a"),)


@pytest.mark.parametrize(
    ("first", "count", "shape", "box"),
    [
        (0, 24, (2, 3, 4), Box.of((0, 0, 0), (2, 3, 4))),
        (12, 12, (2, 3, 4), Box.of((1, 0, 0), (1, 3, 4))),
        (16, 4, (2, 3, 4), Box.of((1, 1, 0), (1, 1, 4))),
        (16, 8, (2, 3, 4), Box.of((1, 1, 0), (1, 2, 4))),
        (13, 2, (2, 3, 4), Box.of((1, 0, 1), (1, 1, 2))),
        (2, 1, (1, 3, 1), Box.of((0, 2, 0), (1, 1, 1))),
        (0, 1, (), Box.of((), ())),
        (3, 2, (2, 3, 4), None),
        (8, 8, (2, 3, 4), None),
        (0, 6, (2, 3, 4), None),
        (12, 13, (2, 3, 4), None),
    ],
)
def test_run_of_elements_as_a_box(first: int, count: int, shape: tuple[int, ...], box: Box | None) -> None:
    assert box_of_run(first, count, shape) == box
