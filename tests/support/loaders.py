"""Loaders of one tensor, and a check that a layout learned from a loader is where the loader puts the bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from cases import Bag
from sharded_engine import TORCH_DTYPES, Stream, memory, model_of, stream

from weightcast.engine.casts import cast
from weightcast.engine.layout import Layout
from weightcast.engine.learn import learn
from weightcast.engine.live import LiveParameters
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits

Load = Callable[[torch.nn.Module, Stream], None]


def box_bits(weights: Bag, part: object) -> Bits:
    spec = weights.table[part.name]
    slices = tuple(slice(one.start, one.last + 1, one.step) for one in part.box.ranges)
    return weights.read(part.name).reshape(spec.shape)[slices].reshape(-1)


def learned(model: torch.nn.Module, load: Load, table: TensorTable) -> Layout:
    before = memory(model)
    layout = learn(model, lambda given: load(model, given), table)
    assert memory(model) == before
    return layout


def check(make: Callable[[], torch.nn.Module], load: Load, weights: Bag) -> Layout:
    """Learn, then load for real: each known part holds its box, and nothing that the loader changed is left out."""
    layout = learned(make(), load, weights.table)
    loaded = make()
    load(loaded, stream(weights))
    live = LiveParameters(loaded, layout)
    for part in layout:
        wanted = cast(box_bits(weights, part), weights.table[part.name].dtype, part.dtype)
        assert np.array_equal(live.read(part), wanted)
    ours = make()
    if not layout.unknown:
        load(ours, stream(Bag({spec: ~weights.read(spec.name) for spec in weights.table})))
        live = LiveParameters(ours, layout)
        for part in layout:
            live.write(part, np.ascontiguousarray(box_bits(weights, part)))
        assert memory(ours) == memory(loaded)
    return layout


@dataclass
class One:
    """A loader of one tensor ``x`` into one parameter ``p``."""

    load: Callable[[torch.Tensor, torch.Tensor], object]
    x: tuple[str, tuple[int, ...]] = ("BF16", (4, 6))
    p: tuple[str, tuple[int, ...]] = ("BF16", (4, 6))
    unknown: str | None = None
    finite: bool = False

    def make(self) -> torch.nn.Module:
        return model_of(p=torch.empty(self.p[1], dtype=TORCH_DTYPES[self.p[0]]))

    def run(self, model: torch.nn.Module, given: Stream) -> None:
        for _, tensor in given:
            self.load(model.p.data, tensor)
