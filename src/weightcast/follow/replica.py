"""A replica: weights that are kept at a channel's versions. Arrays in memory are one, a mirror on disk another."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
class StagedAnchor:
    """A verified checkpoint in a folder, each of its files durable; ``digests`` are those of its tensors."""

    position: Position
    digests: tuple[int, ...]
    folder: Path


@dataclass(frozen=True)
class Staged:
    """All that must be written to bring a replica to ``position``: an anchor, if there is one, then the patches."""

    start: Position | None
    """The replica's position when this was staged; patches without an anchor lead on from there only."""
    position: Position
    fingerprint: Fingerprint
    patches: tuple[StagedPatch, ...]
    anchor: StagedAnchor | None = None
    nbytes: int = 0
    """Bytes fetched for it."""
    short_of: Position | None = None
    """The version that was wanted, if no intact route leads there and this is the newest before it."""
    reason: WeightcastError | None = None
    """Why ``short_of`` cannot be reached."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Spent on it, by phase; see `Update`."""

    @property
    def is_there(self) -> bool:
        """Whether the files still exist: the next update that is staged replaces them."""
        anchor = [self.anchor.folder] if self.anchor else []
        return all(path.exists() for path in (*anchor, *(patch.path for patch in self.patches)))


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
        """Of what is held, as remembered; None if nothing is, or after a failure, until `examine`."""
        ...

    @property
    def weights(self) -> Weights | None: ...

    @property
    def base(self) -> Weights | None:
        """The same to decode against: what is read from it changes with the next `apply`."""
        ...

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
        """Hold what was staged. Calling it again after an interruption completes it."""
        ...

    def stage_back(self, goal: Position) -> Staged | None:
        """Stage the route back to an older version without any download; None if that cannot be done."""
        ...

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        """Bring the files that others read up to what is held; False if readers prevent it and ``wait`` is not set.

        `BusyError` if they take longer than ``patience`` seconds.
        """
        ...

    def begin_fold(self) -> None:
        """The same in the background, if readers do not prevent it; updates go on meanwhile."""
        ...

    def take_up_fold(self) -> None:
        """Take up what a fold in the background has come to, if it has ended; raises what it failed with."""
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

    @property
    def base(self) -> Weights | None:
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
        with opened_patches(patch.path for patch in staged.patches) as patches:
            self.version = self.fingerprint = None  # until the last bit is written the weights are a mixture
            if staged.anchor is not None:
                with Checkpoint(staged.anchor.folder) as files:
                    for spec in files.table:
                        self._target.write(spec.name, files.read(spec.name))
            for patch in patches:
                scatter_into(self._target, patch)
        self.fingerprint, self.version = staged.fingerprint, staged.position.version
        for done in staged.patches:
            done.path.unlink()
        if staged.anchor is not None:
            shutil.rmtree(staged.anchor.folder)

    def stage_back(self, goal: Position) -> Staged | None:
        return None

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        return True

    def begin_fold(self) -> None:
        """Do nothing: there are no files."""

    def take_up_fold(self) -> None:
        """Do nothing: none is ever begun."""

    def close(self) -> None:
        self._folder.close()


@contextmanager
def opened_patches(paths: Iterable[Path]) -> Iterator[list[PatchReader]]:
    """Staged patches, open."""
    with ExitStack() as opened:
        yield [PatchReader(opened.enter_context(FileSource(path))) for path in paths]
