"""Learning a layout: an engine's own loading code runs once on stand-ins, and what it would have written is recorded.

Stand-ins are meta tensors of the checkpoint's shapes, each with a storage of its own. Views of one stay in it, so their
offset and strides say which elements they are; copies get a storage whose *trace* says so. Every write into the
engine's memory is suppressed: no bit of the model changes, and no memory of its size is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weightcast.engine.casts import WIDENED, can_cast
from weightcast.engine.layout import Layout, Loop, Part, merge_loops
from weightcast.engine.strides import Write, box_of_loops, grid_of, overwritten
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.torch.coordinates import DTYPES
from weightcast.torch.tracing import stand_in, storage_key, tensors_in

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
_COPIES = {_aten.clone, _aten._to_copy}
_COMPUTED = "the loader computes with it"
_NO_BOX = "the loader rearranges it, and the result is not a box"


def learn(model: torch.nn.Module, load: Load, table: TensorTable) -> Layout:
    """Where ``load``, given the tensors of ``table``, would put them in the parameters and buffers of ``model``.

    Nothing is written. A tensor that cannot be traced is in the layout's ``unknown``, with the reason.
    """
    tracing = _Tracing(model, table)
    try:
        with _parameters_kept(model), torch.no_grad(), tracing:
            load(tracing.stand_ins())
    except Exception as error:  # noqa: BLE001 -- an engine's loader may raise anything
        reason = f"the engine's loader cannot be traced: {type(error).__name__}: {error}"
        return Layout(table, (), {spec.name: reason for spec in table}, broken=reason)
    return tracing.layout()


@contextmanager
def _parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Undo and report what a loader attaches in place of parameters: torch dispatches no operation for that."""
    slots: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (slot, dict(slot)) for module in model.modules() for slot in (module._parameters, module._buffers)
    ]
    tensors = [(one, one.data, _seat(one)) for _, was in slots for one in was.values() if one is not None]
    replaced = False
    try:
        yield
    finally:
        for slot, was in slots:
            if {name: id(one) for name, one in slot.items()} != {name: id(one) for name, one in was.items()}:
                replaced = True
                slot.clear()
                slot.update(was)
        for tensor, data, seat in tensors:
            if _seat(tensor) != seat:
                replaced = True
                tensor.data = data
    if replaced:
        raise RuntimeError("it puts other tensors in the place of parameters")


