"""A model's structure: its modules, names, shapes and ties, without memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from weightcast.errors import UsageError
from weightcast.torch.coordinates import own_class, refuse_adapters_and_shards, twin, unwrapped
from weightcast.torch.tracing import stand_in, storage_key

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def structure_of(model: nn.Module) -> nn.Module:
    """The model on the meta device and without wrappers, which is enough to know what its checkpoint has.

    The model may be on that device itself, or sharded. What is done to it later does not change its structure.
    """
    if not isinstance(model, nn.Module):
        hint = "Load the structure alone: AutoModelForCausalLM.from_pretrained(NAME, device_map='meta')."
        raise UsageError(f"expected a torch module, got {type(model).__name__}", hint=hint)
    model = unwrapped(model)
    refuse_adapters_and_shards(model)
    empty: dict[tuple[object, ...], Tensor] = {}
    twins: dict[int, nn.Module] = {}

    def emptied(tensor: Tensor) -> Tensor:
        if nn.parameter.is_lazy(tensor):
            raise UsageError("a parameter has no shape yet", hint="Run the model once.")
        is_plain = type(tensor) in _PLAIN
        place = (storage_key(tensor), tensor.storage_offset(), tensor.shape) if is_plain else (id(tensor),)
        if place not in empty:
            like = stand_in(getattr(tensor, "ds_shape", tensor.shape), tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[place] = nn.Parameter(like, requires_grad=False) if is_parameter else like
        return empty[place]

    def emptied_all(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {name: None if tensor is None else emptied(tensor) for name, tensor in tensors.items()}

    def without_memory(module: nn.Module) -> nn.Module:
        module = unwrapped(module)
        if id(module) not in twins:
            children: dict[str, nn.Module | None] = {}
            own = {"_parameters": emptied_all(module._parameters), "_buffers": emptied_all(module._buffers)}
            twins[id(module)] = twin(module, own_class(module), _modules=children, **own)
            for name, child in module._modules.items():
                children[name] = None if child is None else without_memory(child)
        return twins[id(module)]

    return without_memory(model)
