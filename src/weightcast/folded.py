"""What a mirror writes down about itself: where its files stand, and which files are being moved in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.errors import FormatError
from weightcast.files import replacing
from weightcast.keys import Position
from weightcast.manifest import from_json, position_from_json, position_json, to_json

FileTimes = dict[str, tuple[int, int]]
"""Name to (size, time of the last change in nanoseconds): a file that differs was edited by somebody else."""


@dataclass(frozen=True)
class Folded:
    """What the files of a mirror hold, or will hold once ``files`` are moved in."""

    channel: str
    position: Position
    digests: tuple[int, ...]
    files: FileTimes


def write_folded(path: Path, folded: Folded) -> None:
    fields = {
        "channel": folded.channel,
        "digests": [f"{digest:016x}" for digest in folded.digests],
        "files": {name: list(value) for name, value in folded.files.items()},
        "position": position_json(folded.position),
    }
    with replacing(path) as file:
        file.write(to_json("mirror", fields))


def read_folded(path: Path) -> Folded | None:
    """None where there is none, or none that makes sense: then the weights themselves must be read."""
    try:
        return from_json(path.read_bytes(), "mirror", {"channel", "digests", "files", "position"}, _folded)
    except (FileNotFoundError, FormatError):
        return None


def _folded(fields: dict[str, Any]) -> Folded:
    try:
        digests = tuple(int(digest, 16) for digest in fields["digests"])
        files = {str(name): (int(size), int(when)) for name, (size, when) in fields["files"].items()}
    except (TypeError, ValueError, AttributeError):
        raise FormatError("the mirror's position makes no sense") from None
    if any(Path(name).name != name for name in files):
        raise FormatError("the mirror speaks of files that are not its own")
    return Folded(str(fields["channel"]), position_from_json(fields["position"]), digests, files)
