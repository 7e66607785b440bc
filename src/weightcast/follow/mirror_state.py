"""The record of what a mirror's files hold, so that opening it need not read all weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.records import from_json, position_from_json, position_json, to_json
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import replacing
from weightcast.errors import FormatError
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorTable

FileTimes = dict[str, tuple[int, int]]
"""Name to (size, time of the last change in nanoseconds): a file that differs was edited by another program."""


@dataclass(frozen=True)
class FilesState:
    """What the files of a mirror hold, or will hold once ``files`` are moved in."""

    channel: str
    url: str
    """Where the channel was last found; empty if that is not known."""
    position: Position
    digests: tuple[int, ...]
    files: FileTimes

    def fingerprint(self, table: TensorTable, channel: str | None = None) -> Fingerprint | None:
        """The fingerprint of the files; None if it is not of the table or the channel, or does not fit the position."""
        if (channel is not None and self.channel != channel) or len(self.digests) != len(table):
            return None
        found = Fingerprint(table, self.digests)
        return found if found.digest == self.position.digest else None


def write_state(path: Path, state: FilesState) -> None:
    """Write the record, durably."""
    fields = {
        "channel": state.channel,
        "digests": [f"{digest:016x}" for digest in state.digests],
        "files": {name: list(value) for name, value in state.files.items()},
        "position": position_json(state.position),
        "url": state.url,
    }
    with replacing(path) as file:
        file.write(to_json("mirror", fields))


def read_state(path: Path) -> FilesState | None:
    """None if there is no record, or it is damaged: then the weights themselves must be read."""
    try:
        return from_json(path.read_bytes(), "mirror", {"channel", "digests", "files", "position", "url"}, _state)
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return None


def _state(fields: dict[str, Any]) -> FilesState:
    try:
        digests = tuple(int(digest, 16) for digest in fields["digests"])
        files = {str(name): (int(size), int(when)) for name, (size, when) in fields["files"].items()}
    except (TypeError, ValueError, AttributeError):
        raise FormatError("the mirror's record of its files is damaged") from None
    if any(Path(name).name != name for name in files):
        raise FormatError("the mirror's record names files outside its folder")
    return FilesState(
        str(fields["channel"]), str(fields["url"]), position_from_json(fields["position"]), digests, files
    )


def file_times(files: Checkpoint) -> FileTimes:
    """Sizes and times of a checkpoint's files."""
    found = {}
    for path in files.files:
        with suppress(FileNotFoundError):
            status = path.stat()
            found[path.name] = status.st_size, status.st_mtime_ns
    return found
