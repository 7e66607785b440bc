"""Ways to share a model among processes, each trained for a few steps: run by `sharded_models.run_together`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from sharded_models import Checked, gathered
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from training import Small, backward

from weightcast.errors import UsageError
from weightcast.torch.sharded import ShardedModel


class Odd(nn.Module):
    """Dimensions that no number of ranks divides, some smaller than it, also of tied weights; no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.last = nn.Linear(3, 1)
        self.twin = nn.Linear(3, 1)
        self.twin.weight, self.twin.bias = self.last.weight, self.last.bias
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.down(torch.relu(self.up(x))))
        return self.last(hidden * self.scale.to(hidden.dtype)) + self.twin(hidden)


def descend(model: nn.Module, width: int = 5) -> Callable[[int], None]:
    def one(step: int) -> None:
        torch.manual_seed(step)
        model(torch.randn(8, width)).float().square().sum().backward()

    return one


def invent(model: nn.Module) -> Callable[[int], None]:
    """Gradients out of nothing, for models that could not compute as they are shared here."""

    def one(step: int) -> None:
        random = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=random)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                everywhere = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
                gradient = everywhere.redistribute(placements=parameter.placements)
            parameter.grad = gradient

    return one


def causal(model: nn.Module) -> Callable[[int], None]:
    def one(step: int) -> None:
        torch.manual_seed(step)
        tokens = torch.randint(3, 60, (2, 6))
        model(input_ids=tokens, labels=tokens).loss.backward()

    return one


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def trained(
    model: nn.Module, plain: nn.Module, backward: Callable[[int], None], steps: int = 4, **options: Any
) -> None:
    checked = Checked(model, plain, **options)
    checked.train(steps, backward)
    checked.close()


def experts_by_fsdp(dimension: int) -> Any:
    """A mixture whose fused experts are cut along a dimension."""
    model = families.built("qwen3_moe", torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=experts_along(dimension))
    fully_shard(model.model)
    fully_shard(model)
    return model


def experts_over(mesh: Any, dimension: int) -> Any:
    """A mixture of which only the fused experts are shared, along a dimension."""
    model = families.tf.Qwen3MoeForCausalLM(config_with_odd_experts())
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(dimension)])))
    return model


def experts_along(dimension: int) -> Callable[[nn.Parameter], Any]:
    return lambda parameter: Shard(dimension if parameter.ndim == 3 else 0)


# -- two ranks ---------------------------------------------------------------------------------------------------------


def fsdp() -> None:
    model = Small(24, 41)
    fully_shard(model.up)
    fully_shard(model)
    trained(model, Small(24, 41), lambda step: backward(model, 2 * step + distributed.get_rank()))


def fsdp_uneven() -> None:
    """The last layer has one row: one of the ranks holds nothing of it."""
    model = Odd()
    fully_shard(model.up)
    fully_shard(model)
    trained(model, Odd(), descend(model), dtype=None)


def fsdp_mixed_precision() -> None:
    model = Odd()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.up, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    trained(model, Odd(), descend(model))


def fsdp_left_unsharded() -> None:
    """Evaluation puts unsharded parameters of another dtype into the modules, and leaves them there."""
    model = Odd()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model.up, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(8, 5))
        assert not isinstance(model.up.weight, DTensor)
        assert model.up.weight.dtype == torch.bfloat16
        for live in checked.lives.values():
            assert live.relocate() == []

    checked = Checked(model, Odd())
    checked.train(4, descend(model), evaluate)
    evaluate()
    assert ShardedModel(model, "BF16").places == checked.live.places
    checked.close()


def fsdp_bf16() -> None:
    model = Odd().bfloat16()
    fully_shard(model)

    def one(step: int) -> None:
        torch.manual_seed(step)
        model(torch.randn(8, 5, dtype=torch.bfloat16)).float().square().sum().backward()

    trained(model, Odd().bfloat16(), one, lr=1e-2)


