"""Wrappers of modules, such as torch.compile's, and models without them: other modules around the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel, in any nesting."""
    while (inside := inside_of(model)) is not None:
        model = inside
    return model


def inside_of(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for any other module."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        wrapped: nn.Module = module.module
        return wrapped
    return module._modules.get("_orig_mod")


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before `fully_shard`, which replaces it by a subclass of `FSDPModule`."""
    return next(cls for cls in type(module).__mro__ if all(base.__name__ != "FSDPModule" for base in cls.__mro__))


def bare(model: nn.Module) -> nn.Module:
    """The model with all wrappers inside it removed: the same tensors under their names without wrappers.

    transformers looks modules up by name, and conversions by the names of classes and of the Python modules that
    define them: renaming the tensors would not be enough.
    """
    if all(inside_of(module) is None and own_class(module) is type(module) for module in model.modules()):
        return model
    return rebuilt(model, unwrapped)


def rebuilt(
    model: nn.Module,
    content: Callable[[nn.Module], nn.Module],
    changes: Callable[[nn.Module], Mapping[str, Any]] = lambda _: {},
) -> nn.Module:
    """Other modules around the same tensors; each module of ``model`` is replaced by its ``content``.

    ``changes`` are attributes that the module in place of a content has instead of the content's.
    """
    twins: dict[int, nn.Module] = {}

    def rebuild(module: nn.Module) -> nn.Module:
        module = content(module)
        if id(module) not in twins:
            children: dict[str, nn.Module | None] = {}
            twins[id(module)] = twin_of(module, _modules=children, **changes(module))
            for name, child in module._modules.items():
                children[name] = child if child is None else rebuild(child)
        return twins[id(module)]

    return rebuild(model)


def twin_of(module: nn.Module, **changes: Any) -> nn.Module:
    """Another module of its own class with the same attributes, tensors included, except for ``changes``."""
    twin: nn.Module = object.__new__(own_class(module))
    vars(twin).update(vars(module), **changes)
    return twin
