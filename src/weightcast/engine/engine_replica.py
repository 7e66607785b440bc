"""An engine whose workers decode for themselves, as a replica of a channel: the objects are fetched, and stay coded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route, route_bytes
from weightcast.disk.durable import Enter, discard, require_space, silent, untimed
from weightcast.disk.staged import fingerprint_after
from weightcast.errors import BaseError, FormatError, ResultError, WeightcastError
from weightcast.follow.fetch import BAD_OBJECT, Arrived, BadEdgeError, arrivals, name_of
from weightcast.follow.replica import Staged, position_of
from weightcast.format.digest import Fingerprint
from weightcast.format.joined import joined, open_objects
from weightcast.format.patch import start_of_patch
from weightcast.format.safetensors import ReopenedSource


class NeedsMirrorError(WeightcastError):
    """The route has an anchor, of which there is nothing to decode."""


@dataclass(frozen=True)
class StagedCoded(Staged):
    """A route whose objects are here, coded; their SHA-256 and what they say they lead to were verified."""

    versions: tuple[tuple[str, ...], ...] = ()
    """The files of each edge's objects, in the order of the route."""


class EngineReplica:
    """Where the engine is, as far as that is known, and a folder for objects.

    The agent says where the engine is: `hold`. Without that, nothing is staged.
    """

    beside = None
    weights = None
    base = None

    def __init__(self, folder: Path, *, takes_anchors: bool = True):
        self.workshop = folder
        self.takes_anchors = takes_anchors
        self.version: int | None = None
        self.fingerprint: Fingerprint | None = None

    @property
    def objects(self) -> Path:
        """Where the objects of the last route are: a mirror of this host need not fetch them again."""
        return self.workshop / "objects"

    def hold(self, position: Position | None, fingerprint: Fingerprint | None) -> None:
        self.version = None if position is None else position.version
        self.fingerprint = fingerprint if position is not None else None

    def locate(self, version: int | None) -> None:
        self.version = version

    def examine(self) -> bool:
        """The workers' own digests show whether the engine is where it should be."""
        return self.fingerprint is not None

    def examine_if_changed(self) -> None:
        """Do nothing: the workers are asked in each round."""

    def stage(self, chain: Chain, route: Route, goal: Manifest, enter: Enter = untimed) -> StagedCoded:
        if self.fingerprint is None or any(edge.base is None for edge in route):
            raise NeedsMirrorError("the engine's weights are no base of this route")
        start, fingerprint = position_of(self), self.fingerprint
        self.objects.mkdir(parents=True, exist_ok=True)
        wanted = {name_of(edge) for edge in route}
        for path in self.objects.iterdir():
            if path.name.removesuffix(".partial") not in wanted:
                discard(path)
        require_space(self.workshop, route_bytes(route))
        versions: list[tuple[str, ...]] = []
        with closing(arrivals(chain, self.objects, route, goal, silent)) as arriving:
            for arrived in arriving:
                enter("verify")
                try:
                    paths, fingerprint = _leads_to(arrived, fingerprint)
                except BAD_OBJECT as error:
                    raise BadEdgeError(arrived.edge, error) from error
                versions.append(paths)
                enter("fetch")
        return StagedCoded(start, goal.position, fingerprint, (), nbytes=route_bytes(route), versions=tuple(versions))

    def apply(self, staged: Staged) -> None:
        """The engine has reached it."""
        self.hold(staged.position, staged.fingerprint)

    def stage_back(self, goal: Position) -> Staged | None:
        return None

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        return True

    def begin_fold(self) -> None:
        """Do nothing: there are no files."""

    def take_up_fold(self) -> None:
        """Do nothing: none is ever begun."""

    def close(self) -> None:
        self.hold(None, None)
        discard(self.workshop)


def _leads_to(arrived: Arrived, start: Fingerprint) -> tuple[tuple[str, ...], Fingerprint]:
    """The files of an edge's objects, and the fingerprint after it: their tables name each tensor's digest."""
    files = sorted(arrived.path.iterdir()) if arrived.path.is_dir() else [arrived.path]
    reader = joined(open_objects(map(ReopenedSource, files)))
    stated = reader.header.result
    if arrived.base is not None and arrived.base != start.digest:
        problem = f"the manifest of version {arrived.edge.result} begins at {arrived.base[:12]}"
        raise BaseError(problem, expected=arrived.base, found=start.digest)
    start_of_patch(start, reader.header.base, {row.spec.name for row in reader.rows})
    after = fingerprint_after(start, reader)
    if arrived.position is not None and arrived.position.digest != stated:
        raise FormatError("the patch does not lead to the position in its manifest", file=arrived.edge.key)
    if after.digest != stated or not after.digest.startswith(arrived.edge.digest):
        problem = f"the weights of version {arrived.edge.result} have the digest {after.digest[:12]}"
        raise ResultError(problem, expected=stated, found=after.digest)
    return tuple(str(path.absolute()) for path in files), after
