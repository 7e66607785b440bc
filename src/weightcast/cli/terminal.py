"""The console of rich that progress bars are drawn on. All else is printed through `text`, which needs no rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from weightcast.cli.wording import one_line


class Terminal(Console):
    """A console on which only its own styles and controls are control sequences; strings are never markup."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Also asked for the width of a cell of a table: that must be the width of what is shown."""
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """All that is printed comes through here: texts, the cells of tables, bars."""
        for segment in super().render(visible(renderable) if isinstance(renderable, Text) else renderable, options):
            if segment.control or segment.text in ("", "\n"):
                yield segment
            else:
                lines = segment.text.split("\n")
                yield segment._replace(text="\n".join(map(one_line, lines)))


def visible(text: Text) -> Text:
    """The same text, its styles kept, with all that is not printable spelled out."""
    shown = one_line(text.plain)
    if shown == text.plain:
        return text
    at = [0]
    for character in text.plain:
        at.append(at[-1] + len(one_line(character)))
    made = text.blank_copy(shown)
    made.spans = [Span(at[span.start], at[min(span.end, len(text.plain))], span.style) for span in text.spans]
    return made


err = Terminal(stderr=True)
