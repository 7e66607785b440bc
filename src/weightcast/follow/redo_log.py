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
    """By the names of the tensors that the patch changes."""

    @property
    def position(self) -> Position:
        return Position(self.version, self.fingerprint.digest)


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
        self.layers: list[Layer] = []

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def readers(self) -> list[PatchReader]:
        return [layer.reader for layer in self.layers]

    @property
    def end(self) -> tuple[int, Fingerprint] | None:
        """The version that the last patch leads to."""
        return (self.layers[-1].version, self.layers[-1].fingerprint) if self.layers else None

    def open(self, version: int, fingerprint: Fingerprint, *, discard_rest: bool = True) -> None:
        """Open, in order, the patches that lead on from there; delete the others if ``discard_rest``."""
        for path in sorted(self.folder.glob("*")):
            if self._add(path, *(self.end or (version, fingerprint))) is None and discard_rest:
                discard(path)

    def append(self, patch: Path, result: int, version: int, fingerprint: Fingerprint) -> Layer | None:
        """Move in a patch that leads on from ``version``; None if it does not. Durable after `sync`."""
        number = int(self.layers[-1].path.name[:9]) + 1 if self.layers else 0
        place = self.folder / log_name(number, version, result)
        patch.replace(place)
        return self._add(place, version, fingerprint)

    def _add(self, path: Path, version: int, fingerprint: Fingerprint) -> Layer | None:
        layer = open_layer(path, version, fingerprint)
        if layer is not None:
            self.layers.append(layer)
        return layer

    def sync(self) -> None:
        sync_folder(self.folder)

    def drop_first(self, count: int) -> None:
        """Close the first patches, which were deleted; what leads on from them stays."""
        for layer in self.layers[:count]:
            layer.source.close()
        del self.layers[:count]

    def close(self) -> None:
        self.drop_first(len(self))

    def clear(self) -> None:
        """Delete all patches, durably."""
        self.close()
        for path in sorted(self.folder.iterdir()):
            discard(path)
        self.sync()


def delete_layers(layers: Sequence[Layer]) -> None:
    """Delete the files of a log's first layers, the oldest first, durably. Those that are open stay readable."""
    for layer in layers:
        layer.path.unlink(missing_ok=True)
    if layers:
        sync_folder(layers[0].path.parent)


def log_name(number: int, base: int, result: int) -> str:
    """The name of the ``number``-th patch: versions alone do not give the order once a mirror went back."""
    return f"{number:09d}-{base:012d}-{result:012d}.safetensors"


def read_log_name(name: str) -> tuple[int, int] | None:
    """(base, result); None if it is not the name of a patch."""
    found = re.fullmatch(r"\d{9}-(\d{12})-(\d{12})\.safetensors", name, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None
