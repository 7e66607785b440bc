"""Coordinates of PEFT models: of the adapter alone, or of the base's weights with the adapter merged into them.

PeftModel ─────────▶ names of `save_pretrained`, each tensor where it lies in the adapter's parameters
Merged(PeftModel) ─▶ names of the base model's `save_pretrained`; what the adapter touches is merged again for each
                     version, a layer at a time and by PEFT's own code, on a copy of that layer; the rest stays put
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcast.errors import UsageError
from weightcast.torch.coordinates import (
    Conversion,
    Coordinates,
    Made,
    Piece,
    Tensors,
    coordinates_of,
    coordinates_without_wrappers,
    refuse_other_formats,
    refuse_unfit,
    sort_by_name,
)
from weightcast.torch.wrappers import bare, rebuilt, unwrapped


class Merged(nn.Module):
    """A PEFT model as the whole model that its base becomes with the active adapters merged into it.

    What is published has the bits that ``copy.deepcopy(peft_model).merge_and_unload().save_pretrained`` would write.
    The model itself is not changed, and no second copy of it is made: layers are merged one at a time.

    >>> publisher = wc.Publisher(url, Merged(peft_model), optimizer=optimizer)            # doctest: +SKIP
    """

    def __init__(self, peft_model: nn.Module):
        super().__init__()
        if not is_adapted(unwrapped(peft_model)):
            hint = "Pass a peft.PeftModel. The weights of another model are published by passing the model itself."
            raise UsageError(f"expected a model of PEFT, got {type(unwrapped(peft_model)).__name__}", hint=hint)
        self.peft_model = peft_model


def layout_of(model: nn.Module) -> Coordinates:
    """The coordinates of what is published of a model: for one of PEFT the adapter, for all others the whole model."""
    model = unwrapped(model)
    if isinstance(model, Merged):
        return _merged(unwrapped(model.peft_model))
    return _of_adapter(model) if is_adapted(model) else coordinates_of(model)


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a model of PEFT. Checked without an import: if there is such a model, PEFT is loaded."""
    peft = sys.modules.get("peft.peft_model")
    return peft is not None and isinstance(model, peft.PeftModel)


def _refuse_other_methods(model: Any, names: Iterable[str]) -> None:
    for name in names:
        method = str(getattr(model.peft_config[name].peft_type, "value", model.peft_config[name].peft_type))
        if method != "LORA":
            hint = "LoRA, rsLoRA and DoRA are published. Of another method, publish the model after merge_and_unload()."
            raise UsageError(f"the adapter {name!r} is of the method {method}", hint=hint)


# -- the adapter alone -------------------------------------------------------------------------------------------------


def _of_adapter(model: Any) -> Coordinates:
    from peft import get_peft_model_state_dict

    active = list(model.active_adapters)
    if len(active) != 1:
        hint = "Choose one with peft_model.set_adapter(name), or publish weightcast.torch.Merged(peft_model)."
        raise UsageError(f"an adapter's channel holds one adapter, but {len(active)} are active", hint=hint)
    _refuse_other_methods(model, active)
    (name,) = active
    inside = bare(model)
    live = inside.state_dict(keep_vars=True)
    saved = get_peft_model_state_dict(inside, state_dict=dict(live), adapter_name=name)
    own = {id(tensor) for tensor in live.values()}
    for key, tensor in saved.items():
        if id(tensor) not in own:
            hint = "weightcast publishes parameters and buffers, not what PEFT computes when it saves."
            raise UsageError("a tensor of the adapter is not a parameter or buffer", tensor=key, hint=hint)
        refuse_unfit(key, tensor)
    if not saved:
        raise UsageError(f"the adapter {name!r} has no tensors")
    pieces = [Piece(key, tensor, 0, tuple(tensor.shape)) for key, tensor in saved.items()]
    return Coordinates(
        sort_by_name(pieces), (), {}, model, partial(_write_adapter_config, model, name), is_adapter=True
    )


def _write_adapter_config(model: Any, name: str, folder: Path) -> None:
    """Write `adapter_config.json` as PEFT would, without what `AutoPeftModel` would import (SPEC 12.3.8)."""
    config = copy(model.peft_config[name])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(model.base_model.model).get("name_or_path") or None
    config.save_pretrained(folder)


# -- merged weights ----------------------------------------------------------------------------------------------------


def _merged(model: Any) -> Coordinates:
    active = list(model.active_adapters)
    _refuse_other_methods(model, active)
    refuse_other_formats(model)
    try:
        model.base_model._check_merge_allowed()
    except ValueError as error:
        raise UsageError(f"PEFT cannot merge this adapter: {error}") from error
    base = model.get_base_model()
    plain = rebuilt(base, _unloaded)
    _untie(plain)
    layout = coordinates_without_wrappers(plain, model)
    merges = _merges(base)
    kept: list[Piece] = []
    parts: dict[int, list[Piece]] = {}
    for piece in layout.pieces:
        merge = merges.get(id(piece.source))
        (kept if merge is None else parts.setdefault(id(merge), [])).append(piece)
    made = [_after_merging(one, merges) for one in layout.made]
    for pieces in parts.values():
        merge = merges[id(pieces[0].source)]
        making = _MergedPieces(merge, tuple(pieces))
        made += [Made(piece.name, merge.sources, piece.shape, piece.source.dtype, making) for piece in pieces]
    return replace(
        layout,
        pieces=tuple(kept),
        made=sort_by_name(made),
        refuse_changed=partial(_refuse_other_adapters, model, active),
    )


