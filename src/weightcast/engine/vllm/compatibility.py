"""What the backend knows about vLLM: supported releases, and how its CPU kernels store weights.

    --weight-transfer-config '{"backend": "weightcast"}'

The entry point `weightcast_vllm.register` registers the backend in every process of vLLM and changes nothing else. All
changes to vLLM are made here, by the backend, in workers of an engine that selected it.
"""

from __future__ import annotations

from typing import Any

import torch

from weightcast.engine.learn import learn
from weightcast.errors import UsageError
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.torch.coordinates import DTYPES

WORKS_WITH = ("0.31", "0.32")


def refuse_other_vllm(version: str) -> None:
    """`UsageError` for an unsupported release of vLLM."""
    if ".".join(version.split(".")[:2]) not in WORKS_WITH:
        known = ", ".join(f"{one}.x" for one in WORKS_WITH)
        hint = f"Install vLLM {known}, or a weightcast that knows vLLM {version}."
        raise UsageError(f"the weightcast backend does not work with vLLM {version}", hint=hint)


# -- linear layers on a CPU --------------------------------------------------------------------------------------------


def keep_plain_weights(model: torch.nn.Module, config: Any) -> None:
    """Restore the weights of linear layers that vLLM has packed for its CPU kernels and dropped.

    Layers loaded later in this process stay unpacked. The weights are read from where the engine loaded them.
    """
    from vllm import _custom_ops as ops
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False
    dropped = set()
    for prefix, module in model.named_modules():
        if "cpu_linear" in vars(module):
            module.cpu_linear = torch.nn.functional.linear
            if not module.weight.numel():
                dropped.add(f"{prefix}.weight")
                _allocate(module)
    if dropped:
        with set_current_vllm_config(config):
            _load_again(model, config, dropped)


def _allocate(module: torch.nn.Module) -> None:
    """A weight as it was before vLLM packed it, with its loader, but without its values."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    was = get_layerwise_info(module).restore_metadata[0]["weight"]
    del module.weight
    module.register_parameter("weight", restore_layer_refs(materialize_meta_tensor(was), module))
    if getattr(module, "bias", None) is not None:  # one of vLLM's kernels widens it
        module.bias.data = module.bias.data.to(was.dtype)


def _load_again(model: Any, config: Any, parameters: set[str]) -> None:
    """Load only the tensors of these parameters: others, such as experts, are packed already."""
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config)
    if not hasattr(loader, "get_all_weights"):
        hint = "Start it with the default --load-format."
        raise UsageError(f"on a CPU the weightcast backend does not work with {type(loader).__name__}", hint=hint)

    def weights() -> Any:
        return loader.get_all_weights(config.model_config, model)

    table = TensorTable.of(
        TensorSpec(name, DTYPES.get(one.dtype, str(one.dtype)), tuple(one.shape)) for name, one in weights()
    )
    layout = learn(model, model.load_weights, table)
    if layout.unknown:
        hint = "Serve this model on a GPU."
        name = min(layout.unknown)
        raise UsageError(f"on a CPU this model cannot be followed: {layout.unknown[name]}", tensor=name, hint=hint)
    names = {part.name for parameter in parameters for part in layout.by_parameter.get(parameter, ())}
    model.load_weights((name, tensor) for name, tensor in weights() if name in names)
