"""Torch tensors that one rank of any framework has, each a box of a tensor of the checkpoint, as a model to watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Held, Place, place_of
from weightcast.format.spec import TensorTable
from weightcast.format.workers import ONE, Workers
from weightcast.torch.batch import Slot
from weightcast.torch.coordinates import Coordinates, Piece, refuse_unfit
from weightcast.torch.model import LiveModel, WireDtypes, wire_name


class ShardTensors(LiveModel):
    """What this rank publishes: detectors work on it as on a small model whose tensors are the boxes."""

    def __init__(
        self,
        shards: Mapping[str, tuple[str, Box, torch.Tensor]],
        dtype: str | torch.dtype | None = None,
        table: TensorTable | None = None,
        workers: Workers = ONE,
    ):
        """``shards`` by labels of their own; ``table`` is the channel's, if there is one."""
        wire, holder = WireDtypes(wire_name(dtype), table), _Holder(tensor for _, _, tensor in shards.values())
        self._held: dict[str, Held] = {}
        slots: list[Slot] = []
        pieces: list[Piece] = []
        for label, (name, box, tensor) in shards.items():
            refuse_unfit(label, tensor)
            if not tensor.is_contiguous():
                raise UsageError("the tensor is not contiguous", tensor=label, hint="Pass what the optimizer updates.")
            slot = wire.slot(name, box.shape, tensor, 0)
            slots.append(replace(slot, spec=replace(slot.spec, name=label)))
            pieces.append(Piece(label, tensor, 0, box.shape))
            self._held[label] = Held(name, slot.spec.dtype, box)
        self.places: dict[str, Place] = {}
        self.whole = TensorTable(())
        self._watch(Coordinates(tuple(pieces), (), {}, holder, lambda folder: None), slots, workers)

    def declare(self) -> tuple[Sequence[tuple[str, str, Box]], TensorTable | None]:
        """What this rank has; it does not know the whole table."""
        return list(self._held.values()), None

    def place(self, whole: TensorTable) -> None:
        """Take up the whole table that was agreed on."""
        self.whole = whole
        self.places = {label: place_of(whole[held.name], held.box) for label, held in self._held.items()}


class _Holder(nn.Module):
    """A module whose parameters and buffers are given tensors themselves, so that an optimizer's are recognised."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"shard_{i}", tensor)
            else:
                self.register_buffer(f"shard_{i}", tensor)
