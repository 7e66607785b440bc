"""Coordinates: where the tensors of a checkpoint, as `save_pretrained` writes them, are in a live model.

transformers fuses, splits and renames weights between checkpoint and model. Here its own code for saving runs on
*stand-ins*: meta tensors, each with a storage of its own. A result in a stand-in's storage is a view of that parameter,
and the same view can be taken of the live one. This needs no memory of the model's size and reads no values.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weightcast.errors import UsageError
from weightcast.format.tensors import DTYPE_NAMES
from weightcast.torch.tracing import stand_in, storage_key, tensors_in
from weightcast.torch.wrappers import bare, twin_of, unwrapped

DTYPES: Mapping[torch.dtype, str] = {
    getattr(torch, name): dtype for name, dtype in DTYPE_NAMES.items() if hasattr(torch, name)
}
"""The format's names of torch's dtypes."""

_log = logging.getLogger("weightcast")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor of the checkpoint that is a contiguous part of a parameter's or buffer's own memory."""

    name: str
    source: torch.Tensor
    """The live parameter or buffer itself: the object that an optimizer has."""
    offset: int
    """Elements into the source; of a DTensor, into the whole tensor."""
    shape: tuple[int, ...]

    def view(self) -> torch.Tensor:
        """The tensor in the source's current memory; detached, contiguous, not copied. Not for a DTensor."""
        return self.source.detach().view(-1).narrow(0, self.offset, prod(self.shape)).view(self.shape)


class Making(Protocol):
    """A computation of tensors of the checkpoint, such as a conversion by transformers."""

    def tensors(self) -> Tensors:
        """Compute them from the model's current values; detached."""
        ...


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor of the checkpoint that is not part of any memory: it is computed from its sources."""

    name: str
    sources: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    making: Making = field(repr=False)

    def tensor(self) -> torch.Tensor:
        """The tensor, computed from the sources' current values; detached, contiguous."""
        return self.making.tensors()[self.name].contiguous()


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Every tensor of a model's checkpoint, as a piece or made; both are sorted by the bytes of their names."""

    pieces: tuple[Piece, ...]
    made: tuple[Made, ...]
    aliases: Mapping[str, str]
    """Alias to name: the other names of tied tensors of a plain module. Empty for a transformers model."""
    model: nn.Module
    """The model without its wrappers."""
    write_configs: Callable[[Path], None]
    """Writes the files that loaders need beside the weights into a folder."""
    is_adapter: bool = False
    """Whether these are the tensors of an adapter alone."""
    refuse_changed: Callable[[], None] = lambda: None
    """`UsageError` if the model is no longer set up as it was, so that these are not its tensors any more."""


def coordinates_of(model: nn.Module, sharded: bool = False) -> Coordinates:
    """Find all tensors of the checkpoint of ``model``; `UsageError` if some cannot be found or saved.

    With ``sharded``, sources may be DTensors: nothing but their names, shapes and dtypes is looked at, so that all
    ranks find the same. A model of PEFT is refused: `weightcast.torch.adapters` has the coordinates of those.
    """
    model = unwrapped(model)
    refuse_adapters(model, _UNSHARDED if sharded else _BY_ADAPTERS)
    return coordinates_without_wrappers(bare(model), model, sharded)


def coordinates_without_wrappers(bare: nn.Module, model: nn.Module, sharded: bool = False) -> Coordinates:
    """The coordinates of ``model``, in which ``bare`` is the part that is saved, without any wrappers."""
    refuse_other_formats(bare)
    live = _live_tensors(bare)
    for name, tensor in live.items():
        refuse_unfit(name, tensor, sharded)
    return _coordinates(model, bare, live, _ties(live))


def coordinates_in(structure: nn.Module) -> Coordinates:
    """The coordinates in a `structure_of` a model: the sources are its tensors, which have no memory."""
    live = _live_tensors(structure)
    names: dict[int, list[str]] = defaultdict(list)
    for name in sorted(live, key=str.encode):
        names[id(live[name])].append(name)
    return _coordinates(structure, structure, live, [tied for tied in names.values() if len(tied) > 1])


