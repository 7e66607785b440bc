"""Tables that fit the terminal: whole columns are left out, the least needed first, so that others stay readable."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from weightcast.cli.text import Table, Text, cells, columns

_GAP = 2
"""Spaces between two columns of a table."""


@dataclass(frozen=True)
class Column:
    """A column. The one of the highest ``rank`` is left out first where there is no room; 0 always stays."""

    name: str
    cells: list[Text]
    rank: int = 0
    left: bool = False
    shortest: int | None = None
    """How far its cells may be cut before it is left out; None if they may not."""
    early: bool = False
    """Whether it is left out before any cell is cut."""

    @property
    def full_width(self) -> int:
        return max(cells(text) for text in (self.name, *(cell.plain for cell in self.cells)))

    @property
    def width(self) -> int:
        """The least room that it needs."""
        return self.full_width if self.shortest is None else min(self.full_width, self.shortest)

    @property
    def is_empty(self) -> bool:
        return not any(cell.plain for cell in self.cells)


def chosen(columns: list[Column], width: int | None) -> list[Column]:
    """The columns that fit into ``width``, all of them for None; empty ones are left out."""
    kept = [column for column in columns if not column.is_empty]
    if width is not None and sum(column.full_width + _GAP for column in kept) - _GAP > width:
        kept = [column for column in kept if not column.early]
    while width is not None and sum(column.width + _GAP for column in kept) - _GAP > width:
        least = max(kept, key=lambda column: column.rank)
        if least.rank == 0:
            break  # the terminal is too narrow for what must be shown
        kept.remove(least)
    return kept


def fitted(wanted: list[Column], width: int | None = None) -> Table:
    """A table of the columns that fit ``width``, or the terminal."""
    kept = chosen(wanted, columns(sys.stdout) if width is None else width)
    table = Table()
    for column in kept:
        table.add_column(column.name, "left" if column.left else "right", shrink=column.shortest is not None)
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*row)
    return table
