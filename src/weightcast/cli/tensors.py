"""Lists of tensors for people: the largest changes first, names in natural order, and no more than fit a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from weightcast.cli.console import say
from weightcast.cli.heat import block
from weightcast.cli.text import Table
from weightcast.cli.wording import size
from weightcast.cli.words import count, natural

MOST = 20
"""Lines that a list has unless `--all` is given."""

All = Annotated[bool, typer.Option("--all", help=f"List all of them, not only the {MOST} most changed.")]


def most_changed(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows with `name` and `changed`, the largest changes first; equal ones in natural order of their names."""
    return sorted(rows, key=lambda row: (-row["changed"], natural(row["name"])))


def list_tensors(rows: Sequence[Mapping[str, Any]], everything: bool) -> None:
    """Print tensors with `name`, `changed`, `density` and, where they are known, `dtype`, `shape` and `bytes`."""
    shown = most_changed(rows)[: None if everything else MOST]
    table = Table()
    more = [key for key in ("bytes", "dtype", "shape") if rows and key in rows[0]]
    for column in ("% changed", "elements", *("size" if key == "bytes" else key for key in more)):
        table.add_column(column, justify="right")
    table.add_column("tensor")
    for row in shown:
        table.add_row(
            block(row["density"]), f"{row['changed']:,}", *(_cell(key, row[key]) for key in more), row["name"]
        )
    say(table)
    if len(rows) > len(shown):
        say(f"{count(len(rows) - len(shown), 'more changed tensor')}: --all lists them")


def _cell(key: str, value: Any) -> str:
    if key == "bytes":
        return size(value)
    return "×".join(map(str, value)) or "scalar" if key == "shape" else str(value)
