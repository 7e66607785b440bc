"""The layouts by name, and which one a folder has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from weightcast.errors import CheckpointError, UsageError
from weightcast.interop import history, slime_format, trl_source
from weightcast.interop.slime_source import SlimeSource
from weightcast.interop.step import Source

LayoutName = Literal["history", "trl", "slime"]

_FINDERS: dict[LayoutName, Callable[[Path], dict[int, Path]]] = {
    "history": history.steps_in,
    "trl": trl_source.steps_in,
    "slime": slime_format.steps_in,
}

_LOOK = {
    "history": "checkpoint-10/",
    "trl": "anchors/step_000001.safetensors",
    "slime": "weight_v000001/",
}


def layout_of(folder: Path) -> LayoutName:
    """The one layout that the names in a folder are of; `UsageError` if they are of none, or of several."""
    found = [name for name, steps_in in _FINDERS.items() if steps_in(folder)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(found)
        raise UsageError(f"the folder is in several layouts: {names}", file=str(folder), hint="Name one with --from.")
    looks = ", ".join(f"{look} ({name})" for name, look in _LOOK.items())
    raise UsageError("there are no steps in the folder", file=str(folder), hint=f"It should hold {looks}.")


def opened(folder: Path, layout: LayoutName | None = None, base: Path | None = None) -> Source:
    """A folder of another system, checked as far as that can be done without reading weights."""
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", file=str(folder), hint="Check the path.")
    name = layout or layout_of(folder)
    if not _FINDERS[name](folder):
        raise UsageError(f"there are no steps of {name} in the folder", file=str(folder), hint=f"As in {_LOOK[name]}.")
    if name == "history":
        if base is not None:
            raise UsageError("every step of a history is a whole checkpoint", hint="Leave --base out.")
        return history.HistorySource(folder)
    return trl_source.TrlSource(folder, base) if name == "trl" else SlimeSource(folder, base)