def _refuse_other_adapters(model: Any, active: Sequence[str]) -> None:
    if list(model.active_adapters) != list(active):
        now = ", ".join(model.active_adapters)
        hint = "Close the publisher before you call set_adapter(), and open a new one afterwards."
        raise UsageError(f"other adapters are active than when the publisher opened: {now}", hint=hint)


def _holds_base(module: nn.Module) -> bool:
    """Whether PEFT replaces the module by another one when it unloads an adapter."""
    return hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")


def _unload(module: Any, *, merge: bool) -> nn.Module:
    """What PEFT replaces a layer of its own by; ``merge`` changes the layer."""
    unload = getattr(module, "unload_and_optionally_merge_module", None)
    if unload is not None:
        if type(module).__name__ == "MultiheadAttention":  # its method changes the layer even without merging
            raise UsageError(f"merging a {type(module).__name__} is not supported", hint="Do not adapt this layer.")
        unloaded: nn.Module = unload(merge=merge, safe_merge=False, adapter_names=None)
        return unloaded
    if merge:
        module.merge(safe_merge=False, adapter_names=None)
    layer: nn.Module = module.get_base_layer()
    return layer


def _unloaded(module: nn.Module) -> nn.Module:
    """A module of the base model, without wrappers and adapters around it."""
    module = unwrapped(module)
    while _holds_base(module):
        module = unwrapped(_unload(module, merge=False))
    return module


def _untie(plain: nn.Module) -> None:
    """Say so in the configuration if an adapter unties the embeddings, as PEFT does when it merges."""
    config: Any = getattr(plain, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    embeddings: Any = plain
    try:
        both = [embeddings.get_input_embeddings(), embeddings.get_output_embeddings()]
    except (AttributeError, NotImplementedError):
        return
    addresses = {one.weight.data_ptr() for one in both if getattr(one, "weight", None) is not None}
    if len(addresses) == 2:
        vars(plain)["config"] = deepcopy(config)
        vars(plain)["config"].tie_word_embeddings = False


@dataclass(frozen=True, eq=False)
class _Merge:
    """Layers of PEFT around common parameters of the base model, in the order in which they are merged."""

    layers: tuple[nn.Module, ...]
    touched: frozenset[int]
    """The `id` of each of those parameters."""

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return tuple({id(tensor): tensor for layer in self.layers for tensor in layer.parameters()}.values())

    def parameters(self) -> dict[int, torch.Tensor]:
        """The base model's parameters after merging, by the `id` of what they are now."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of adapters that are merged already
            copies = deepcopy(self.layers)
            merged = [dict(_unload(layer, merge=True).named_parameters()) for layer in copies]
        found: dict[int, torch.Tensor] = {}
        for layer, parameters in zip(self.layers, merged, strict=True):
            for name, parameter in _unload(layer, merge=False).named_parameters():
                found[id(parameter)] = parameters[name].detach()
        return found


def _merges(base: nn.Module) -> dict[int, _Merge]:
    """The merge that changes each parameter of the base model which an adapter touches, by the parameter's `id`."""
    merges: dict[int, _Merge] = {}
    for layer in _adapted(base):
        touched = {id(parameter) for parameter in _unload(layer, merge=False).parameters()}
        tied = {id(merges[key]): merges[key] for key in touched if key in merges}.values()
        layers = (*chain.from_iterable(merge.layers for merge in tied), layer)
        touched.update(*(merge.touched for merge in tied))
        merges |= dict.fromkeys(touched, _Merge(layers, frozenset(touched)))
    return merges


def _adapted(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The layers of PEFT that merging changes, outermost first, in the order of PEFT."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if _holds_base(module):
        if any(_is_active(inner) for inner in module.modules()):
            yield module
        return
    for child in module.children():
        yield from _adapted(child, seen)


def _is_layer(module: object) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _is_active(module: Any) -> bool:
    return _is_layer(module) and not set(module._get_available_adapters()).isdisjoint(module.active_adapters)


@dataclass(frozen=True, eq=False)
class _MergedPieces:
    """Implements `Making`: parts of the parameters of one merge."""

    merge: _Merge
    pieces: tuple[Piece, ...]

    def tensors(self) -> Tensors:
        merged = self.merge.parameters()
        return {piece.name: replace(piece, source=merged[id(piece.source)]).view() for piece in self.pieces}


@dataclass(frozen=True, eq=False)
class _MergedConversion:
    """Implements `Making`: what transformers computes from merged parameters."""

    conversion: Conversion
    merges: Mapping[int, _Merge] = field(repr=False)

    def tensors(self) -> Tensors:
        merged: dict[int, torch.Tensor] = {}
        for source in self.conversion.sources.values():
            if id(source) in self.merges and id(source) not in merged:
                merged |= self.merges[id(source)].parameters()
        sources = {name: merged.get(id(source), source) for name, source in self.conversion.sources.items()}
        return self.conversion.tensors(sources)


def _after_merging(made: Made, merges: Mapping[int, _Merge]) -> Made:
    """A tensor that transformers computes, from merged parameters if an adapter touches them."""
    touching = [merges[id(source)] for source in made.sources if id(source) in merges]
    if not touching:
        return made
    sources = {id(source): source for merge in touching for source in merge.sources}
    sources |= {id(source): source for source in made.sources}
    assert isinstance(made.making, Conversion)
    return replace(made, sources=tuple(sources.values()), making=_MergedConversion(made.making, merges))
