"""Patches that lead back, made while a mirror folds its log: it can return to its last versions without a download.

Each holds the bits that one version overwrote. They are a cache: one that is missing, damaged or does not begin at the
mirror's version costs a download and nothing else, and the result is verified as that of any patch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from weightcast.channel.keys import Position
from weightcast.disk.durable import Report, discard, replacing
from weightcast.disk.staged import Overlay, stage
from weightcast.errors import CheckpointError, FormatError, MismatchError, UsageError, WeightcastError
from weightcast.follow.mirror_state import FilesState
from weightcast.follow.redo_log import Layer, log_name, read_log_name
from weightcast.follow.replica import Staged, StagedPatch
from weightcast.format.codec import plain
from weightcast.format.digest import Fingerprint
from weightcast.format.patch import ModelSize, TensorPatch
from weightcast.format.patchfile import PatchReader, PatchWriter
from weightcast.format.safetensors import FileSource
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits, Weights
from weightcast.format.workers import Workers

MOST = 16
"""Versions that a mirror can go back without a download: two folds of a follower."""

_SHARE, _FLOOR = 2, 1 << 24
"""The limit of all patches together: the weights' bytes divided by the first, but at least the second."""


class History:
    """The patches that lead back, in a folder; the newest has the highest number."""

    def __init__(self, folder: Path, table: TensorTable):
        self._folder = folder
        self._table = table
        self._limit = max(table.nbytes // _SHARE, _FLOOR)

    def _newest_first(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        for path in sorted(self._folder.iterdir(), reverse=True) if self._folder.is_dir() else ():
            step = read_log_name(path.name)
            if step is not None:
                yield path, step

    def stage(
        self,
        files: Weights,
        fingerprint: Fingerprint,
        start: Position,
        goal: Position,
        staging: Path,
        workers: Workers,
        report: Report,
    ) -> Staged | None:
        """Stage the route from ``start``, which ``files`` hold, back to ``goal``; None if no intact one leads there."""
        route = self._route(start, goal)
        if route is None:
            return None
        for left in staging.iterdir():
            discard(left)
        patches: list[StagedPatch] = []
        with ExitStack() as opened:
            layers: list[PatchReader] = []
            for number, (path, version) in enumerate(route):
                out = staging / f"back-{number}.safetensors"
                try:
                    reader = PatchReader(opened.enter_context(FileSource(path)))
                    under = Overlay(files, layers, fresh=True)
                    fingerprint = stage(reader, under, fingerprint, out, workers, report)
                except (FormatError, MismatchError, UsageError, CheckpointError):
                    discard(path)  # damaged: the version is fetched instead
                    return None
                layers.append(PatchReader(opened.enter_context(FileSource(out))))
                patches.append(StagedPatch(Position(version, fingerprint.digest), out))
        return Staged(start, goal, fingerprint, tuple(patches))

    def _route(self, start: Position, goal: Position) -> list[tuple[Path, int]] | None:
        """The patches from ``start`` to ``goal`` with the version each leads to, by their headers; None if none do."""
        found, at = [], start
        for path, (base, result) in self._newest_first():
            if base != at.version:
                continue
            try:
                with FileSource(path) as source:
                    header = PatchReader(source).header
            except WeightcastError:
                return None
            if header.base == at.digest:
                found.append((path, result))
                at = Position(result, header.result)
            if at == goal:
                return found
        return None

    def record(self, base: FilesState, layers: Sequence[Layer]) -> Undo:
        """Begin to record what folding ``layers`` into ``base`` overwrites, as far as the limits and the disk allow."""
        self._folder.mkdir(exist_ok=True)
        kept, nbytes = 0, 0
        for layer in reversed(layers[-MOST:]):
            nbytes += layer.path.stat().st_size
            if nbytes > self._limit or 4 * nbytes > shutil.disk_usage(self._folder).free:
                break
            kept += 1
        first = base.position.version, Fingerprint(self._table, base.digests)
        starts = [first, *((layer.version, layer.fingerprint) for layer in layers)]
        return Undo(self._folder, self._next(), starts, layers, kept)

    def _next(self) -> int:
        newest = next(self._newest_first(), None)
        return int(newest[0].name[:9]) + 1 if newest else 0

    def trim(self) -> None:
        """Delete the oldest patches beyond the limits."""
        nbytes = 0
        for number, (path, _) in enumerate(self._newest_first()):
            nbytes += path.stat().st_size
            if number >= MOST or nbytes > self._limit:
                discard(path)

    def sweep(self) -> None:
        """Delete what a killed process left half written."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if read_log_name(path.name) is None:
                discard(path)


class Undo:
    """The patches that lead back over one fold, while they are made. Nothing is left of them without `finish`."""

    def __init__(
        self, folder: Path, number: int, starts: Sequence[tuple[int, Fingerprint]], layers: Sequence[Layer], kept: int
    ):
        self._folder, self._number = folder, number
        self._starts, self._layers = starts, layers
        self._first = len(layers) - kept
        """The first layer that is recorded: only an unbroken route back is of use."""
        with ExitStack() as opening:
            self._writers = [opening.enter_context(PatchWriter("plain", folder)) for _ in layers[self._first :]]
            self._close = opening.pop_all().close

    def apply(self, name: str, bits: Bits) -> Bits:
        """One tensor with all layers applied; record what they overwrite. Call it in the table's order."""
        for number, layer in enumerate(self._layers):
            row = layer.rows.get(name)
            if row is None:
                continue
            coded = layer.reader.coded(row)
            # The indices are not checked: the digest of the result shows whether the bits are right.
            patch = plain.decode_tensor(coded, None if "indices" in coded.streams else bits)
            old = bits[patch.indices]
            patch.scatter(bits)
            if number >= self._first:
                before = self._starts[number][1][name]
                back = TensorPatch(patch.spec, patch.indices, old, patch.new, before)
                self._writers[number - self._first].add(plain.encode_tensor(back, bits))
        return bits

    def finish(self) -> None:
        """Write the patches, durably."""
        for offset, writer in enumerate(self._writers):
            number = self._first + offset
            (older, before), (newer, after) = self._starts[number : number + 2]
            with replacing(self._folder / log_name(self._number + offset, newer, older)) as file:
                writer.finish(file, after.digest, before.digest, ModelSize.of(before.table))

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
