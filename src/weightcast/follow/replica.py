"""A replica: weights that are kept at a channel's versions. Arrays in memory are one, a mirror on disk another."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from weightcast.channel.keys import Position
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import scratch
from weightcast.disk.staged import scatter_into
from weightcast.errors import UsageError, WeightcastError
from weightcast.format.digest import Fingerprint, fingerprint
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.tensors import Target, Weights, refuse_other_bits
from weightcast.format.workers import ONE, Workers


@dataclass(frozen=True)
class StagedPatch:
    """A verified patch as a `plain` file, and the position it leads to."""

    position: Position
    path: Path


@dataclass(frozen=True)
class Staged:
    """All that must be written to bring a replica to ``position``: perhaps a whole checkpoint, then some patches."""

    start: Position | None
    """The replica's position when this was staged; it leads on from there only."""
    position: Position
    fingerprint: Fingerprint
    anchor: Position | None
    anchor_digests: tuple[int, ...] | None
    folder: Path | None
    """With the anchor's files, each of them durable."""
    patches: tuple[StagedPatch, ...]
    nbytes: int
    """Bytes fetched for it."""
    short_of: Position | None = None
    """The version that was wanted, if no intact route leads there and this is the newest before it."""
    reason: WeightcastError | None = None
    """Why ``short_of`` cannot be reached."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Spent on it, by phase; see `Update`."""

    @property
    def is_there(self) -> bool:
        """Whether the files still are: the next update that is staged replaces them."""
        folder = () if self.folder is None else (self.folder,)
        return all(path.exists() for path in (*folder, *(patch.path for patch in self.patches)))


class Replica(Protocol):
    """Weights at some position, and a folder on disk to prepare the next update in."""

    @property
    def workshop(self) -> Path: ...

    @property
    def version(self) -> int | None:
        """The version that is held, if it is known."""
        ...

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What is held, as remembered; None if nothing is, or after a failure, until `examine`."""
        ...

    @property
    def weights(self) -> Weights | None: ...

    def locate(self, version: int | None) -> None:
        """Set the version that this is; None if no version of the channel has these bits."""
        ...

    def examine(self) -> bool:
        """Read all bits again; False if they are not what was remembered (then `fingerprint` is what they are)."""
        ...

    def examine_if_changed(self) -> None:
        """`examine` if there are cheap signs that another program changed what is held."""
        ...

    def apply(self, staged: Staged) -> None:
        """Hold what was staged. Doing it again after an interruption completes it."""
        ...

    def stage_back(self, goal: Position) -> Staged | None:
        """Stage the route back to an older version without any download; None if that cannot be done."""
        ...

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        """Bring the files that others read up to what is held; False if readers prevent it and ``wait`` is not set.

        `BusyError` if they take longer than ``patience`` seconds.
        """
        ...

    def close(self) -> None: ...


def position_of(replica: Replica) -> Position | None:
    """The position of a replica, if its version is known."""
    version, fingerprint = replica.version, replica.fingerprint
    return Position(version, fingerprint.digest) if version is not None and fingerprint else None


class MemoryReplica:
    """A target in memory. Staged patches are in a temporary folder; `apply` only writes them into the target."""

    def __init__(self, target: Target, workers: Workers = ONE):
        if not isinstance(target, Target):
            hint = "Pass wc.Arrays, or the path of a folder for a mirror on disk."
            raise UsageError(f"a {type(target).__name__} cannot take patches", hint=hint)
        for spec in target.table:
            refuse_other_bits(spec, target.read(spec.name))
        self._target = target
        self._workers = workers
        self.version: int | None = None
        self.fingerprint: Fingerprint | None = fingerprint(target, workers)
        self._folder = ExitStack()
        self.workshop = self._folder.enter_context(scratch())

    @property
    def weights(self) -> Weights | None:
        return self._target

    def locate(self, version: int | None) -> None:
        self.version = version

    def examine(self) -> bool:
        remembered, self.fingerprint = self.fingerprint, fingerprint(self._target, self._workers)
        if remembered == self.fingerprint:
            return True
        self.version = None
        return False

    def examine_if_changed(self) -> None:
        """Do nothing: memory gives no cheap sign of having been written."""

    def apply(self, staged: Staged) -> None:
        with Layers([patch.path for patch in staged.patches]) as layers, ExitStack() as opened:
            # Until the last bit is written the weights are a mixture.
            self.version = self.fingerprint = None
            if staged.folder is not None:
                anchor = opened.enter_context(Checkpoint(staged.folder))
                for spec in anchor.table:
                    self._target.write(spec.name, anchor.read(spec.name))
            for layer in layers.readers:
                scatter_into(self._target, layer)
        self.fingerprint, self.version = staged.fingerprint, staged.position.version
        for patch in staged.patches:
            patch.path.unlink()
        if staged.folder is not None:
            shutil.rmtree(staged.folder)

    def stage_back(self, goal: Position) -> Staged | None:
        return None

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        return True

    def close(self) -> None:
        self._folder.close()


class Layers:
    """Staged patches, opened."""

    def __init__(self, paths: Sequence[Path]):
        with ExitStack() as opening:
            sources = [opening.enter_context(FileSource(path)) for path in paths]
            self.readers = [PatchReader(source) for source in sources]
            self._close = opening.pop_all().close

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._close()
