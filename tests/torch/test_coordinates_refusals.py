"""Models that have no coordinates are refused, with the tensor and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from families import (  # noqa: E402
    NeedsAll,
    built,
)
from torch import distributed, nn  # noqa: E402
from transformers.core_model_loading import Concatenate, WeightConverter  # noqa: E402

from weightcast.errors import UsageError  # noqa: E402
from weightcast.torch.coordinates import coordinates_of  # noqa: E402


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


# Refusals


def holding(tensor: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = nn.Parameter(tensor, requires_grad=False)
    return module


def refusal_of(model: Any, tensor: str | None = "0.weight") -> UsageError:
    with pytest.raises(UsageError) as caught:
        coordinates_of(model)
    assert caught.value.tensor == tensor
    assert tensor is None or caught.value.hint or "not supported yet" in caught.value.problem
    return caught.value


def test_meta_tensors_are_refused() -> None:
    assert "Load the model's weights first" in str(refusal_of(holding(torch.empty(2, 2, device="meta"))))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused() -> None:
    assert "Load the model's weights first" in str(refusal_of(nn.Sequential(nn.LazyLinear(2))))


def test_non_contiguous_parameters_are_refused() -> None:
    error = refusal_of(holding(torch.empty(2, 3).t()))
    assert "not contiguous" in error.problem
    model = holding(torch.empty(2, 3).t())
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # what the hint says
    assert len(coordinates_of(model).pieces) == 2


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    error = refusal_of(holding(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])))
    assert error.problem == "sharded parameters are not supported yet"


def test_parameters_that_deepspeed_partitioned_are_refused() -> None:
    model = holding(torch.empty(0))
    model[0].weight.ds_shape = torch.Size([2, 2])
    assert refusal_of(model).problem == "sharded parameters are not supported yet"


def test_fsdp1_is_refused() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        pass

    error = refusal_of(nn.ModuleDict({"inner": FullyShardedDataParallel(nn.Linear(2, 2))}), "inner")
    assert error.problem == "FullyShardedDataParallel is not supported"
    assert error.hint is not None
    assert "fully_shard" in error.hint


class Wrapping(torch.Tensor):
    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Wrapping((2, 2))


def test_tensors_without_plain_memory_are_refused() -> None:
    assert refusal_of(holding(Wrapping((2, 2)))).problem == "a Wrapping has no plain memory"


def test_sparse_tensors_are_refused() -> None:
    assert refusal_of(holding(torch.eye(2).to_sparse())).problem == "a torch.sparse_coo tensor has no plain memory"


def test_dtypes_that_safetensors_cannot_hold_are_refused() -> None:
    error = refusal_of(holding(torch.ones(2, 2, dtype=torch.complex128)))
    assert error.problem == "safetensors files cannot hold torch.complex128"


def test_converted_tensors_of_such_dtypes_are_refused() -> None:
    class Widen(NeedsAll):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            return {target_patterns[0]: input_dict[source_patterns[0]][0].to(torch.complex128)}

    model = built("qwen3")
    model._weight_conversions = [WeightConverter("a.weight", "q_norm.weight", [Widen()])]
    error = refusal_of(model, "model.layers.0.self_attn.a.weight")
    assert error.problem == "safetensors files cannot hold torch.complex128"


def test_model_without_tensors_is_refused() -> None:
    assert refusal_of(nn.Identity(), None).problem == "the model has no tensors"


def test_partly_shared_memory_is_refused() -> None:
    memory = torch.zeros(10)
    error = refusal_of(nn.ParameterDict({"a": memory[:6], "b": memory[5:]}), "b")
    assert "shares memory with a" in error.problem


def test_two_views_of_the_same_memory_are_refused() -> None:
    memory = torch.zeros(4)
    refusal_of(nn.ParameterDict({"a": memory, "b": memory.view(2, 2)}), "b")
    refusal_of(nn.ParameterDict({"a": memory, "b": memory[:3]}), "b")
    module = nn.ParameterDict({"a": memory})
    module.register_buffer("b", memory.view(torch.int32))
    refusal_of(module, "b")


def test_state_that_is_not_a_tensor_is_refused() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 1}

    error = refusal_of(nn.Sequential(Counting(2, 2)), "0._extra_state")
    assert "not a parameter or buffer" in error.problem


def test_ties_unknown_to_transformers_are_refused(tmp_path: Path) -> None:
    model = built("qwen3")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    error = refusal_of(model, "model.layers.0.mlp.up_proj.weight")
    assert "model.layers.1.mlp.up_proj.weight" in error.problem
    with pytest.raises(RuntimeError, match="not properly defined"):
        model.save_pretrained(tmp_path)


def test_model_that_transformers_cannot_convert_is_refused() -> None:
    model = built("qwen3")
    model._weight_conversions = [WeightConverter(["a.weight", "b.weight"], "q_norm.weight", [Concatenate(0)])]
    model._weight_conversions[0].operations[0].num_shards_attribute = "no_such_attribute"
    assert "save_pretrained" in str(refusal_of(model, None))


@pytest.mark.parametrize("inner", [False, True])
def test_adapters_are_refused(inner: bool) -> None:
    peft_model = type("PeftModel", (nn.Linear,), {"__module__": "peft.peft_model"})(2, 2)
    assert "Merged(peft_model)" in str(refusal_of(nn.Sequential(peft_model) if inner else peft_model, None))
    model = built("qwen3")
    model._hf_peft_config_loaded = True
    assert "Merged(peft_model)" in str(refusal_of(model, None))


def test_quantised_models_are_refused() -> None:
    model = built("qwen3")
    model.hf_quantizer = object()
    assert "quantised" in refusal_of(model, None).problem