def _coordinates(model: nn.Module, bare: nn.Module, live: Tensors, ties: Sequence[Sequence[str]]) -> Coordinates:
    aliases: dict[str, str]
    if _is_pretrained(bare):
        pieces, made = _converted(bare, _saved(bare, live, ties))
        aliases = {}
    else:
        aliases = {alias: name for name, *others in ties for alias in others}
        pieces = [Piece(name, live[name], 0, tuple(live[name].shape)) for name in live.keys() - aliases.keys()]
        made = []
    _announce(tensor.name for tensor in made)
    return Coordinates(sort_by_name(pieces), sort_by_name(made), aliases, model, partial(_write_configs, bare))


Placed = TypeVar("Placed", Piece, Made)


def sort_by_name(tensors: Iterable[Placed]) -> tuple[Placed, ...]:
    return tuple(sorted(tensors, key=lambda tensor: tensor.name.encode()))


def _write_configs(model: nn.Module, folder: Path) -> None:
    """Write what loaders need beside the weights: a transformers model's configuration."""
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if save is not None:
            save(folder)


def _announce(names: Iterable[str]) -> None:
    alike = defaultdict(list)
    for name in sorted(names):
        alike[re.sub(r"\d+", "*", name)].append(name)
    for first, *others in alike.values():
        which = f"{first} and {len(others)} more of its kind" if others else first
        _log.info("not part of a parameter, computed again for each version: %s", which)


# What cannot be saved


_BY_ADAPTERS = "Pass the PeftModel itself to publish its adapter, or weightcast.torch.Merged(peft_model)."

_UNSHARDED = (
    "A model of PEFT is published whole, by one rank: pass the model that is inside DistributedDataParallel there."
)


def refuse_adapters(model: nn.Module, hint: str) -> None:
    """`UsageError` for modules that adapters were put into: their parameters are not those of a checkpoint."""
    for module in model.modules():
        from_peft = any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)
        if from_peft or vars(module).get("_hf_peft_config_loaded"):
            problem = f"a model with adapters ({type(module).__name__}) has no checkpoint of its own"
            raise UsageError(problem, hint=hint)


def refuse_other_formats(model: nn.Module) -> None:
    """`UsageError` for a model whose tensors are not what a checkpoint would hold: quantised, or flattened by FSDP1."""
    for name, module in model.named_modules():
        if vars(module).get("hf_quantizer") is not None:
            raise UsageError("a quantised model cannot be published", hint="Dequantise it: model.dequantize().")
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            hint = "Shard the model with fully_shard() from torch.distributed.fsdp: FSDP2 keeps each parameter apart."
            raise UsageError("FullyShardedDataParallel is not supported", tensor=name or None, hint=hint)


# What a model holds


def is_dtensor(tensor: object) -> bool:
    """Checked by name: most models have none, and importing the class takes long."""
    return type(tensor).__name__ == "DTensor"


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor, what this rank holds of it.

    Not `to_local()`, which returns a new view each time: FSDP2 can replace the local tensor, and that must be seen.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor
    return local


def _live_tensors(model: nn.Module) -> Tensors:
    """The parameters and persistent buffers by their names in `state_dict`."""
    live = model.state_dict(keep_vars=True)  # first of all: FSDP2 reshards in its hooks
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    if not live:
        raise UsageError("the model has no tensors")
    for name, tensor in live.items():
        if id(tensor) not in own:
            hint = "weightcast publishes parameters and buffers: remove other state from state_dict()."
            raise UsageError("an entry of state_dict() is not a parameter or buffer", tensor=name, hint=hint)
    return live


