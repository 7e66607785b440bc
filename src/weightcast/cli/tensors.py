"""Lists of tensors for people: the largest changes first, names in natural order, and no more than fit a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from weightcast.cli.console import say
from weightcast.cli.heat import block
from weightcast.cli.text import Column, Table
from weightcast.cli.wording import count, natural, size

MOST = 20
"""Lines that a list has unless `--all` is given."""

All = Annotated[bool, typer.Option("--all", help=f"List all of them, not only the {MOST} most changed.")]


def most_changed(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows with `name` and `changed`, the largest changes first; equal ones in natural order of their names."""
    return sorted(rows, key=lambda row: (-row["changed"], natural(row["name"])))


def list_tensors(rows: Sequence[Mapping[str, Any]], everything: bool) -> None:
    """Print tensors with `name`, `changed`, `density`, `dtype`, `shape` and, where it is known, `bytes`."""
    shown = most_changed(rows)[: None if everything else MOST]
    details = Column("size", rank=1), Column("dtype", rank=3), Column("shape", rank=2)
    table = Table("% changed", "elements", *details, Column("tensor", left=True))
    for row in shown:
        stored, shape = row.get("bytes"), "×".join(map(str, row["shape"])) or "scalar"
        table.add(
            block(row["density"]),
            f"{row['changed']:,}",
            "" if stored is None else size(stored),
            row["dtype"],
            shape,
            row["name"],
        )
    say(table)
    if len(rows) > len(shown):
        say(f"{count(len(rows) - len(shown), 'more changed tensor')}: --all lists them")
