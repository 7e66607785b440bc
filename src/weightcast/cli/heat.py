"""A heat map of a patch: which layers and kinds of tensors changed, and how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import natural
from weightcast.format.spec import TensorTable
from weightcast.view.places import STEPS, in_order, place_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("bright_black", "blue", "cyan", "green", "yellow", "dark_orange", "red", "bright_red")

_SPARSEST = 16
"""Cells of a grid per filled one, at most; a model with several kinds of layers has 2 to 4."""


@dataclass(frozen=True)
class Cell:
    """Some tensors together."""

    changed: int = 0
    elements: int = 0

    def __add__(self, other: Cell) -> Cell:
        return Cell(self.changed + other.changed, self.elements + other.elements)

    @property
    def density(self) -> float:
        return self.changed / max(self.elements, 1)


@dataclass(frozen=True)
class Stack:
    """The layers under one name, such as `model.layers`."""

    name: str
    layers: tuple[int, ...]
    kinds: tuple[str, ...]
    cells: dict[tuple[int, str], Cell]


@dataclass(frozen=True)
class Heat:
    """All of a model: its stacks of layers, and the tensors outside them by name."""

    stacks: tuple[Stack, ...]
    others: dict[str, Cell]


def heat_of(table: TensorTable, changed: Mapping[str, int]) -> Heat:
    """How much of each layer and kind changed; tensors that ``changed`` does not name did not."""
    stacks: dict[str, dict[tuple[int, str], Cell]] = {}
    names: dict[str, dict[str, Cell]] = {}
    others: dict[str, Cell] = {}
    for spec in table:
        cell, place = Cell(changed.get(spec.name, 0), spec.elements), place_of(spec.name)
        if place is None:
            others[spec.name] = cell
        else:
            stack, layer, kind = place
            cells = stacks.setdefault(stack, {})
            cells[layer, kind] = cells.get((layer, kind), Cell()) + cell
            names.setdefault(stack, {})[spec.name] = cell
    drawable = []
    for name, cells in stacks.items():
        grid = _stack(name, cells)
        # Hostile names can make a grid of 10¹⁰ cells, nearly all of them empty.
        if len(grid.layers) * len(grid.kinds) <= _SPARSEST * len(cells):
            drawable.append(grid)
        else:
            others |= names[name]
    return Heat(tuple(drawable), others)


def _stack(name: str, cells: dict[tuple[int, str], Cell]) -> Stack:
    kinds = in_order(kind for _, kind in cells)
    return Stack(name, tuple(sorted({layer for layer, _ in cells})), tuple(kinds), cells)


# -- drawn -------------------------------------------------------------------------------------------------------------


def level(density: float) -> int:
    """The block that shows a density above 0."""
    return sum(density >= step for step in STEPS)


def block(density: float) -> Text:
    """A density as a block and a number of percent."""
    if density == 0:
        return Text("·", "dim")
    at, percent = level(density), 100 * density
    digits = 0 if percent >= 9.95 else 1 if percent >= 0.995 else 2
    return Text(f"{_BLOCKS[at]} {percent:.{digits}f}" if percent >= 0.005 else f"{_BLOCKS[at]} ~0", _COLOURS[at])


def drawn(stack: Stack) -> Table:
    """A stack of layers, one row each."""
    table = Table(Column("layer", style="dim"), *stack.kinds)
    for layer in stack.layers:
        cells = (stack.cells.get((layer, kind)) for kind in stack.kinds)
        table.add(str(layer), *(block(cell.density) if cell else Text("") for cell in cells))
    return table


def listed(cells: Mapping[str, Cell]) -> Table:
    """Tensors by name, where there are no layers to draw."""
    table = Table("", Column(left=True), header=False)
    for name in sorted(cells, key=natural):
        table.add(block(cells[name].density), name)
    return table


def legend() -> Text:
    text = Text("% changed: ", "dim")
    for at, step in enumerate(STEPS):
        text.append(_BLOCKS[at], _COLOURS[at]).append(f" <{100 * step:g}  ", "dim")
    return text.append(_BLOCKS[-1], _COLOURS[-1]).append(" more", "dim")