@dataclass(frozen=True)
class _Trace:
    """What a storage holds: elements of one stand-in or, without ``loops``, something that cannot be traced."""

    names: frozenset[str]
    dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes it was cast through, from the stand-in's to its own."""
    offset: int = 0
    loops: Sequence[Loop] | None = None
    """Over the storage, outermost first, and over the stand-in from ``offset`` on."""
    reason: str = _COMPUTED
    """Why it cannot be traced, if it cannot."""

    def view(self, tensor: torch.Tensor) -> tuple[int, list[int]] | None:
        """Offset and strides, in the stand-in, of a view of this storage; None if strides cannot describe it."""
        if self.loops is None or not _is_plain(tensor, self.dtypes[-1].itemsize):
            return None
        if not tensor.numel():
            return 0, [0] * tensor.ndim
        at, rest = [], tensor.storage_offset()
        for loop in self.loops:
            at.append(rest // loop.here)
            rest -= at[-1] * loop.here
        offset = self.offset + sum(i * loop.there for i, loop in zip(at, self.loops, strict=True))
        strides = []
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if size == 1:
                strides.append(0)
                continue
            k = next((k for k, loop in enumerate(self.loops) if stride and stride % loop.here == 0), None)
            if k is None:
                return None
            many = stride // self.loops[k].here
            at[k] += many * (size - 1)
            if at[k] >= self.loops[k].size:
                return None
            strides.append(many * self.loops[k].there)
        return offset, strides


@dataclass
class _Memory:
    """A storage, kept alive so that its key stays unique."""

    storage: torch.UntypedStorage
    trace: _Trace | None = None
    parameter: str | None = None
    itemsize: int = 0
    grid: tuple[int, ...] = ()
    """The shape of a parameter's storage, dimensions in storage order."""
    writes: list[Write] = field(default_factory=list)


class _Tracing(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module, table: TensorTable):
        super().__init__()
        self._table = table
        self._unknown: dict[str, str] = {}
        self._memory: dict[int, _Memory] = {}
        self._parameters = dict(model.named_parameters())
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            memory = _Memory(storage, None, name, tensor.element_size(), grid_of(tensor))
            self._memory.setdefault(storage_key(tensor), memory)

    def stand_ins(self) -> Iterable[tuple[str, torch.Tensor]]:
        for spec in self._table:
            if spec.dtype not in TORCH_DTYPES:
                self._unknown[spec.name] = f"torch has no dtype for {spec.dtype}"
                continue
            tensor = stand_in(spec.shape, TORCH_DTYPES[spec.dtype])
            trace = _Trace(frozenset([spec.name]), (tensor.dtype,), 0, (Loop(spec.elements, 1, 1),))
            self._memory[storage_key(tensor)] = _Memory(tensor.untyped_storage(), trace)
            yield spec.name, tensor

    def layout(self) -> Layout:
        parts = []
        for memory in self._memory.values():
            parts += [write.part for write in memory.writes if write.part is not None]
            for part in overwritten(memory.writes):
                self._unknown.setdefault(part.name, f"the loader writes over it in {part.parameter}")
        return Layout(self._table, parts, self._unknown, self._uncovered())

    def _uncovered(self) -> dict[str, int]:
        """How many elements of each parameter the loader leaves unwritten, if any; padding that it fills is written."""
        found = {}
        for name, tensor in self._parameters.items():
            writes = self._memory[storage_key(tensor)].writes
            written = sum({(one.first, one.last, one.box): one.elements for one in writes}.values())
            if written < tensor.numel():
                found[name] = tensor.numel() - written
        return found

    # -- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, tensors)
        traces = self._traces(tensors)
        if func.overloadpacket is _aten._local_scalar_dense and traces:
            self._give_up(traces, "the loader reads its value")
            return _zero(args[0].dtype)
        if any(tensor.device.type == "meta" for tensor in tensors):
            args, kwargs = tree_map(_as_meta, (args, kwargs))
        result = func(*args, **kwargs)
        if traces and func.overloadpacket in _COPIES:
            copied = _copied(traces[0], args[0], result)
            self._memory[storage_key(result)] = _Memory(result.untyped_storage(), copied)
        for leaf in tensors_in(result):
            trace = _Trace(_names(traces)) if traces else None
            self._memory.setdefault(storage_key(leaf), _Memory(leaf.untyped_storage(), trace))
        return result

    def _traces(self, tensors: Iterable[torch.Tensor]) -> list[_Trace]:
        found = [self._memory.get(storage_key(tensor)) for tensor in tensors]
        return [memory.trace for memory in found if memory is not None and memory.trace is not None]

    def _write(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        targets = list(_mutated(func, args, kwargs))
        homes = [self._memory.get(storage_key(target)) for target in targets]
        written = {id(target) for target, home in zip(targets, homes, strict=True) if _is_engines(home)}
        traces = self._traces(tensor for tensor in tensors if id(tensor) not in written)
        if not written and not traces:
            return func(*args, **kwargs)  # between tensors that the loader made itself
        for target, home in zip(targets, homes, strict=True):
            if home is not None and home.parameter is None:
                home.trace = _Trace(_names(traces))
                continue
            if not target.numel():
                continue
            if func.overloadpacket is _aten.copy_:
                _refuse_other_shape(target, args[1])
            part: Part | str = f"the loader writes with {func.overloadpacket.__name__}"
            if func.overloadpacket is _aten.copy_ and traces and home is not None:
                part = self._part(traces[0], target, args[1], home)
            if isinstance(part, str):
                self._give_up(traces, part)
            if home is not None:
                home.writes.append(_written(target, home, None if isinstance(part, str) else part))
                home.trace = _Trace(_names([*traces, *self._traces([target])])) if traces else home.trace
        return _returned(func, targets)

    def _part(self, trace: _Trace, target: torch.Tensor, source: torch.Tensor, home: _Memory) -> Part | str:
        """The part that a copy writes into a parameter, or why it cannot be determined."""
        assert home.parameter is not None
        if trace.loops is None:
            return trace.reason
        (name,) = trace.names
        spec, view = self._table[name], trace.view(source)
        if view is None or source.shape != target.shape or not _is_plain(target, home.itemsize):
            return _NO_BOX
        dtype = _dtype(spec, trace.dtypes, source.dtype, target.dtype)
        if dtype is None:
            return f"the loader casts it from {spec.dtype} to {DTYPES.get(target.dtype, target.dtype)}"
        offset, strides = view
        boxed = box_of_loops(spec.shape, offset, map(Loop, target.shape, strides, target.stride()))
        if boxed is None:
            return _NO_BOX
        return Part(name, boxed[0], home.parameter, dtype, int(target.storage_offset()), boxed[1])

    def _give_up(self, traces: Sequence[_Trace], reason: str) -> None:
        for name in _names(traces):
            self._unknown.setdefault(name, reason)


# -- elements ----------------------------------------------------------------------------------------------------------


def _copied(trace: _Trace, source: torch.Tensor, copy: torch.Tensor) -> _Trace:
    """The trace of a copy, which has a storage of its own: its elements in the order of that storage."""
    if trace.loops is None or source.dtype != trace.dtypes[-1]:
        return _Trace(trace.names, reason=trace.reason)
    view = trace.view(source)
    if view is None:
        return _Trace(trace.names, reason=_NO_BOX)
    offset, strides = view
    outer_first = sorted(map(Loop, copy.shape, strides, copy.stride()), key=lambda loop: -loop.here)
    return _Trace(trace.names, (*trace.dtypes, copy.dtype), offset, merge_loops(outer_first))


def _written(target: torch.Tensor, home: _Memory, part: Part | None) -> Write:
    if target.element_size() != home.itemsize:
        return Write(part, 0, home.storage.nbytes(), target.nbytes // home.itemsize, None)
    first = int(target.storage_offset())
    loops = list(map(Loop, target.shape, target.stride(), target.stride()))
    boxed = box_of_loops(home.grid, first, loops)
    last = first + sum((loop.size - 1) * loop.here for loop in loops)
    return Write(part, first, last, target.numel(), boxed and boxed[0])


def _dtype(spec: TensorSpec, path: Sequence[torch.dtype], source: torch.dtype, target: torch.dtype) -> str | None:
    """The dtype of a tensor's values in a parameter after all casts; None for casts that cannot be repeated exactly."""
    if source != path[-1]:  # a view as another dtype: only a copy of the bits can be followed
        return spec.dtype if source == target and set(path) == {path[0]} else None
    last = DTYPES.get(target, "")
    through = [DTYPES.get(one, "") for one in path]
    known = can_cast(spec.dtype, last) and all(
        one in (spec.dtype, last) or (spec.dtype, one) in WIDENED for one in through
    )
    return last if known else None


# -- torch -------------------------------------------------------------------------------------------------------------


def _seat(tensor: torch.Tensor) -> tuple[object, ...]:
    """What changes about a tensor when another one is put in its place."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(tensor: torch.Tensor, itemsize: int) -> bool:
    """Whether offset and strides count elements of the storage, and those elements are the values."""
    return tensor.element_size() == itemsize and not tensor.is_conj() and not tensor.is_neg()


def _is_engines(memory: _Memory | None) -> bool:
    """Whether the memory is the engine's: all that the loader did not allocate itself."""
    return memory is None or memory.parameter is not None


def _names(traces: Iterable[_Trace]) -> frozenset[str]:
    return frozenset().union(*(trace.names for trace in traces))


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


def _refuse_other_shape(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise what the suppressed write would have raised."""
    try:
        torch.broadcast_to(source, target.shape)
    except RuntimeError:
        raise ValueError(f"a tensor of {list(source.shape)} does not fit into {list(target.shape)}") from None


def _returned(func: Any, targets: Sequence[torch.Tensor]) -> Any:
    returns = len(func._schema.returns)
    return None if not returns else targets[0] if returns == 1 else tuple(targets)


def _as_meta(leaf: Any) -> Any:
    """Tensors and devices on meta: an operation does not mix them with others."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" else leaf


def _zero(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
