"""What a mirror keeps beside its files: where they stand, or will, and the log of patches that leads on from there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.records import from_json, position_from_json, position_json, to_json
from weightcast.disk.checkpoint import MIRROR
from weightcast.disk.durable import discard, replacing, sync_folder
from weightcast.disk.staged import led_by
from weightcast.errors import FormatError, UsageError, WeightcastError
from weightcast.format.digest import Fingerprint
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.table import Row

FileTimes = dict[str, tuple[int, int]]
"""Name to (size, time of the last change in nanoseconds): a file that differs was edited by somebody else."""


@dataclass(frozen=True)
class Folded:
    """What the files of a mirror hold, or will hold once ``files`` are moved in."""

    channel: str
    url: str
    """Where the channel was last found; empty if nobody said."""
    position: Position
    digests: tuple[int, ...]
    files: FileTimes


def write_folded(path: Path, folded: Folded) -> None:
    fields = {
        "channel": folded.channel,
        "digests": [f"{digest:016x}" for digest in folded.digests],
        "files": {name: list(value) for name, value in folded.files.items()},
        "position": position_json(folded.position),
        "url": folded.url,
    }
    with replacing(path) as file:
        file.write(to_json("mirror", fields))


def read_folded(path: Path) -> Folded | None:
    """None where there is none, or none that makes sense: then the weights themselves must be read."""
    try:
        return from_json(path.read_bytes(), "mirror", {"channel", "digests", "files", "position", "url"}, _folded)
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return None


def _folded(fields: dict[str, Any]) -> Folded:
    try:
        digests = tuple(int(digest, 16) for digest in fields["digests"])
        files = {str(name): (int(size), int(when)) for name, (size, when) in fields["files"].items()}
    except (TypeError, ValueError, AttributeError):
        raise FormatError("the mirror's position makes no sense") from None
    if any(Path(name).name != name for name in files):
        raise FormatError("the mirror speaks of files that are not its own")
    return Folded(str(fields["channel"]), str(fields["url"]), position_from_json(fields["position"]), digests, files)


@dataclass(frozen=True)
class Layer:
    """One patch of a log, and where it leads."""

    version: int
    fingerprint: Fingerprint
    path: Path
    source: FileSource
    reader: PatchReader
    rows: Mapping[str, Row]

    def row(self, name: str) -> Row | None:
        """What it says of a tensor; None if it does not touch it."""
        return self.rows.get(name)


class RedoLog:
    """Staged patches in a folder, each leading on from the one before it. They are taken at their word here: who writes
    them into files proves what comes out.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._layers: list[Layer] = []

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def layers(self) -> Sequence[Layer]:
        return self._layers

    @property
    def readers(self) -> list[PatchReader]:
        return [layer.reader for layer in self._layers]

    @property
    def paths(self) -> list[Path]:
        return [layer.path for layer in self._layers]

    @property
    def end(self) -> tuple[int, Fingerprint] | None:
        """Where the last patch leads."""
        return (self._layers[-1].version, self._layers[-1].fingerprint) if self._layers else None

    def open(self, version: int, fingerprint: Fingerprint) -> None:
        """Take up, in order, the patches that lead on from there; what does not is of no use any more."""
        for path in sorted(self.folder.iterdir()):
            at = self.end or (version, fingerprint)
            if not self._take_up(path, *at):
                discard(path)

    def append(self, patch: Path, result: int, version: int, fingerprint: Fingerprint) -> bool:
        """Move a patch in, behind those that end at ``version``; False if it does not lead on. Durable after `sync`."""
        place = self.folder / log_name(self._next, version, result)
        patch.replace(place)
        return self._take_up(place, version, fingerprint)

    @property
    def _next(self) -> int:
        """The number of the next patch."""
        return int(self._layers[-1].path.name[:9]) + 1 if self._layers else 0

    def sync(self) -> None:
        sync_folder(self.folder)

    def _take_up(self, path: Path, version: int, fingerprint: Fingerprint) -> bool:
        step = read_log_name(path.name)
        if step is None or step[0] != version:
            return False
        with ExitStack() as opening:
            try:
                source = opening.enter_context(FileSource(path))
                reader = PatchReader(source)
                reached = led_by(fingerprint, reader)
            except WeightcastError:
                return False
            if (reader.header.base, reader.header.result) != (fingerprint.digest, reached.digest):
                return False
            opening.pop_all()
        rows = {row.spec.name: row for row in reader.rows}
        self._layers.append(Layer(step[1], reached, path, source, reader, rows))
        return True

    def close(self) -> None:
        for layer in self._layers:
            layer.source.close()
        self._layers = []

    def clear(self) -> None:
        """Remove all patches, durably."""
        self.close()
        for path in self.folder.iterdir():
            discard(path)
        self.sync()


def log_name(number: int, base: int, result: int) -> str:
    """The name of the patch that comes ``number``-th: versions alone do not tell the order where one went back."""
    return f"{number:09d}-{base:012d}-{result:012d}.safetensors"


def read_log_name(name: str) -> tuple[int, int] | None:
    """(base, result); None if it is no name of a patch."""
    found = re.fullmatch(r"\d{9}-(\d{12})-(\d{12})\.safetensors", name, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def make_folders(folder: Path, inner: Path) -> list[Path]:
    """What had to be made, outermost first; `UsageError` where a mirror cannot be."""
    made = []
    if not folder.exists() and not folder.is_symlink():
        if not folder.absolute().parent.is_dir():
            raise UsageError("the folder above it does not exist", file=str(folder), hint="Make it first.")
        folder.mkdir()
        sync_folder(folder.absolute().parent)
        made.append(folder)
    _refuse_strange_folder(folder)
    if not inner.exists():
        inner.mkdir()
        made.append(inner)
    for part in ("log", "staged", "incoming"):
        (inner / part).mkdir(exist_ok=True)
    sync_folder(inner)
    sync_folder(folder)
    return made


def _refuse_strange_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError("a mirror needs a folder", file=str(folder), hint="Name one, or one that can be made.")
    names = {path.name for path in folder.iterdir()}
    if names and MIRROR not in names and not any(name.endswith(".safetensors") for name in names):
        hint = "Name an empty folder, one with a checkpoint, or one that can be made."
        raise UsageError("the folder is neither empty nor a checkpoint", file=str(folder), hint=hint)
