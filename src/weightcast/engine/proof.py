"""Live proof: are the parameters that an engine computes with, fused and sharded as they are, a version's bits?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.engine.client import Engine
from weightcast.engine.meeting import carry_out, counted, joined_fingerprint, listed, meet, teach
from weightcast.errors import EngineError, MissingError


@dataclass(frozen=True)
class Proof:
    """What the live parameters of all workers are."""

    claimed: Position | None
    """Where the workers say they stand."""
    position: Position | None
    """The version that they are, as far as they have a place for its tensors."""
    wrong: Mapping[str, str]
    """Checkpoint tensors that are not what they were proven to be before, and how that shows."""
    unproven: Mapping[str, str]
    """Those that cannot be read back, and why."""
    tensors: int
    absent: tuple[str, ...] = ()
    """Checkpoint tensors that have no place in the engine: whatever they are, nothing was compared."""
    uncovered: Mapping[str, int] = field(default_factory=dict)
    """Parameters that no tensor covers, and how many elements of each: whatever they are, nobody can tell."""

    @property
    def version(self) -> int | None:
        return self.position.version if self.position else None

    @property
    def holds(self) -> bool:
        """Whether the engine is at a version, and at none other than it says. The number alone says too little."""
        return self.position is not None and self.claimed in (None, self.position)

    def as_json(self) -> dict[str, Any]:
        return {
            "wrong": dict(self.wrong),
            "unproven": dict(self.unproven),
            "absent": list(self.absent),
            "uncovered": dict(self.uncovered),
        }

    @property
    def verdict(self) -> str:
        """One line, which says no more than was compared."""
        if self.wrong:
            return f"{counted(self.wrong, 'tensor')} of the live engine are not what they should be"
        if self.position is None and self.absent and not self.unproven:
            return f"no version can be recognised by its digest: {self._not_compared}"
        if self.position is None:
            return "no version of this channel has these bits"
        if self.claimed not in (None, self.position):
            return f"these are the bits of version {self.version}, but the engine says that it is at {self.claimed}"
        if not self._not_compared:
            return f"version {self.version} to the last bit, live on all workers"
        placed = f"all {self.tensors - len(self.absent):,} tensors of the channel that have a place in the engine"
        return f"version {self.version}: {placed}, live on all workers; {self._not_compared}"

    @property
    def _not_compared(self) -> str:
        told = []
        if self.absent:
            verb = "has" if len(self.absent) == 1 else "have"
            told.append(f"{counted(self.absent, 'tensor')} {verb} no place: {listed(self.absent)}")
        if self.uncovered:
            verb = "is" if len(self.uncovered) == 1 else "are"
            told.append(f"{counted(self.uncovered, 'parameter')} {verb} covered by no tensor: {listed(self.uncovered)}")
        return "; ".join(told)


def prove(engine: Engine, chain: Chain) -> Proof:
    """Digest the live parameters on every worker, and compare with the manifest; nothing is written."""
    table = chain.channel.table
    met = meet(engine, table)
    if not met.learned and met.taught:
        hint = "Name the channel that its agent follows."
        raise EngineError("the engine follows a channel of other tensors", url=engine.url, hint=hint)
    if not met.learned:
        teach(engine, chain.channel)
        met = meet(engine, table)
    _, told = carry_out(engine, table, {"do": "verify"})
    live = told.sums
    remembered = {name: total.digest for name, total in told.remembered.items() if total.digest is not None}
    wrong = {
        name: live[name].problem or "its bits are not the version's"
        for name, before in remembered.items()
        if live[name].digest != before
    }
    found = joined_fingerprint(table, live)
    version = version_of(found.digest, chain) if found is not None else None
    position = Position(version, found.digest) if found is not None and version is not None else None
    unproven: dict[str, str] = {}
    if position is None:
        unproven = {
            name: met.unknown.get(name) or total.problem or "where it lives was not proven"
            for name, total in live.items()
            if name not in remembered and name not in met.absent
        }
    if found is None and not wrong and not unproven and met.position is not None:
        # There are tensors that have no place in the engine; all others are as they were when they were proven.
        position = met.position if _is_committed(met.position, chain) else None
    return Proof(met.position, position, wrong, unproven, len(table), tuple(sorted(met.absent)), met.uncovered)


def _is_committed(position: Position, chain: Chain) -> bool:
    try:
        return chain.manifest(position.version).position == position
    except MissingError:
        return False


def version_of(digest: str, chain: Chain) -> int | None:
    """The version with these bits; names have only the first digits of a digest, its commit has all."""
    head = chain.head()
    version = chain.find(digest, head) if head else None
    if version is None:
        return None
    try:
        return version if chain.manifest(version).position.digest == digest else None
    except MissingError:
        return version
