"""A live torch model as weights: read and digested in place, and as a target for patches."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightcast.errors import UsageError
from weightcast.format.codec.coded import BlockDecoder
from weightcast.format.digest import MODULUS
from weightcast.format.kernels import cpu
from weightcast.format.scan import WireDtype, check_wire_dtype
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import NARROW, Bits
from weightcast.format.workers import ONE, Workers
from weightcast.torch.adapters import layout_of
from weightcast.torch.batch import Batch, Kernels, Slot, batches_of, unsigned
from weightcast.torch.coordinates import (
    DTYPES,
    Coordinates,
    Made,
    Making,
    Tensors,
    is_dtensor,
    memory_of,
    same_memory,
)
from weightcast.torch.decoder import DecodingKernels, decode_in_place
from weightcast.torch.kernels.host import HostKernels
from weightcast.torch.kernels.operations import PlainKernels

_MADE = 1 << 26
"""Elements of tensors that are not part of the model's memory, which are computed for one batch."""


class LiveModel:
    """The current weights of a model under the names of its checkpoint.

    float32 tensors are rounded to ``dtype`` if one is given, or to the dtype that ``table``, a channel's, has.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: str | torch.dtype | None = None,
        table: TensorTable | None = None,
        workers: Workers = ONE,
    ):
        layout, wire = layout_of(model), WireDtypes(wire_name(dtype), table)
        pieces = [wire.slot(one.name, one.shape, one.source, one.offset) for one in layout.pieces]
        made = [wire.slot(one.name, one.shape, unmade(one), 0) for one in layout.made]
        self._watch(layout, pieces + made, workers)

    def _watch(self, layout: Coordinates, slots: Sequence[Slot], workers: Workers) -> None:
        """Begin to watch the model's tensors; those of them that are read are the ``slots``."""
        self.layout = layout
        self.is_adapter = layout.is_adapter
        self._kernels: dict[torch.device, Kernels[Any]] = {}
        self._workers = workers
        self.slots = {slot.spec.name: slot for slot in slots}
        self.made: dict[str, Made] = {made.name: made for made in layout.made if made.name in self.slots}
        aliases = {alias: name for alias, name in layout.aliases.items() if name in self.slots}
        self.table = TensorTable.of([slot.spec for slot in slots], aliases)
        tensors = self._tensors()
        self._known = set(tensors)
        self._names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(id(tensor), []).append(name)
        self._homes = {piece.name: self._names[id(piece.source)] for piece in self.layout.pieces}
        self._kinds = {piece.name: _kind(piece.source) for piece in self.layout.pieces}
        self._census = _Census.of(self.layout.model)
        self._last_read: tuple[Making, list[tuple[int, ...]], Tensors] | None = None

    @property
    def model(self) -> torch.nn.Module:
        return self.layout.model

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, under each of their names."""
        named = self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False)
        return dict(named[0]) | dict(named[1])

    def relocate(self) -> list[str]:
        """Find tensors of the model that were replaced, and watch the new ones; returns their names.

        `UsageError` if a new one has another dtype, size or device: its memory would be misread.
        """
        self.layout.refuse_changed()
        self._last_read = None
        census = _Census.of(self.model)
        if census.same(self._census):
            return []
        tensors = self._tensors()
        for name in sorted(tensors.keys() - self._known):
            if isinstance(tensors[name], torch.nn.Parameter):
                raise _gone(name)
        for made in self.layout.made:
            if any(tensors.get(name) is not source for source in made.sources for name in self._names[id(source)]):
                raise _gone(made.name)
        moved = []
        for name, home in self._homes.items():
            now, slot = [tensors.get(other) for other in home], self.slots.get(name)
            first = now[0]
            tied = first is not None and all(one is not None and same_memory(one, first) for one in now)
            if first is None or not tied or _kind(first) != self._kinds[name]:
                raise _gone(name)
            if slot is not None and slot.registered is not first:
                moved.append(name)
            if slot is not None:
                slot.source, slot.dtensor = memory_of(first), first if is_dtensor(first) else None
        self._census = census
        return moved

    def batches(self, slots: Iterable[Slot] | None = None, most: int | None = None) -> list[Batch]:
        """Group slots, or all of them, into batches; a batch has at most ``most`` elements.

        Tensors that are not part of the model's memory have batches of their own, of a limited size.
        """
        given = list(self.slots.values() if slots is None else slots)
        own = [slot for slot in given if slot.spec.name not in self.made]
        made = [slot for slot in given if slot.spec.name in self.made]
        return batches_of(own, most) + batches_of(made, min(most or _MADE, _MADE))

    @contextmanager
    def present(self, batch: Batch) -> Iterator[None]:
        """Compute the tensors of a batch that are not part of the model's memory; they are freed after the block."""
        slots = {slot.spec.name: slot for slot in batch.slots if slot.spec.name in self.made}
        try:
            for making in {id(self.made[name].making): self.made[name].making for name in slots}.values():
                for name, tensor in making.tensors().items():
                    if name in slots:
                        slots[name].source = tensor.contiguous()
            yield
        finally:
            for name, slot in slots.items():
                slot.source = unmade(self.made[name])

    def kernels(self, device: torch.device) -> Kernels[Any]:
        if device not in self._kernels:
            self._kernels[device] = kernels_for(device, self._workers)
        return self._kernels[device]

    def read(self, name: str) -> Bits:
        """A tensor's wire bits: the model's own memory if it is on the host and nothing is rounded."""
        slot = self.slots[name]
        if name in self.made:
            slot = replace(slot, source=self._compute(self.made[name]))
        if not slot.narrow:
            return unsigned(slot.words().cpu())
        return unsigned(self.kernels(slot.source.device).take(Batch([slot])).words()[0].cpu())

    def _compute(self, made: Made) -> torch.Tensor:
        """A tensor that is not part of the model's memory.

        What is computed together is kept until the next scan, or until a source was written to: a layer of experts is
        read as hundreds of tensors.
        """
        marks = [marks_of(source) for source in made.sources]
        last = self._last_read
        if last is None or last[0] is not made.making or last[1] != marks:
            last = self._last_read = made.making, marks, made.making.tensors()
        return last[2][made.name].contiguous()

    def save_beside(self, folder: Path) -> None:
        """Write the files that loaders need beside the weights: a model's or an adapter's configuration."""
        self.layout.write_configs(folder)

    def digests(self) -> list[int]:
        """The digests of all tensors, computed in place."""
        found: dict[str, int] = {}
        for batch in self.batches():
            kernels = self.kernels(batch.device)
            with self.present(batch):
                sums = kernels.digests(batch).tolist()
            kernels.rest(batch)
            found |= {spec.name: total % MODULUS for spec, total in zip(batch.specs, sums, strict=True)}
        return [found[spec.name] for spec in self.table]


