"""A mirror's redo log: staged patches that lead on from what its files hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.disk.durable import discard, sync_folder
from weightcast.disk.staged import fingerprint_after
from weightcast.errors import WeightcastError
from weightcast.format.digest import Fingerprint
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.table import Row


@dataclass(frozen=True)
class Layer:
    """One patch of a log, open, and the version that it leads to."""

    version: int
    fingerprint: Fingerprint
    path: Path
    source: FileSource
    reader: PatchReader
    rows: Mapping[str, Row]

    @property
    def position(self) -> Position:
        return Position(self.version, self.fingerprint.digest)

    def row(self, name: str) -> Row | None:
        """What the patch says of a tensor; None if it does not touch it."""
        return self.rows.get(name)


def open_layer(path: Path, version: int, fingerprint: Fingerprint) -> Layer | None:
    """Open a patch of a log; None if it is damaged or does not lead on from ``version`` with this fingerprint.

    The digests in its table are not checked here: a fold verifies the bits before it writes them.
    """
    step = read_log_name(path.name)
    if step is None or step[0] != version:
        return None
    with ExitStack() as opening:
        try:
            source = opening.enter_context(FileSource(path))
            reader = PatchReader(source)
            reached = fingerprint_after(fingerprint, reader)
        except WeightcastError:
            return None
        if (reader.header.base, reader.header.result) != (fingerprint.digest, reached.digest):
            return None
        opening.pop_all()
    return Layer(step[1], reached, path, source, reader, {row.spec.name: row for row in reader.rows})


class RedoLog:
    """Staged patches in a folder, in order, each leading on from the one before it."""

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

    def open(self, version: int, fingerprint: Fingerprint, *, discard_rest: bool = True) -> None:
        """Open, in order, the patches that lead on from there; delete the others if ``discard_rest``."""
        for path in sorted(self.folder.glob("*")):
            if not self._add(path, *(self.end or (version, fingerprint))) and discard_rest:
                discard(path)

    def append(self, patch: Path, result: int, version: int, fingerprint: Fingerprint) -> bool:
        """Move in a patch that leads on from ``version``; False if it does not. Durable after `sync`."""
        place = self.folder / log_name(self._next, version, result)
        patch.replace(place)
        return self._add(place, version, fingerprint)

    @property
    def _next(self) -> int:
        """The number of the next patch."""
        return int(self._layers[-1].path.name[:9]) + 1 if self._layers else 0

    def _add(self, path: Path, version: int, fingerprint: Fingerprint) -> bool:
        layer = open_layer(path, version, fingerprint)
        if layer is not None:
            self._layers.append(layer)
        return layer is not None

    def sync(self) -> None:
        sync_folder(self.folder)

    def close(self) -> None:
        for layer in self._layers:
            layer.source.close()
        self._layers = []

    def clear(self) -> None:
        """Delete all patches, durably."""
        self.close()
        for path in self.folder.iterdir():
            discard(path)
        self.sync()


def log_name(number: int, base: int, result: int) -> str:
    """The name of the ``number``-th patch: versions alone do not give the order once a mirror went back."""
    return f"{number:09d}-{base:012d}-{result:012d}.safetensors"


def read_log_name(name: str) -> tuple[int, int] | None:
    """(base, result); None if it is not the name of a patch."""
    found = re.fullmatch(r"\d{9}-(\d{12})-(\d{12})\.safetensors", name, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None
