"""The coordinates of wrapped models and of plain modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from families import (  # noqa: E402
    arrays_of,
    assert_is_saved,
    built,
    qwen3,
    table_of,
)
from torch import distributed, nn  # noqa: E402

from weightcast.format.digest import fingerprint  # noqa: E402
from weightcast.format.spec import DTYPES as BIT_DTYPES  # noqa: E402
from weightcast.torch.coordinates import DTYPES, coordinates_of  # noqa: E402
from weightcast.torch.wrappers import unwrapped  # noqa: E402

# Wrappers


def compiled(module: Any) -> Any:
    """Never run, so any backend will do; importing the usual one takes seconds and warns."""
    return torch.compile(module, backend="eager")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_compiled_or_data_parallel_model_has_the_names_of_its_own_layout(family: str) -> None:
    model = built(family)
    wanted = table_of(model)
    for wrapped in (
        compiled(model),
        nn.DataParallel(model),
        compiled(nn.DataParallel(compiled(model))),
    ):
        assert unwrapped(wrapped) is coordinates_of(wrapped).model is model
        assert table_of(wrapped) == wanted


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_model_has_the_names_of_its_own_layout() -> None:
    model = built("qwen3 tied")
    wanted = table_of(model)
    wrapped = compiled(nn.parallel.DistributedDataParallel(model))
    assert coordinates_of(wrapped).model is model
    assert table_of(wrapped) == wanted


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen3_moe", "llava", "t5", "hrm_text"])
def test_model_with_a_compiled_part_has_the_names_of_its_own_layout(family: str, tmp_path: Path) -> None:
    model, same = built(family), built(family)
    for name, module in list(model.named_modules()):
        if name and (
            isinstance(module, tf.PreTrainedModel) or name.endswith(("layers.0", "block.0", "mlp", "lm_head"))
        ):
            model.set_submodule(name, compiled(module))
    assert any("_orig_mod" in name for name in model.state_dict())
    layout = coordinates_of(compiled(model))
    assert layout.model is model
    assert_is_saved(layout, same, tmp_path)
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(piece.source) for piece in layout.pieces} <= own


# Plain modules


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("forgotten", torch.arange(3), persistent=False)
        self.register_parameter("absent", None)
        self.scale = nn.Parameter(torch.tensor(2.0))


PLAIN = [
    "embed.weight",
    "kept",
    "module.bias",
    "module.weight",
    "norm.bias",
    "norm.num_batches_tracked",
    "norm.running_mean",
    "norm.running_var",
    "norm.weight",
    "scale",
]


def test_plain_module_has_the_names_of_its_state_dict() -> None:
    model = Plain()
    layout = coordinates_of(model)
    assert [piece.name for piece in layout.pieces] == PLAIN
    assert layout.aliases == {"head.weight": "embed.weight"}
    assert not layout.made
    state = model.state_dict()
    for piece in layout.pieces:
        assert torch.equal(piece.view(), state[piece.name])
        assert piece.view().data_ptr() == state[piece.name].data_ptr()
    model.norm.train()(torch.randn(5, 4))
    seen = {piece.name: piece.view() for piece in layout.pieces}
    assert seen["norm.num_batches_tracked"].item() == 1
    assert torch.equal(seen["norm.running_mean"], model.norm.running_mean)


def test_wrappers_in_a_plain_module_leave_its_own_names_unchanged() -> None:
    model = Plain()
    model.module = nn.DataParallel(compiled(model.module))
    model.norm = compiled(model.norm)
    assert [piece.name for piece in coordinates_of(nn.DataParallel(model)).pieces] == PLAIN


def test_shared_modules_are_ties() -> None:
    layer = nn.Linear(2, 2)
    layout = coordinates_of(nn.ModuleList([nn.Identity(), layer, compiled(layer)]))
    assert [piece.name for piece in layout.pieces] == ["1.bias", "1.weight"]
    assert layout.aliases == {"2.bias": "1.bias", "2.weight": "1.weight"}


def test_tensors_without_elements_share_nothing() -> None:
    model = nn.ParameterDict({"a": torch.empty(0, 3), "b": torch.empty(0), "c": torch.ones(2)})
    layout = coordinates_of(model)
    assert {piece.name: tuple(piece.view().shape) for piece in layout.pieces} == {"a": (0, 3), "b": (0,), "c": (2,)}
    assert not layout.aliases


@pytest.mark.parametrize("build", [Plain, qwen3], ids=["plain", "qwen3"])
def test_parameters_that_are_parts_of_one_buffer_are_separate_tensors(build: Callable[[], Any]) -> None:
    """As optimizers with flat buffers have them."""
    model = build()
    wanted = arrays_of(coordinates_of(model))
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    layout = coordinates_of(model)
    assert fingerprint(arrays_of(layout)).digest == fingerprint(wanted).digest
    parts = [piece for piece in layout.pieces if isinstance(piece.source, nn.Parameter)]
    assert {piece.source.untyped_storage().data_ptr() for piece in parts} == {flat.data_ptr()}


def test_ties_by_memory_are_ties(tmp_path: Path) -> None:
    model, pretrained = Plain(), built("qwen3 tied")
    model.head.weight = nn.Parameter(model.embed.weight.data)
    pretrained.lm_head.weight = nn.Parameter(pretrained.model.embed_tokens.weight.data)
    assert coordinates_of(model).aliases == {"head.weight": "embed.weight"}
    assert_is_saved(coordinates_of(pretrained), pretrained, tmp_path)
    assert table_of(pretrained) == table_of(built("qwen3 tied"))


def test_dtypes_are_those_of_the_format() -> None:
    assert set(DTYPES.values()) <= BIT_DTYPES.keys()
    assert all(BIT_DTYPES[name].per_value == 8 * dtype.itemsize for dtype, name in DTYPES.items())
    assert {torch.complex128, torch.qint8, torch.quint8, torch.float4_e2m1fn_x2}.isdisjoint(DTYPES)
    parameters = {name: torch.empty(2, 2).to(dtype) for dtype, name in DTYPES.items()}
    module = nn.Module()
    for name, tensor in parameters.items():
        module.register_buffer(name, tensor)
    layout = coordinates_of(module)
    assert {piece.name: DTYPES[piece.source.dtype] for piece in layout.pieces} == {
        name: name for name in DTYPES.values()
    }
