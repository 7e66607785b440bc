"""A heat map of a patch: which layers and kinds of tensors changed, and how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import natural
from weightcast.format.spec import TensorTable

_STEPS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Densities at which the next block begins."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("bright_black", "blue", "cyan", "green", "yellow", "dark_orange", "red", "bright_red")

_SPARSEST = 16
"""Cells of a grid per filled one, at most; a model with several kinds of layers has 2 to 4."""

_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ENDINGS = ("weight", "bias")


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


def place_of(name: str) -> tuple[str, int, str] | None:
    """(stack, layer, kind) of a tensor, by its name; None for one outside layers.

    >>> place_of("model.layers.12.self_attn.q_proj.weight")
    ('model.layers', 12, 'q_proj')
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit()), None)
    if at is None:
        return None
    return ".".join(parts[:at]), int(parts[at]), _kind(parts[at + 1 :])


def _kind(parts: list[str]) -> str:
    # Numbers further down are experts': they count together.
    named = [part for part in parts if not part.isdigit() and part not in _ENDINGS]
    kind = named[-1] if named else "weight"
    for ending in _ENDINGS:
        kind = kind.removesuffix(f"_{ending}")
    return "norm" if "norm" in kind or kind.startswith("ln_") else kind


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
    known = {kind: place for place, kind in enumerate(_ORDER)}
    kinds = sorted(dict.fromkeys(kind for _, kind in cells), key=lambda kind: (kind == "norm", known.get(kind, 99)))
    return Stack(name, tuple(sorted({layer for layer, _ in cells})), tuple(kinds), cells)


# -- drawn -------------------------------------------------------------------------------------------------------------


def level(density: float) -> int:
    """The block that shows a density above 0."""
    return sum(density >= step for step in _STEPS)


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
    for at, step in enumerate(_STEPS):
        text.append(_BLOCKS[at], _COLOURS[at]).append(f" <{100 * step:g}  ", "dim")
    return text.append(_BLOCKS[-1], _COLOURS[-1]).append(" more", "dim")