def refuse_unfit(name: str, tensor: torch.Tensor, sharded: bool = False) -> None:
    """`UsageError` for a tensor whose bits cannot be read in place; DTensors are fit where ``sharded``."""

    def unfit(problem: str, hint: str | None = None) -> UsageError:
        return UsageError(problem, tensor=name, hint=hint)

    if hasattr(tensor, "ds_shape") or (is_dtensor(tensor) and not sharded):
        raise unfit("sharded parameters are not supported yet", "Publish from whole parameters, as DDP has them.")
    tensor = memory_of(tensor)
    kind = type(tensor)
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise unfit("the tensor has no memory yet", "Load the model's weights first, or run it once.")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        what = kind.__name__ if tensor.layout == torch.strided else f"{tensor.layout} tensor"
        raise unfit(f"a {what} has no plain memory", "Publish from plain dense tensors.")
    if tensor.dtype not in DTYPES:
        raise _unholdable(name, tensor)
    if not tensor.is_contiguous():
        raise unfit(
            "the tensor is not contiguous",
            "Make it contiguous before creating the optimizer: parameter.data = parameter.data.contiguous().",
        )


def _unholdable(name: str, tensor: torch.Tensor) -> UsageError:
    hint = f"They hold {', '.join(DTYPES.values())}."
    return UsageError(f"safetensors files cannot hold {tensor.dtype}", tensor=name, hint=hint)


def _ties(live: Tensors) -> list[list[str]]:
    """The names, sorted, of each tensor that has more than one; `UsageError` for any other sharing of memory."""
    areas = sorted(
        (str(memory.device), memory.data_ptr(), name.encode(), name)
        for name, tensor in live.items()
        if (memory := memory_of(tensor)).numel()
    )
    groups: list[list[str]] = []
    last_device, last_stop = "", 0
    for device, start, _, name in areas:
        tensor = live[name]
        if device != last_device or start >= last_stop:
            groups.append([name])
            last_device, last_stop = device, start + memory_of(tensor).nbytes
        elif same_memory(first := live[groups[-1][0]], tensor) and _alike(first, tensor):
            groups[-1].append(name)
        else:
            raise UsageError(
                f"the tensor shares memory with {groups[-1][0]}, but is not the same tensor",
                tensor=name,
                hint="Tie whole parameters, or give this one its own memory: parameter.data = parameter.data.clone().",
            )
    # A rank may hold nothing of a DTensor.
    empty: dict[int, list[str]] = defaultdict(list)
    for name in sorted(live, key=str.encode):
        if is_dtensor(live[name]) and not memory_of(live[name]).numel():
            empty[id(live[name])].append(name)
    return [names for names in chain(groups, empty.values()) if len(names) > 1]


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors begin at the same place; DTensors must be the same, so that all ranks find the same."""
    return a is b if is_dtensor(a) or is_dtensor(b) else a.data_ptr() == b.data_ptr()


# What transformers saves


def _is_pretrained(model: nn.Module) -> bool:
    """Checked without an import: if there is such a model, transformers is loaded."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _saved(model: Any, live: Tensors, ties: Sequence[Sequence[str]]) -> Tensors:
    """The tensors that `save_pretrained` writes: none that the class ignores, and tied ones once."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()
    dropped = set(ignored)
    for names in ties:
        # Not all tensors at once: it would clone others in the same storage. Of a DTensor a rank may hold nothing, but
        # all that is looked at is that the memory is the same.
        first = live[names[0]]
        shared = torch.empty(1) if is_dtensor(first) else first.detach()
        tied = dict.fromkeys((name for name in names if name not in ignored), shared)
        try:
            dropped |= tied.keys() - remove_tied_weights_from_state_dict(dict(tied), model).keys()
        except RuntimeError as error:
            raise UsageError(
                f"transformers does not know these tied tensors: {', '.join(names)}",
                tensor=names[0],
                hint="Name them in the class's _tied_weights_keys, or untie them; save_pretrained() fails as well.",
            ) from error
    return {name: tensor for name, tensor in live.items() if name not in dropped}


class _Uncopied(TorchFunctionMode):
    """Skips copies into contiguous memory.

    A part of a fused tensor is made contiguous before it is cut further; the result may well be contiguous in the
    source.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return args[0]
        if func is torch.Tensor.view and not any(isinstance(arg, torch.dtype) for arg in args):
            func = torch.Tensor.reshape
        return func(*args, **(kwargs or {}))


