"""What a folder holds, and what it says it holds: looked at without changing it, also while a follower keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightcast.bits import Weights
from weightcast.checkpoint import MIRROR, Checkpoint
from weightcast.detect import refuse_other_table
from weightcast.digest import Fingerprint
from weightcast.errors import UsageError, WeightcastError
from weightcast.files import locked
from weightcast.folded import read_folded
from weightcast.holder import Layers
from weightcast.manifest import Channel
from weightcast.mirror import POSITION
from weightcast.stage import Overlay, led_by
from weightcast.wire import PatchReader


@dataclass(frozen=True)
class Claim:
    """What a mirror says of itself."""

    version: int
    standing: Fingerprint


@dataclass(frozen=True)
class Held:
    """The weights of a folder, with the log of a mirror laid over its files."""

    weights: Weights
    claim: Claim | None


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
        layers: list[PatchReader] = []
        for path in sorted((inner / "log").glob("*.safetensors")) if claim else []:
            reader = opened.enter_context(Layers([path])).readers[0]
            following = _led(claim, path, reader) if claim else None
            if following is None:
                break
            claim = following
            layers.append(reader)
        yield Held(Overlay(files, layers, fresh=True), claim)


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
    base, _, result = path.stem.partition("-")
    if not (base.isdigit() and result.isdigit() and int(base) == claim.version):
        return None
    try:
        standing = led_by(claim.standing, reader)
    except WeightcastError:
        return None
    good = (reader.header.base, reader.header.result) == (claim.standing.position, standing.position)
    return Claim(int(result), standing) if good else None