class TorchTarget(LiveModel):
    """Any torch module as a target: patches are written into its parameters and buffers, in place.

    >>> target = TorchTarget(torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    >>> [spec.name for spec in target.table]
    ['bias', 'weight']
    """

    def __init__(self, model: torch.nn.Module, workers: Workers = ONE):
        super().__init__(model, workers=workers)
        for name in self.made:
            hint = "Follow the channel into a mirror folder, and load that."
            raise UsageError("the tensor is not part of the model's memory", tensor=name, hint=hint)

    def block_decoder(self, names: Sequence[str]) -> BlockDecoder | None:
        """Implements `DecodesBlocks`, for tensors on devices whose kernels decode."""
        slots = {name: self.slots[name] for name in names if name in self.slots}
        kernels = {slot.source.device: self.kernels(slot.source.device) for slot in slots.values()}
        able = {device: found for device, found in kernels.items() if isinstance(found, DecodingKernels)}
        if len(slots) < len(names) or len(able) < len(kernels) or any(slot.narrow for slot in slots.values()):
            return None
        return partial(decode_in_place, slots, able.__getitem__)

    @torch.no_grad()
    def overwrite(self, name: str, indices: npt.NDArray[np.int64], new: Bits) -> None:
        words = self.slots[name].words()
        if words.device.type == "cpu":
            cpu.scatter(unsigned(words), indices, new)
        else:
            words[torch.from_numpy(indices).to(words.device)] = words_of(new).to(words.device)

    @torch.no_grad()
    def write(self, name: str, bits: Bits) -> None:
        self.slots[name].words().copy_(words_of(bits))


