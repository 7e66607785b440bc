"""What a folder holds, and what it says it holds: looked at without changing it, also while a follower keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.channel.records import Channel
from weightcast.disk.checkpoint import CHANGING, MIRROR, Checkpoint
from weightcast.disk.durable import locked
from weightcast.disk.staged import Overlay, led_by
from weightcast.errors import UsageError, WeightcastError
from weightcast.follow.holder import Layers
from weightcast.follow.mirror import POSITION
from weightcast.follow.redo import read_folded, read_log_name
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint
from weightcast.format.patchfile import PatchReader
from weightcast.format.tensors import Weights


@dataclass(frozen=True)
class Claim:
    """What a mirror says of itself."""

    version: int
    fingerprint: Fingerprint

    @property
    def position(self) -> Position:
        return Position(self.version, self.fingerprint.digest)


@dataclass(frozen=True)
class Held:
    """The weights of a folder, with the log of a mirror laid over its files."""

    weights: Weights
    claim: Claim | None
    """What all of it is: the files and the log."""
    files_at: Position | None = None
    """What the files of a mirror are by themselves: what any other tool gets."""
    log_at: Position | None = None
    """Where the log leads on to from there; None where there is no log."""


@contextmanager
def held(folder: Path, channel: Channel) -> Iterator[Held]:
    """Open a checkpoint folder or a mirror; nothing is folded into its files meanwhile."""
    with ExitStack() as opened:
        inner = folder / MIRROR
        if inner.is_dir():
            opened.enter_context(locked(inner / "lock", shared=True))
        files = opened.enter_context(Checkpoint(folder, aliases=dict(channel.table.aliases)))
        _refuse_other_model(folder, channel, files)
        claim = _folded(folder, channel)
        files_at = claim.position if claim else None
        layers: list[PatchReader] = []
        for path in logged(folder) if claim else []:
            reader = opened.enter_context(Layers([path])).readers[0]
            following = _led(claim, path, reader) if claim else None
            if following is None:
                break
            claim = following
            layers.append(reader)
        log_at = claim.position if claim and layers else None
        yield Held(Overlay(files, layers, fresh=True), claim, files_at, log_at)


@dataclass(frozen=True)
class Standing:
    """Where a mirror says its files and its log are, without a look at the channel or the weights."""

    url: str
    files_at: Position
    log_at: int | None
    """The version that the log leads to; None where there is no log."""
    is_changing: bool
    """Whether the files are being written, or were when a process was killed: then they must not be loaded."""


def standing_of_mirror(folder: Path) -> Standing | None:
    """None where ``folder`` is not a mirror, or has no version yet."""
    folded = read_folded(folder / MIRROR / POSITION)
    if folded is None:
        return None
    at = folded.position.version
    for path in logged(folder):
        step = read_log_name(path.name)
        if step is None or step[0] != at:
            break
        at = step[1]
    log_at = at if at != folded.position.version else None
    return Standing(folded.url, folded.position, log_at, (folder / MIRROR / CHANGING).exists())


def logged(folder: Path) -> list[Path]:
    """The patches of a mirror's log, in order."""
    return sorted((folder / MIRROR / "log").glob("*.safetensors"))


def _refuse_other_model(folder: Path, channel: Channel, files: Checkpoint) -> None:
    try:
        refuse_other_table(channel.table, files.table)
    except UsageError as error:
        hint = "It holds another model than the channel."
        raise UsageError(error.problem, file=str(folder), tensor=error.tensor, hint=hint) from None


def _folded(folder: Path, channel: Channel) -> Claim | None:
    """What the files of a mirror of this channel are; None for any other folder."""
    folded = read_folded(folder / MIRROR / POSITION)
    if folded is None or folded.channel != channel.id or len(folded.digests) != len(channel.table):
        return None
    return Claim(folded.position.version, Fingerprint(channel.table, folded.digests))


def _led(claim: Claim, path: Path, reader: PatchReader) -> Claim | None:
    """Where a patch of the log leads from there; None if it does not begin there."""
    step = read_log_name(path.name)
    if step is None or step[0] != claim.version:
        return None
    try:
        fingerprint = led_by(claim.fingerprint, reader)
    except WeightcastError:
        return None
    good = (reader.header.base, reader.header.result) == (claim.fingerprint.digest, fingerprint.digest)
    return Claim(step[1], fingerprint) if good else None
