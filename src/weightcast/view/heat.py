"""A heat map over versions: what share of each layer and of each kind of tensor changed. Pure, and bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightcast.format.spec import TensorTable
from weightcast.view.journal import short
from weightcast.view.places import in_order, place_of

MOST_LAYERS, MOST_KINDS, MOST_OTHERS = 64, 16, 8
"""Rows of a map: more layers are drawn together with their neighbours, rarer kinds and tensors as one."""

_OTHERS = "all others"


@dataclass(frozen=True)
class Axes:
    """The rows of a model's maps, and where each tensor belongs."""

    layers: tuple[str, ...]
    """Layers, and then tensors outside of layers."""
    kinds: tuple[str, ...]
    """Kinds of tensors in layers, and then tensors outside of layers."""
    in_layers: tuple[int, int]
    """How many of the two are of layers."""
    places: Mapping[str, tuple[int, int]]
    elements: tuple[tuple[int, ...], ...]
    """Of each layer and kind."""

    @classmethod
    def of(cls, table: TensorTable) -> Axes:
        placed = {spec.name: place_of(spec.name) for spec in table}
        inside = [(spec, place) for spec in table if (place := placed[spec.name]) is not None]
        outside = [spec for spec in table if placed[spec.name] is None]
        stacks = list(dict.fromkeys(place[0] for _, place in inside))
        numbers = {stack: i for i, stack in enumerate(stacks)}
        order = sorted({(numbers[stack], layer) for _, (stack, layer, _) in inside})
        names = [f"{stacks[stack]}.{layer}" if len(stacks) > 1 else f"layer {layer}" for stack, layer in order]
        rows, layer_names = _grouped(names)
        row_of = dict(zip(order, rows, strict=True))
        sizes: dict[str, int] = {}
        for spec, (_, _, kind) in inside:
            sizes[kind] = sizes.get(kind, 0) + spec.elements
        kind_of, kind_names = _largest(sizes, MOST_KINDS)
        other_of, other_names = _largest({spec.name: spec.elements for spec in outside}, MOST_OTHERS)
        places = {spec.name: (row_of[numbers[stack], layer], kind_of[kind]) for spec, (stack, layer, kind) in inside}
        for spec in outside:
            at = other_of[spec.name]
            places[spec.name] = (len(layer_names) + at, len(kind_names) + at)
        layers, kinds = (*layer_names, *other_names), (*kind_names, *other_names)
        elements = _summed(places, {spec.name: spec.elements for spec in table}, len(layers), len(kinds))
        return cls(layers, kinds, (len(layer_names), len(kind_names)), places, elements)

    def as_json(self) -> dict[str, Any]:
        names = {"layers": [short(name) for name in self.layers], "kinds": [short(name) for name in self.kinds]}
        return {**names, "inLayers": self.in_layers}

    def column(self, changed: Mapping[str, int]) -> dict[str, Any]:
        """The shares of one version; `KeyError` for a tensor that the table lacks."""
        counts = _summed(self.places, changed, len(self.layers), len(self.kinds))
        height, width = self.in_layers
        return {
            "layers": [_share(sum(row), sum(of)) for row, of in zip(counts, self.elements, strict=True)],
            "kinds": [
                _share(sum(row), sum(of))
                for row, of in zip(zip(*counts, strict=True), zip(*self.elements, strict=True), strict=True)
            ],
            "grid": [
                [_share(count, of) for count, of in zip(row[:width], elements[:width], strict=True)]
                for row, elements in zip(counts[:height], self.elements[:height], strict=True)
            ],
        }


def _grouped(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The row of each layer, and the rows' names."""
    if len(names) <= MOST_LAYERS:
        return list(range(len(names))), list(names)
    rows = [i * MOST_LAYERS // len(names) for i in range(len(names))]
    ends: dict[int, tuple[int, int]] = {}
    for i, row in enumerate(rows):
        ends[row] = (ends.get(row, (i, i))[0], i)
    return rows, [
        names[first] if first == last else f"{names[first]} to {names[last].rpartition('.')[2].removeprefix('layer ')}"
        for first, last in ends.values()
    ]


def _largest(sizes: Mapping[str, int], most: int) -> tuple[dict[str, int], list[str]]:
    """The row of each name, and the rows' names: the largest have one each."""
    kept = list(sizes)
    if len(sizes) > most:
        kept = sorted(sizes, key=lambda name: -sizes[name])[: most - 1]
    kept = in_order(kept)
    names = kept if len(kept) == len(sizes) else [*kept, _OTHERS]
    rows = {name: i for i, name in enumerate(kept)}
    return {name: rows.get(name, len(kept)) for name in sizes}, names


def _summed(
    places: Mapping[str, tuple[int, int]], counts: Mapping[str, int], height: int, width: int
) -> tuple[tuple[int, ...], ...]:
    made = [[0] * width for _ in range(height)]
    for name, count in counts.items():
        row, column = places[name]
        made[row][column] += count
    return tuple(map(tuple, made))


def _share(count: int, of: int) -> float | None:
    return float(f"{min(count / of, 1.0):.3g}") if of else None
