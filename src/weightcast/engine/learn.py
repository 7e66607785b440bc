"""Learning a layout: an engine's own loading code runs once on stand-ins, and what it would have written is recorded.

Stand-ins are meta tensors of the checkpoint's shapes, each with a storage of its own. Views of one stay in it, so their
offset and strides say which elements they are; copies get a storage whose `Trace` says so. Every write into the
engine's memory is suppressed: no bit of the model changes, and no memory of its size is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weightcast.engine.casts import WIDENED, can_cast
from weightcast.engine.layout import Layout, Loop, Part
from weightcast.engine.numbers import MOVES, OVERLAYS, Run, TooManyError
from weightcast.engine.strides import Write, box_of_loops, boxes_of_loops, grid_of, overwritten
from weightcast.engine.trace import NO_BOX, Trace, is_plain, moved, names_of, overlaid, runs_between
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.torch.coordinates import DTYPES
from weightcast.torch.tracing import stand_in, storage_key, tensors_in

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
_MOST_PARTS = 1024
"""Of one copy into a parameter."""


def learn(model: torch.nn.Module, load: Load, table: TensorTable) -> Layout:
    """Where ``load``, given the tensors of ``table``, would put them in the parameters and buffers of ``model``.

    Nothing is written. A tensor that cannot be traced is in the layout's ``unknown``, with the reason.
    """
    tracing = _Tracing(model, table)
    try:
        with torch.no_grad():
            with _parameters_kept(model) as replaced, tracing:
                load(tracing.stand_ins())
            for old, new in replaced:
                tracing.take_replacement(old, new)
    except Exception as error:  # noqa: BLE001 -- an engine's loader may raise anything
        reason = f"the engine's loader cannot be traced: {type(error).__name__}: {error}"
        return Layout(table, (), {spec.name: reason for spec in table}, broken=reason)
    return tracing.layout()


@contextmanager
def _parameters_kept(model: torch.nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Undo and report what a loader attaches in place of parameters: torch dispatches no operation for that.

    Yields a list that has each memory and what the loader put in its place, in the end. `RuntimeError` if that is of
    another kind.
    """
    slots: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (slot, dict(slot)) for module in model.modules() for slot in (module._parameters, module._buffers)
    ]
    tensors = {id(one): (one, one.data, _seat(one)) for _, was in slots for one in was.values() if one is not None}
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
    fitting = True
    try:
        yield replaced
    finally:
        for slot, was in slots:
            fitting = fitting and slot.keys() == was.keys()
            for name, one in was.items():
                new = slot.get(name)
                if new is not one:
                    fitting = fitting and new is not None and one is not None
                    replaced += [(one.data, new.data)] if new is not None and one is not None else []
            slot.clear()
            slot.update(was)
        for tensor, data, seat in tensors.values():
            if _seat(tensor) != seat:
                replaced.append((data, tensor.data))
                tensor.data = data
    if not fitting or any(_kind(old) != _kind(new) for old, new in replaced):
        raise RuntimeError("it puts other tensors in the place of parameters")


@dataclass
class _Memory:
    """A storage, kept alive so that its key stays unique."""

    storage: torch.UntypedStorage
    trace: Trace | None = None
    parameter: str | None = None
    itemsize: int = 0
    grid: tuple[int, ...] = ()
    """The shape of a parameter's storage, dimensions in storage order."""
    writes: list[Write] = field(default_factory=list)


