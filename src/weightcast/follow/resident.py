"""A mirror's weights in memory: a version is decoded against them, without reading files and log again."""

from __future__ import annotations

import os
from pathlib import Path

from weightcast.disk.staged import Overlay, overlay_tensor
from weightcast.format.patchfile import PatchReader
from weightcast.format.spec import TensorTable
from weightcast.format.table import Row
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers

SHARE = 0.5
"""Of the memory that is available: a model that needs more is read from its files every time."""


class Resident:
    """The tensors of one version that were read before, kept and brought on to the next one."""

    def __init__(self, table: TensorTable, workers: Workers):
        self._table, self._workers = table, workers
        self._bits: dict[str, Bits] = {}
        self._room = 0

    def begin(self) -> None:
        """Keep what is read from now on, if the whole model fits: before, a single update may be all there is."""
        if not self._room:
            self._room = int(SHARE * available_memory())

    def over(self, under: Overlay) -> Kept:
        return Kept(under, self._bits, self._table.nbytes <= self._room)

    def advance(self, layer: PatchReader) -> None:
        """Bring what is kept on to the version that a staged patch leads to."""

        def one(row: Row) -> None:
            self._bits[row.spec.name] = overlay_tensor(layer, row, self._bits[row.spec.name])

        self._workers.map(one, [row for row in layer.rows if row.spec.name in self._bits])

    def drop(self) -> None:
        """Keep nothing: the files or the log are not what they were."""
        self._bits = {}


class Kept:
    """Weights that are read from ``under`` once. Nobody writes to what `read` returns."""

    def __init__(self, under: Overlay, bits: dict[str, Bits], keeps: bool):
        self.table = under.table
        self._under, self._bits, self._keeps = under, bits, keeps

    def read(self, name: str) -> Bits:
        bits = self._bits.get(name)
        if bits is None:
            bits = self._under.read(name)
            if self._keeps:
                self._bits[name] = bits
        return bits


def available_memory() -> int:
    """Bytes that could be taken now without pushing others out: of the machine, or of the container if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(fields.get("MemAvailable", fields["MemFree"]).split()[0]))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        found.append(int(text) - int(used.read_text()))
    return max(0, min(found))