class _Traced(TorchFunctionMode):
    """Records which stand-ins each result was computed from."""

    def __init__(self, stand_ins: Tensors):
        super().__init__()
        self._kept = list(stand_ins.values())  # a key identifies a storage only until it is freed
        self._sources = {storage_key(tensor): {name} for name, tensor in stand_ins.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = set().union(*(self.sources(tensor) for tensor in tensors_in((args, kwargs))))
        for tensor in tensors_in(args[:1] if result is None else result):  # None: it wrote into its first argument
            self._kept.append(tensor)
            self._sources.setdefault(storage_key(tensor), set()).update(sources)
        return result

    def sources(self, tensor: torch.Tensor) -> set[str]:
        return self._sources.get(storage_key(tensor), set())


@dataclass(frozen=True, eq=False)
class Conversion:
    """What transformers computes from some tensors of a model, and from stand-ins for others that it looks at."""

    model: nn.Module
    sources: Tensors
    stand_ins: Tensors

    def tensors(self, sources: Tensors | None = None) -> Tensors:
        """Its results, from the sources' current values or from other ``sources`` of the same names."""
        from transformers.core_model_loading import revert_weight_conversion

        live = {name: tensor.detach() for name, tensor in (self.sources if sources is None else sources).items()}
        with torch.no_grad(), _Uncopied():
            saved: Tensors = revert_weight_conversion(_with_own_conversions(self.model), {**self.stand_ins, **live})
        return saved


def _with_own_conversions(model: nn.Module) -> Any:
    """The model with a copy of its conversions: reverting them edits their patterns."""
    kept = vars(model).get("_weight_conversions")
    return model if kept is None else twin_of(model, _weight_conversions=deepcopy(kept))


def _converted(model: nn.Module, live: Tensors) -> tuple[list[Piece], list[Made]]:
    stand_ins = {name: stand_in(tensor.shape, tensor.dtype) for name, tensor in live.items()}
    with _Traced(stand_ins) as traced:
        try:
            saved = Conversion(model, stand_ins, {}).tensors()
        except Exception as error:
            problem = f"transformers cannot convert this model to its checkpoint: {error}"
            raise UsageError(problem, hint="Does model.save_pretrained() work?") from error
    owners = {storage_key(tensor): name for name, tensor in stand_ins.items()}
    pieces: list[Piece] = []
    others: dict[tuple[str, ...], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in saved.items():
        owner = owners.get(storage_key(tensor))
        if owner is not None and tensor.is_contiguous() and tensor.dtype == live[owner].dtype:
            pieces.append(Piece(name, live[owner], int(tensor.storage_offset()), tuple(tensor.shape)))
        elif tensor.dtype not in DTYPES:
            raise _unholdable(name, tensor)
        else:
            others[tuple(sorted(traced.sources(tensor)))][name] = tensor
    made = []
    for names, tensors in others.items():
        conversion = _conversion_from(model, names, live, stand_ins, tensors)
        sources = tuple(live[name] for name in names)
        made += [Made(name, sources, tuple(t.shape), t.dtype, conversion) for name, t in tensors.items()]
    return pieces, made


def _conversion_from(
    model: nn.Module, names: Sequence[str], live: Tensors, stand_ins: Tensors, wanted: Tensors
) -> Conversion:
    """The conversion of ``names`` alone, if its result is the same; else with stand-ins for all the others.

    Names can depend on other names, and some operations need tensors that they do not use.
    """
    sources = {name: live[name] for name in names}
    try:
        alone = Conversion(model, {name: stand_ins[name] for name in names}, {}).tensors()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        alone = {}
    same = all(name in alone and _alike(alone[name], tensor) for name, tensor in wanted.items())
    return Conversion(model, sources, {} if same else stand_ins)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
