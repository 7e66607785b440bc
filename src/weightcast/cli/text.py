"""Styled lines and tables, as plain strings. Text from outside cannot act on the terminal that shows them.

Names of tensors, files and replicas, addresses, and messages of engines and libraries are written by others. Whatever
is printed is made visible here first, however it was put together: no verb has to remember it.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from dataclasses import dataclass
from typing import TextIO

from weightcast.cli.wording import one_line

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_CODES = {"bold": "1", "dim": "2", "dark_orange": "38;5;208"}
_CODES |= {name: f"{30 + i}" for i, name in enumerate(_COLOURS)}
_CODES |= {f"bright_{name}": f"{90 + i}" for i, name in enumerate(_COLOURS)}

_GAP = 2
"""Spaces between two columns of a table."""


def cells(text: str) -> int:
    """The columns of a terminal that printable ``text`` takes up."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _fitted(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, with an ellipsis where some of it is left out."""
    if cells(text) <= width:
        return text
    kept = ""
    for character in text:
        if cells(kept + character) > max(width - 1, 0):
            break
        kept += character
    return kept + "…" if width > 0 else ""


class Text:
    """One line in parts, each with a style such as "dim" or "bold red"."""

    def __init__(self, text: str = "", style: str = ""):
        self._parts = [(one_line(text), style)]

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str]) -> Text:
        text = cls()
        for part in parts:
            text.append(*((part,) if isinstance(part, str) else part))
        return text

    def append(self, text: str, style: str = "") -> Text:
        self._parts.append((one_line(text), style))
        return self

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self._parts)

    def fitted(self, width: int) -> Text:
        """The same text in at most ``width`` columns."""
        fitted = Text()
        for text, style in self._parts:
            shown = _fitted(text, width)
            fitted.append(shown, style)
            if shown != text:
                break
            width -= cells(shown)
        return fitted

    def rendered(self, colours: bool, style: str = "") -> str:
        """A string to print; ``style`` is that of parts which have none of their own."""
        return "".join(_painted(text, own or style) if colours else text for text, own in self._parts)


def _painted(text: str, style: str) -> str:
    codes = ";".join(_CODES[name] for name in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


@dataclass(frozen=True)
class Column:
    """A column of a table. Where there is no room, the one of the highest ``rank`` goes first; 0 always stays."""

    name: str = ""
    left: bool = False
    style: str = ""
    rank: int = 0
    shortest: int | None = None
    """How far its cells may be cut before it is left out; None if they may not."""
    early: bool = False
    """Whether it is left out before any cell is cut."""


class Table:
    """Rows of cells under headers, one line for each row. A name stands for a column on the right.

    Columns without a cell are left out. Where the terminal is too narrow, cells are cut, or columns are left out, so
    that others stay readable.
    """

    def __init__(self, *columns: Column | str, header: bool = True):
        self._columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self._header = header
        self._rows: list[list[Text]] = []

    def add(self, *row: str | Text) -> None:
        """Cells from the left; those that are left out are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        self._rows.append(texts + [Text()] * (len(self._columns) - len(texts)))

    def lines(self, colours: bool, width: int | None = None) -> list[str]:
        """The table in at most ``width`` columns, if that can be; None: as wide as it is."""
        if not self._rows:
            return []
        heads = [[Text(column.name, "dim") for column in self._columns]] if self._header else []
        texts = zip(*heads, *self._rows, strict=True)
        filled = [_Filled(column, list(some)) for column, some in zip(self._columns, texts, strict=True)]
        kept = [one for one in filled if any(text.plain for text in one.texts[len(heads) :])]
        if width is not None:
            kept = _fitting(kept, width)
        lines = zip(*(one.rendered(colours) for one in kept), strict=True)
        return [(" " * _GAP).join(line).rstrip(" ") for line in lines]


class _Filled:
    """A column with its texts, and the room that it gets."""

    def __init__(self, column: Column, texts: list[Text]):
        self.column, self.texts = column, texts
        self.width = max(cells(text.plain) for text in texts)
        self.least = self.width if column.shortest is None else min(self.width, column.shortest)

    def rendered(self, colours: bool) -> list[str]:
        shown = []
        for text in self.texts:
            fitted = text.fitted(self.width)
            space, line = " " * (self.width - cells(fitted.plain)), fitted.rendered(colours, self.column.style)
            shown.append(line + space if self.column.left else space + line)
        return shown


def _fitting(kept: list[_Filled], width: int) -> list[_Filled]:
    """The columns that fit into ``width``, those of the highest ranks left out first, cells cut from the right."""

    def over(widths: list[int]) -> int:
        return sum(widths) + _GAP * (len(widths) - 1) - width

    if over([one.width for one in kept]) > 0:
        kept = [one for one in kept if not one.column.early]
    while over([one.least for one in kept]) > 0:
        last = max(kept, key=lambda one: one.column.rank)
        if last.column.rank == 0:
            break  # the terminal is too narrow for what must be shown
        kept.remove(last)
    for one in reversed(kept):
        one.width -= max(0, min(over([each.width for each in kept]), one.width - one.least))
    return kept


def has_colours(stream: TextIO) -> bool:
    """Whether styles are shown: on a terminal that knows them, unless NO_COLOR says not to."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def columns(stream: TextIO) -> int | None:
    """The width of the terminal, or COLUMNS; None where output goes to a file or a program."""
    return shutil.get_terminal_size().columns if stream.isatty() or os.environ.get("COLUMNS") else None


def printed(what: str | Text | Table, stream: TextIO | None = None) -> str:
    """``what`` as it is written to ``stream``, standard output by default: lines without the last line's end."""
    stream = stream or sys.stdout
    if isinstance(what, Table):
        return "\n".join(what.lines(has_colours(stream), columns(stream)))
    return (Text(what) if isinstance(what, str) else what).rendered(has_colours(stream))