class _Tracing(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module, table: TensorTable):
        super().__init__()
        self._table = table
        self._specs = tuple(table)
        self._unknown: dict[str, str] = {}
        self._memory: dict[int, _Memory] = {}
        self._parameters = dict(model.named_parameters())
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            memory = _Memory(storage, None, name, tensor.element_size(), grid_of(tensor))
            self._memory.setdefault(storage_key(tensor), memory)

    def stand_ins(self) -> Iterable[tuple[str, torch.Tensor]]:
        for index, spec in enumerate(self._table):
            if spec.dtype not in TORCH_DTYPES:
                self._unknown[spec.name] = f"torch has no dtype for {spec.dtype}"
                continue
            tensor = stand_in(spec.shape, TORCH_DTYPES[spec.dtype])
            trace = Trace(frozenset([spec.name]), (tensor.dtype,), index, 0, (Loop(spec.elements, 1, 1),))
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

    def take_replacement(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Count what a loader put in the place of a parameter as copied into it."""
        self._write(_aten.copy_.default, (old, new), {}, (old, new))

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
        given = args, kwargs
        if any(tensor.device.type == "meta" for tensor in tensors):
            given = tree_map(_as_meta, given)
        result = func(*given[0], **given[1])
        if traces and func.overloadpacket in MOVES:
            trace = moved(func, args, result, self._trace)
            self._memory[storage_key(result)] = _Memory(result.untyped_storage(), trace)
        for leaf in tensors_in(result):
            computed = Trace(names_of(traces)) if traces else None
            self._memory.setdefault(storage_key(leaf), _Memory(leaf.untyped_storage(), computed))
        return result

    def _trace(self, tensor: torch.Tensor) -> Trace | None:
        memory = self._memory.get(storage_key(tensor))
        return None if memory is None else memory.trace

    def _traces(self, tensors: Iterable[torch.Tensor]) -> list[Trace]:
        return [trace for tensor in tensors if (trace := self._trace(tensor)) is not None]

    def _write(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        targets = list(_mutated(func, args, kwargs))
        homes = [self._memory.get(storage_key(target)) for target in targets]
        written = {id(target) for target, home in zip(targets, homes, strict=True) if _is_engines(home)}
        traces = self._traces(tensor for tensor in tensors if id(tensor) not in written)
        if not written and not traces:
            return func(*args, **kwargs)  # between tensors that the loader made itself
        for target, home in zip(targets, homes, strict=True):
            if home is not None and home.parameter is None:
                is_overlay = func.overloadpacket in OVERLAYS
                home.trace = overlaid(func, args, target, self._trace) if is_overlay else Trace(names_of(traces))
                continue
            if not target.numel():
                continue
            if func.overloadpacket is _aten.copy_:
                _refuse_other_shape(target, args[1])
            if home is None or func.overloadpacket is not _aten.copy_ or not traces:
                self._give_up(traces, f"the loader writes with {func.overloadpacket.__name__}")
                writes = [] if home is None else [_written(target, home)]
            else:
                writes = self._copy(traces[0], target, args[1], home)
            if home is not None:
                home.writes += writes
                home.trace = Trace(names_of([*traces, *self._traces([target])])) if traces else home.trace
        return _returned(func, targets)

    def _copy(self, trace: Trace, target: torch.Tensor, source: torch.Tensor, home: _Memory) -> list[Write]:
        """What a copy writes into a parameter: one part if strides can tell, or else as many as runs of numbers."""
        problem = trace.reason
        if trace.is_known and is_plain(target, home.itemsize):
            try:
                return self._one_part(trace, target, source, home) or self._parts(trace, target, source, home)
            except _UntraceableError as error:
                problem = str(error)
        elif trace.is_known:
            problem = NO_BOX
        self._give_up([trace], problem)
        return [_written(target, home)]

    def _one_part(self, trace: Trace, target: torch.Tensor, source: torch.Tensor, home: _Memory) -> list[Write]:
        view = trace.view(source) if source.shape == target.shape else None
        if view is None:
            return []
        (name,) = trace.names
        spec, (offset, strides) = self._table[name], view
        dtype = _dtype(spec, trace.dtypes, source.dtype, target.dtype)
        boxed = box_of_loops(spec.shape, offset, map(Loop, target.shape, strides, target.stride()))
        if boxed is None:
            return []
        part = Part(name, boxed[0], home.parameter or "", dtype, int(target.storage_offset()), boxed[1])
        return [_written(target, home, part)]

    def _parts(self, trace: Trace, target: torch.Tensor, source: torch.Tensor, home: _Memory) -> list[Write]:
        if not trace.shows(source):
            raise _UntraceableError(NO_BOX)
        try:
            runs = runs_between(source, target, self._trace)
        except TooManyError:
            raise _UntraceableError(NO_BOX) from None
        writes = (write for run in runs for write in self._writes_of(run, trace, source.dtype, target.dtype, home))
        found = list(islice(writes, _MOST_PARTS + 1))
        if len(found) > _MOST_PARTS:
            raise _UntraceableError(NO_BOX)
        return found

    def _writes_of(
        self, run: Run, trace: Trace, source: torch.dtype, target: torch.dtype, home: _Memory
    ) -> Iterator[Write]:
        if run.index is None:
            yield _write_of_loops(run.at, [loop._replace(there=loop.here) for loop in run.loops], home)
            return
        spec = self._specs[run.index]
        dtype = _dtype(spec, trace.dtypes, source, target)
        for box, at, strides in boxes_of_loops(spec.shape, run.offset, run.at, run.loops):
            part = Part(spec.name, box, home.parameter or "", dtype, at, strides)
            yield _write_of_loops(at, list(map(Loop, box.shape, strides, strides)), home, part)

    def _give_up(self, traces: Sequence[Trace], reason: str) -> None:
        for name in names_of(traces):
            self._unknown.setdefault(name, reason)


# -- elements ----------------------------------------------------------------------------------------------------------


class _UntraceableError(Exception):
    """Why a copy into a parameter cannot be traced."""


def _written(target: torch.Tensor, home: _Memory, part: Part | None = None) -> Write:
    """The write of all of a view of a parameter."""
    if target.element_size() != home.itemsize:
        return Write(part, 0, home.storage.nbytes(), target.nbytes // home.itemsize, None)
    return _write_of_loops(
        int(target.storage_offset()), list(map(Loop, target.shape, target.stride(), target.stride())), home, part
    )


def _write_of_loops(first: int, loops: Sequence[Loop], home: _Memory, part: Part | None = None) -> Write:
    boxed = box_of_loops(home.grid, first, loops)
    last = first + sum((loop.size - 1) * loop.here for loop in loops)
    return Write(part, first, last, prod(loop.size for loop in loops), boxed and boxed[0])


def _dtype(spec: TensorSpec, path: Sequence[torch.dtype], source: torch.dtype, target: torch.dtype) -> str:
    """The dtype of a tensor's values in a parameter after all casts, if these can be repeated exactly."""
    last = DTYPES.get(target, "")
    through = [DTYPES.get(one, "") for one in path]
    if source != path[-1]:  # a view as another dtype: only a copy of the bits can be followed
        if source == target and set(path) == {path[0]}:
            return spec.dtype
    elif can_cast(spec.dtype, last) and all(
        one in (spec.dtype, last) or (spec.dtype, one) in WIDENED for one in through
    ):
        return last
    raise _UntraceableError(f"the loader casts it from {spec.dtype} to {DTYPES.get(target, target)}")


# -- torch -------------------------------------------------------------------------------------------------------------


def _seat(tensor: torch.Tensor) -> tuple[object, ...]:
    """What changes about a tensor when another one is put in its place."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_engines(memory: _Memory | None) -> bool:
    """Whether the memory is the engine's: all that the loader did not allocate itself."""
    return memory is None or memory.parameter is not None


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
