"""A model's structure: its modules, names, shapes and ties, without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from weightcast.errors import UsageError
from weightcast.torch.coordinates import refuse_adapters, refuse_other_formats
from weightcast.torch.tracing import stand_in, storage_key
from weightcast.torch.wrappers import rebuilt, unwrapped

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_WITHOUT_ADAPTERS = "Pass the base model as it is before adapters are put into it; it may be on the meta device."


def structure_of(model: nn.Module) -> nn.Module:
    """The model on the meta device and without wrappers, which is enough to know what its checkpoint has.

    The model may be on that device itself, or sharded. What is done to it later does not change its structure.
    """
    if not isinstance(model, nn.Module):
        hint = "Load the structure alone: AutoModelForCausalLM.from_pretrained(NAME, device_map='meta')."
        raise UsageError(f"expected a torch module, got {type(model).__name__}", hint=hint)
    model = unwrapped(model)
    refuse_adapters(model, _WITHOUT_ADAPTERS)
    refuse_other_formats(model)
    empty: dict[tuple[object, ...], Tensor] = {}

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

    def without_memory(module: nn.Module) -> dict[str, Any]:
        return {"_parameters": emptied_all(module._parameters), "_buffers": emptied_all(module._buffers)}

    return rebuilt(model, unwrapped, without_memory)
