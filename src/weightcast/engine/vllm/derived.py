"""Tensors that vLLM computes from parameters after loading and keeps beside them: patched parameters leave them stale.

How it is found out which there are. vLLM's loader ends with `process_weights_after_loading` of
`model_executor/model_loader/utils.py`, which calls three kinds of hooks, in this order:

1.  Of each layer's quantisation method, for all layers. It turns loaded tensors into what kernels read, often in place
    of them, and may keep more beside them (merged scales, a split router weight). It expects tensors as they were
    loaded: vLLM's own reload gives it those (`_layerwise_process` in `model_loader/reload/layerwise.py`). On live
    parameters it must not run again. So parameters go through the reload (`Derived.reload`) if their layer's method is
    not one of those that leave weights alone, or if the layer holds float tensors beside its parameters.
2.  Of each attention layer (`is_deferred_attention_layer`), which calls its backend's (`impl`). MLA makes `W_UV` and
    `W_UK_T` of `kv_b_proj`, FlashInfer and b12x make a float32 copy of attention sinks. vLLM runs these hooks again at
    the end of each reload, on live parameters (`_finalize_attention_layer`), and they write into the tensors that they
    made before, which CUDA graphs may have captured. So they run again after a scatter (`Derived.again`) if the layer
    or its backend has a hook that does more than set default scales. What they read is looked up: the parameters of
    the layer and of its backend, by their memory. One of them, for AMX, drops `kv_b_proj.weight` when it has packed
    it; parameters that a hook replaces are put back.
3.  Of the model (`Derived.unsupported`): vLLM's reload does not call it, so that nothing brings up to date what it
    makes.

Parameters that a hook added are those that vLLM did not record when it made the layer (`Derived.made`): no tensor of a
checkpoint covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.torch.tracing import storage_key

_HOOK = "process_weights_after_loading"


@dataclass(frozen=True)
class Rules:
    """What is known of an engine's classes."""

    is_attention: Callable[[torch.nn.Module], bool]
    idle: frozenset[Any]
    """Hooks, as functions, that compute nothing from parameters."""
    method: type
    """The base class of quantisation methods."""
    plain: tuple[type, ...]
    """Quantisation methods that leave weights as they were loaded, or move them to where the layout is checked."""
    moving: tuple[type, ...]
    """Those of them that may move elements."""
    declared: Callable[[torch.nn.Module], Collection[str]]
    """The parameters that a layer had when it was made."""
    around: Callable[[], AbstractContextManager[object]]
    """What hooks must run in."""