def fsdp_of_fused_experts() -> None:
    for dimension in range(3):
        model = experts_by_fsdp(dimension)
        trained(model, families.built("qwen3_moe", torch.float32), causal(model), steps=2)
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in ShardedModel(model).whole


def fsdp_of_tied_weights() -> None:
    model = families.built("qwen3 tied", torch.float32)
    fully_shard(model.model.layers[0])
    fully_shard(model)
    compiled: Any = torch.compile(model, backend="eager")
    trained(compiled, families.built("qwen3 tied", torch.float32), causal(model), steps=2)


def fsdp_by_classes() -> None:
    """Conversions that transformers looks up by the class of a part, which `fully_shard` has replaced."""
    model = families.built("llava")
    for part in (model.model.language_model, model.model, model):
        fully_shard(part)
    Checked(model, families.built("llava"), dtype=None).close()


def fsdp_of_compiled_parts() -> None:
    model = Odd()
    model.up.compile(backend="eager")
    model.down = torch.compile(model.down, backend="eager")
    fully_shard(model)
    trained(model, Odd(), descend(model))


def ddp() -> None:
    """The statistics of batches differ between the ranks: all are rank 0's."""
    model = nn.parallel.DistributedDataParallel(Small(24, 40))
    checked = Checked(model, Small(24, 40))
    checked.train(4, lambda step: backward(model, 2 * step + distributed.get_rank()))
    owned = gathered(sum(place.part.nbytes for place in checked.live.places.values()))
    largest = max(spec.nbytes for spec in checked.live.whole)
    assert max(owned) - min(owned) <= largest
    assert min(owned) > 0
    buffers = {name for name in checked.live.places if "running" in name or name == "scale"}
    assert len(buffers) == (0 if distributed.get_rank() else 3)
    checked.close()


def replaced_parameters_are_followed() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    fully_shard(model)
    checked = Checked(model, nn.Sequential(nn.Linear(5, 3)))
    replace(model)
    for detect in checked.lives:
        checked.follow(detect)
    checked.compare()
    model.double()
    for live in checked.lives.values():
        refused(live.relocate, "the watched tensor was moved, converted or replaced")
    checked.close()


def untied_parameters_are_refused() -> None:
    """By all ranks, also the one that holds nothing of them."""
    model = Odd()
    fully_shard(model)
    checked = Checked(model, Odd())
    replace(model)
    for live in checked.lives.values():
        refused(live.relocate, "the watched tensor was moved, converted or replaced")
    checked.close()


def replace(model: nn.Module) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


def edits_are_found() -> None:
    """Through the DTensor and through the local tensor at once; past torch's counters, with the next step."""
    edits = [
        lambda weight: weight.mul_(2),
        lambda weight: weight.to_local().mul_(2),
        lambda weight: weight.to_local().data.mul_(2),
    ]
    for edit in edits:
        model = Odd()
        fully_shard(model)
        checked = Checked(model, Odd())
        with torch.no_grad():
            edit(model.up.weight)
        checked.follow("device")
        if edit is edits[-1]:
            checked.step(lambda model=model: descend(model)(1))
        checked.follow("transient")
        checked.compare()
        checked.close()


def refused(action: Callable[[], Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        action()
    assert caught.value.hint


def rank_with_nothing() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3, bias=False))
    checked = Checked(model, nn.Linear(5, 3, bias=False))
    checked.train(2, descend(model))
    assert gathered(len(checked.live.table)) == [1, 0]
    checked.close()


