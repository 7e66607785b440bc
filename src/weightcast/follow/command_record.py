"""For which version the command of `pull --exec` last succeeded: a record in the mirror that survives a kill.

It names the channel and the command: for a version of another channel, or another command, it does not count. An engine
that reloads the mirror has the same record, with its address for the command.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.records import from_json, position_from_json, position_json, to_json
from weightcast.disk.durable import replacing
from weightcast.errors import FormatError
from weightcast.follow.mirror_folder import MirrorFolder


@dataclass(frozen=True)
class Ran:
    """A command that succeeded; ``command`` is the SHA-256 of its text."""

    channel: str
    command: str
    position: Position

    @classmethod
    def of(cls, channel: str, command: str, position: Position) -> Ran:
        return cls(channel, hashlib.sha256(command.encode("utf-8", "surrogateescape")).hexdigest(), position)


def write_ran(folder: Path, ran: Ran) -> None:
    """Write the record, durably."""
    fields = {"channel": ran.channel, "command": ran.command, "position": position_json(ran.position)}
    with replacing(MirrorFolder(folder).ran) as file:
        file.write(to_json("ran", fields))


def read_ran(folder: Path) -> Ran | None:
    """None if no command succeeded yet, or the record is damaged: then the command is run again."""
    try:
        data = MirrorFolder(folder).ran.read_bytes()
        return from_json(data, "ran", {"channel", "command", "position"}, _ran)
    except (FileNotFoundError, FormatError):
        return None


def _ran(fields: dict[str, Any]) -> Ran:
    return Ran(str(fields["channel"]), str(fields["command"]), position_from_json(fields["position"]))