@dataclass(frozen=True)
class Derived:
    """What is to be done for parameters after they were written."""

    again: Mapping[str, tuple[str, ...]]
    """Per parameter, the attention layers whose hooks read it."""
    reload: Mapping[str, str]
    """Parameters that only a reload brings up to date with all that was made of them, and why."""
    made: frozenset[str]
    """Parameters that hooks made."""
    moved: frozenset[str]
    """Parameters whose elements a hook may have moved: equal ones do not show whether it did."""
    unsupported: str | None
    """Why not even a reload is enough, if it is not."""
    _model: torch.nn.Module
    _rules: Rules
    _dtype: torch.dtype

    @torch.no_grad()
    def derive_again(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """Run the hooks that read some of these parameters, which a scatter has written; the layers' names.

        The engine must be paused. Names are those of `Layout.by_parameter`.
        """
        layers = tuple(dict.fromkeys(layer for name in parameters for layer in self.again.get(name, ())))
        with self._rules.around():
            for name in layers:
                layer = self._model.get_submodule(name)
                with _kept(layer):
                    getattr(layer, _HOOK)(self._dtype)
        return layers


def derived_in_vllm(model: torch.nn.Module, vllm_config: Any) -> Derived:
    """What vLLM derived when it loaded a model."""
    return find_derived(model, vllm_config.model_config.dtype, _rules_of_vllm(vllm_config))


def find_derived(model: torch.nn.Module, dtype: torch.dtype, rules: Rules) -> Derived:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.untyped_storage().nbytes():
            names.setdefault(storage_key(parameter), []).append(name)
    again: dict[str, tuple[str, ...]] = {}
    reload: dict[str, str] = {}
    made: set[str] = set()
    moved: set[str] = set()
    for prefix, module in model.named_modules():
        hooked = rules.is_attention(module)
        if hooked and _derives(module, rules):
            made |= {_joined(prefix, name) for name in module._parameters if name not in rules.declared(module)}
            read = {key for tensor in _tensors_read(module) if (key := storage_key(tensor)) in names}
            for name in sorted(name for key in read for name in names[key]):
                again[name] = (*again.get(name, ()), prefix)
        elif not hooked and (reason := _reason_to_reload(module, rules)):
            own = {name for name, one in module._parameters.items() if one is not None}
            made |= {_joined(prefix, name) for name in own - set(rules.declared(module))}
            reload |= {_joined(prefix, name): reason for name in own}
        elif isinstance(getattr(module, "quant_method", None), rules.moving):
            moved |= {_joined(prefix, name) for name in module._parameters}
    unsupported = f"{type(model).__name__} computes with its weights after loading" if hasattr(model, _HOOK) else None
    return Derived(again, reload, frozenset(made), frozenset(moved), unsupported, model, rules, dtype)


def _derives(layer: torch.nn.Module, rules: Rules) -> bool:
    """Whether hooks of an attention layer, or of its backend, compute something."""
    hooks = [getattr(type(one), _HOOK, None) for one in (layer, *_backends(layer))]
    return any(hook is not None and hook not in rules.idle for hook in hooks)


def _backends(layer: torch.nn.Module) -> list[Any]:
    impl = getattr(layer, "impl", None)
    variants = getattr(impl, "get_impl_variants", None)
    return [] if impl is None else list(variants()) if variants is not None else [impl]


def _tensors_read(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters that an attention layer or its backend refers to."""
    yield from layer.parameters()
    for backend in _backends(layer):
        for value in vars(backend).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, torch.nn.Module):
                yield from value.parameters()


def _reason_to_reload(module: torch.nn.Module, rules: Rules) -> str | None:
    method = getattr(module, "quant_method", None)
    if not isinstance(method, rules.method) or getattr(type(method), _HOOK) in rules.idle:
        return None
    if not isinstance(method, rules.plain):
        return f"{type(method).__name__} changes it after loading"
    own = {storage_key(one) for one in module._parameters.values() if one is not None}
    for name, value in vars(module).items():
        holds = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        if holds and storage_key(value) not in own:
            return f"vLLM keeps {name} beside it"
    return None


@contextmanager
def _kept(layer: torch.nn.Module) -> Iterator[None]:
    """Put back parameters that a hook replaces: the engine's layout is theirs."""
    modules = {id(one): one for part in (layer, *_modules_of_backends(layer)) for one in part.modules()}
    slots = [(one._parameters, dict(one._parameters)) for one in modules.values()]
    try:
        yield
    finally:
        for slot, was in slots:
            slot.update({name: one for name, one in was.items() if slot.get(name) is not one})


def _modules_of_backends(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for backend in _backends(layer):
        yield from (value for value in vars(backend).values() if isinstance(value, torch.nn.Module))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _rules_of_vllm(vllm_config: Any) -> Rules:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.v1.attention.backend import AttentionImplBase

    idle = [getattr(one, _HOOK) for one in (Attention, AttentionImplBase, QuantizeMethodBase)]
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    return Rules(
        is_deferred_attention_layer,
        frozenset(idle),
        QuantizeMethodBase,
        plain,
        (UnquantizedFusedMoEMethod,),
        lambda module: get_layerwise_info(module).restore_metadata[0],
        lambda: set_current_vllm_config(vllm_config),
    )