@dataclass(frozen=True)
class WireDtypes:
    """The dtypes that tensors are published in: float32 may be rounded."""

    wire: WireDtype | None
    table: TensorTable | None
    """The channel's, which decides about the tensors that it has."""

    def spec(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        own = DTYPES[dtype]
        wanted = self.table[name].dtype if self.table is not None and name in self.table else self.wire or own
        return TensorSpec(name, wanted if own == "F32" and wanted in NARROW else own, shape)

    def slot(self, name: str, shape: tuple[int, ...], registered: torch.Tensor, offset: int) -> Slot:
        """A tensor of that shape, which begins at an element of what is in memory of a parameter or buffer."""
        spec = self.spec(name, shape, registered.dtype)
        dtensor = registered if is_dtensor(registered) else None
        return Slot(spec, memory_of(registered), offset, spec.dtype != DTYPES[registered.dtype], dtensor)


def marks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """What changes when anything writes to a tensor, except through `.data`, which torch does not count.

    A DTensor counts what is written to it, its local tensor what is written to that.
    """
    memory = memory_of(tensor)
    return _write_count(tensor), _write_count(memory), memory.data_ptr()


def _write_count(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def unmade(made: Made) -> torch.Tensor:
    """Stands for a tensor that is not computed at the moment: of its dtype, on its device, without elements."""
    return torch.empty(0, dtype=made.dtype, device=made.sources[0].device)


@dataclass
class _Census:
    """The tensors of a model, their kinds and addresses; without names, which would take twice as long."""

    tensors: list[torch.Tensor]
    kinds: list[tuple[object, ...]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> _Census:
        tensors = [
            tensor
            for module in model.modules()
            for own in (module._parameters, module._buffers)
            for tensor in own.values()
            if tensor is not None
        ]
        memories = map(memory_of, tensors)
        return cls(tensors, [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) for t in memories])

    def same(self, other: _Census) -> bool:
        return self.kinds == other.kinds and all(map(operator.is_, self.tensors, other.tensors))


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    memory = memory_of(tensor)
    return tensor.shape, memory.dtype, memory.shape, memory.device, memory.is_contiguous(), placements_of(tensor)


def placements_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Where the parts of a DTensor are; None for other tensors."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None  # type: ignore[attr-defined]


def _gone(name: str) -> UsageError:
    hint = "Close the publisher before you move, convert or replace the model's tensors, and open a new one afterwards."
    return UsageError("the watched tensor was moved, converted or replaced", tensor=name, hint=hint)


def words_of(bits: Bits) -> torch.Tensor:
    """Bits as a tensor of signed words; copied only if they are read-only."""
    signed = bits.view("u1" if bits.itemsize == 1 else f"<i{bits.itemsize}")
    return torch.from_numpy(signed if signed.flags.writeable else signed.copy())


def wire_name(dtype: str | torch.dtype | None) -> WireDtype | None:
    """The name of the dtype that float32 is published in; `UsageError` for one that it cannot be rounded to."""
    if dtype is None:
        return None
    return check_wire_dtype(DTYPES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def kernels_for(device: torch.device, workers: Workers = ONE) -> Kernels[Any]:
    """The kernels for tensors of a device."""
    if device.type == "cpu":
        return HostKernels(workers)
    if device.type == "cuda" and has_triton():
        from weightcast.torch.kernels.gpu import GpuKernels

        return GpuKernels()
    return PlainKernels()
