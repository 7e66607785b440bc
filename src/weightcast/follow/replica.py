"""A replica: weights that are kept at a channel's versions. Arrays in memory are one, a mirror on disk another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route
from weightcast.disk.durable import Enter, untimed
from weightcast.errors import WeightcastError
from weightcast.format.digest import Fingerprint
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.tensors import Weights


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


@runtime_checkable
class Replica(Protocol):
    """Weights at some position, and a folder on disk to prepare the next update in."""

    @property
    def workshop(self) -> Path: ...

    @property
    def beside(self) -> Path | None:
        """A folder with objects that another follower of this host has fetched, if there is one."""
        ...

    @property
    def takes_anchors(self) -> bool:
        """Whether a route may begin at an anchor, in place of what is held."""
        ...

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

    def stage(self, chain: Chain, route: Route, goal: Manifest, enter: Enter = untimed) -> Staged:
        """Fetch and verify the route to ``goal``; what is held is not changed. `BadEdgeError` names a bad edge.

        It begins in the phase ``fetch``; ``enter`` is called with each other one.
        """
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


@contextmanager
def opened_patches(paths: Iterable[Path]) -> Iterator[list[PatchReader]]:
    """Staged patches, open."""
    with ExitStack() as opened:
        yield [PatchReader(opened.enter_context(FileSource(path))) for path in paths]
