"""Styled lines and tables, as plain strings. Text from outside cannot act on the terminal that shows them.

Names of tensors, files and replicas, addresses, and messages of engines and libraries are written by others. Whatever
is printed is made visible here first, however it was put together: no verb has to remember it.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from dataclasses import dataclass, field
from typing import Literal, TextIO

from weightcast.cli.wording import one_line

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_CODES = {"bold": "1", "dim": "2", "dark_orange": "38;5;208"}
_CODES |= {name: f"{30 + i}" for i, name in enumerate(_COLOURS)}
_CODES |= {f"bright_{name}": f"{90 + i}" for i, name in enumerate(_COLOURS)}


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
class _Column:
    header: str
    justify: Literal["left", "right"]
    style: str
    shrinks: bool


@dataclass
class Table:
    """Rows of cells under headers, two spaces between columns, one line for each row.

    Where the terminal is too narrow, columns that ``shrink`` end in an ellipsis.
    """

    header: bool = True
    _columns: list[_Column] = field(default_factory=list)
    _rows: list[list[Text]] = field(default_factory=list)

    def add_column(
        self, header: str = "", justify: Literal["left", "right"] = "left", style: str = "", *, shrink: bool = False
    ) -> None:
        self._columns.append(_Column(one_line(header), justify, style, shrink))

    def add_row(self, *row: str | Text) -> None:
        """Cells from the left; those that are left out are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        self._rows.append(texts + [Text()] * (len(self._columns) - len(texts)))

    def lines(self, colours: bool, width: int | None = None) -> list[str]:
        """The table in at most ``width`` columns, if those that shrink can make it so; None: as wide as it is."""
        headers = [Text(column.header, "dim") for column in self._columns]
        rows = [headers] * self.header + self._rows
        widths = [max((cells(row[i].plain) for row in rows), default=0) for i in range(len(self._columns))]
        over = sum(widths) + 2 * (len(widths) - 1) - width if width is not None else 0
        for i in reversed(range(len(widths))):
            if over > 0 and self._columns[i].shrinks:
                less = min(over, max(widths[i] - 1, 0))
                widths[i], over = widths[i] - less, over - less
        return [self._line(row, widths, colours) for row in rows]

    def _line(self, row: list[Text], widths: list[int], colours: bool) -> str:
        shown = []
        for column, cell, width in zip(self._columns, row, widths, strict=True):
            fitted = cell.fitted(width)
            space, text = " " * (width - cells(fitted.plain)), fitted.rendered(colours, column.style)
            shown.append(space + text if column.justify == "right" else text + space)
        return "  ".join(shown).rstrip(" ")


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
