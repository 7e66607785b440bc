"""`--events` of the verbs that publish or follow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.events.event import Sink


def event_sinks(events: Path | None, opened: ExitStack) -> list[Sink]:
    """The file that --events names, open until ``opened`` ends; nothing without it."""
    if events is None:
        return []
    from weightcast.events.json_lines import JsonLines

    return [opened.enter_context(JsonLines(events))]