def rows_that_lie_apart_are_refused() -> None:
    mesh = mesh_of(2)
    rows = DTensor.from_local(torch.ones(4, 2), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    refused(lambda: ShardedModel(nn.ParameterDict({"rows": rows})), "lie apart")


def computed_tensors_are_refused() -> None:
    model = families.built("hrm_text")
    fully_shard(model)
    refused(lambda: ShardedModel(model), "computed from parameters that are sharded")


# -- four ranks --------------------------------------------------------------------------------------------------------


def hsdp() -> None:
    model, mesh = Odd(), mesh_of(2, 2)
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(model, Odd(), descend(model))
    owned = gathered(len(ShardedModel(model).places))
    assert all(owned), owned
    if distributed.get_rank() < 2:
        places = ShardedModel(model, ranks=(0, 1)).places
        assert places.keys() - {"last.weight", "last.bias", "scale"} == {
            f"{part}.{name}" for part in ("up", "down") for name in ("weight", "bias")
        }
    else:
        refused(lambda: ShardedModel(model, ranks=(0, 1)), "not one of those that publish")
    if distributed.get_rank() in (0, 2):
        refused(lambda: ShardedModel(model, ranks=(0, 2)), "none of the ranks that publish holds a part")


def fsdp_over_tensor_parallel() -> None:
    mesh = mesh_of(2, 2)
    for width in (8, 10, 7):
        model, plain = (nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)) for _ in range(2))
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["outer"])
        trained(model, plain, descend(model, 6) if width == 8 else invent(model), steps=2)


def tensor_parallel_replicas() -> None:
    """Each of two replicas has a mesh of its own, and only that; or one that was flattened."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "inner", "none"))
    for part in (mesh["inner"], mesh["outer"], mesh["inner", "none"]._flatten()):
        model, plain = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        parallelize_module(model, part, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        trained(model, plain, descend(model, 6), steps=2)


def experts_in_parallel() -> None:
    """The experts of each rank come as whole tensors; a cut through gate and up comes as boxes of both."""
    mesh = mesh_of(4)
    for dimension in range(3):
        model = experts_over(mesh, dimension)
        checked = Checked(model, families.tf.Qwen3MoeForCausalLM(config_with_odd_experts()))
        checked.train(2, invent(model))
        if dimension == 0:
            places = [place for name, place in checked.live.places.items() if ".experts." in name]
            assert len(places) == 2 * 3
            assert all(place.box.is_all_of(place.spec.shape) for place in places)
        checked.close()


def config_with_odd_experts() -> Any:
    sizes = {**families.SMALL, **families.EXPERTS, "moe_intermediate_size": 5}
    return families.tf.Qwen3MoeConfig(**sizes, head_dim=8)


def placements_of_every_kind() -> None:
    """Two cuts of one dimension, of two dimensions, copies; a scalar; a buffer."""
    mesh = mesh_of(2, 2)
    kinds = {
        "twice": [Shard(0), Shard(0)],
        "crossed": [Shard(1), Shard(0)],
        "copied": [Replicate(), Replicate()],
        "inner": [Replicate(), Shard(2)],
        "outer": [Shard(1), Replicate()],
    }

    def made(sharded: bool) -> nn.Module:
        model = nn.ParameterDict()
        for name, placements in kinds.items():
            tensor = torch.randn(5, 6, 3)
            model[name] = distribute_tensor(tensor, mesh, placements) if sharded else tensor
        number = torch.tensor(2.0)
        model["number"] = distribute_tensor(number, mesh, [Replicate()] * 2) if sharded else number
        model["plain"] = torch.randn(3)
        numbers = torch.arange(6)
        model.register_buffer("numbers", distribute_tensor(numbers, mesh, [Replicate()] * 2) if sharded else numbers)
        return model

    model = made(True)
    trained(model, made(False), invent(model))
    assert ("numbers" in ShardedModel(model).places) == (distributed.get_rank() == 0)


TWO = [
    fsdp,
    fsdp_uneven,
    fsdp_mixed_precision,
    fsdp_left_unsharded,
    fsdp_bf16,
    fsdp_of_fused_experts,
    fsdp_of_tied_weights,
    fsdp_by_classes,
    fsdp_of_compiled_parts,
    ddp,
    replaced_parameters_are_followed,
    untied_parameters_are_refused,
    edits_are_found,
    rank_with_nothing,
    rows_that_lie_apart_are_refused,
    computed_tensors_are_refused,
]
FOUR = [
    hsdp,
    fsdp_over_tensor_parallel,
    tensor_parallel_replicas,
    experts_in_parallel,
    placements_of_every_kind,
]
