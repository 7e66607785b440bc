"""Weights that arrive as a stream of tensors, one at a time, and are copied to the host in their wire dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weightcast.errors import UsageError
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import NARROW, Bits
from weightcast.format.workers import ONE, Workers
from weightcast.torch.batch import WORDS, Batch, Kernels, Slot, unsigned
from weightcast.torch.coordinates import DTYPES
from weightcast.torch.model import kernels_for, wire_name

_NAMES_LISTED = 5
"""Most names of tensors in an error."""


class Streamed:
    """The last stream's weights in host memory, pinned if they come from a GPU.

    ``table`` is the channel's, if it exists: tensors of it that no stream has, such as frozen ones, keep the bits given
    to `fill`. Without a table, the first stream defines it, and float32 is rounded to ``dtype``.
    """

    def __init__(self, table: TensorTable | None, dtype: str | None, workers: Workers = ONE):
        self._given, self._wire = table, wire_name(dtype)
        self._workers = workers
        self._room: dict[str, torch.Tensor] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._others: Mapping[str, Bits] = {}
        self._tied: Mapping[str, str] = {}
        self._kernels: dict[torch.device, Kernels[Any]] = {}
        self._table: TensorTable | None = None

    @property
    def table(self) -> TensorTable:
        assert self._table is not None, "no stream was taken yet"
        return self._table

    @property
    def missing(self) -> list[str]:
        """Tensors of the channel that the stream did not have."""
        return [spec.name for spec in self.table if spec.name not in self._specs]

    def fill(self, others: Mapping[str, Bits], tied: Mapping[str, str] | None = None) -> None:
        """Set the bits of missing tensors; a ``tied`` one always has those of another tensor."""
        self._others, self._tied = dict(others), dict(tied or {})

    def read(self, name: str) -> Bits:
        room = self._room.get(name)
        if room is None and name in self._tied:
            room = self._room[self._tied[name]]
        return self._others[name] if room is None else unsigned(room)

    @torch.no_grad()
    def take(self, stream: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Consume a stream; returns its size in bytes. `UsageError` if it does not match the table."""
        if self._table is None:  # a first stream that was interrupted defines nothing
            self._specs.clear()
            self._room.clear()
        seen: set[str] = set()
        total, devices = 0, set()
        for name, tensor in stream:
            if name in seen:
                raise UsageError("the trainer sent a tensor twice", tensor=name)
            seen.add(name)
            self._take_one(name, tensor)
            total += tensor.nbytes
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if not seen:
            hint = "Is the whole model frozen? TRL does not send frozen tensors."
            raise UsageError("the trainer sent no tensors", hint=hint)
        if fewer := sorted(self._specs.keys() - seen):  # silently, these would keep their old bits
            names = ", ".join(fewer[:_NAMES_LISTED]) + (" …" if len(fewer) > _NAMES_LISTED else "")
            hint = "If it trains other parameters now, restart the trainer."
            problem = f"the trainer did not send tensors that it sent before: {names}"
            raise UsageError(problem, tensor=fewer[0], hint=hint)
        if self._table is None:
            self._table = self._given or TensorTable.of(self._specs.values())
        return total

    def _take_one(self, name: str, tensor: torch.Tensor) -> None:
        spec = self._specs.get(name) or self._spec_of(name, tensor)
        if tuple(tensor.shape) != spec.shape:
            problem = f"the trainer sent shape {list(tensor.shape)}, the channel has {list(spec.shape)}"
            raise UsageError(problem, tensor=name, hint=_OTHER_MODEL)
        own = DTYPES.get(tensor.dtype)
        narrow = own == "F32" and spec.dtype in NARROW
        if not narrow and own != spec.dtype:
            problem = f"the trainer sent {own or tensor.dtype}, the channel has {spec.dtype}"
            raise UsageError(problem, tensor=name, hint="Train in float32 or in the channel's dtype.")
        slot = Slot(spec, tensor.contiguous(), narrow=narrow)
        if narrow and tensor.device not in self._kernels:
            self._kernels[tensor.device] = kernels_for(tensor.device, self._workers)
        words = self._kernels[tensor.device].take(Batch([slot])).words()[0] if narrow else slot.words()
        if name not in self._room:
            word = WORDS[spec.kind.width // 8]
            self._room[name] = torch.empty(spec.elements, dtype=word, pin_memory=tensor.device.type == "cuda")
            self._specs[name] = spec
        self._room[name].copy_(words, non_blocking=True)

    def _spec_of(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        if self._table is not None and self._given is None:
            raise UsageError("the trainer sent a tensor that it did not send before", tensor=name)
        if self._given is not None:
            if name not in self._given:
                raise UsageError("the channel has no such tensor", tensor=name, hint=_OTHER_MODEL)
            return self._given[name]
        own = DTYPES.get(tensor.dtype)
        if own is None:
            raise UsageError(f"safetensors files cannot hold {tensor.dtype}", tensor=name)
        return TensorSpec(name, self._wire if own == "F32" and self._wire else own, tuple(tensor.shape))


_OTHER_MODEL = (
    "Is this the channel of that model? If the checkpoint stores tensors in another form than the model, as with the"
    " experts of a mixture, publish with weightcast.integrations.transformers.WeightcastCallback."
)
