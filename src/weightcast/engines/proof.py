"""Live proof: are the parameters that an engine computes with, fused and sharded as they are, a version's bits?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.chain import Chain
from weightcast.engines.client import Engine
from weightcast.engines.meeting import carry_out, fingerprint_of, meet, teach
from weightcast.errors import EngineError, MissingError
from weightcast.keys import Position


@dataclass(frozen=True)
class Proof:
    """What the live parameters of all workers are."""

    claimed: Position | None
    """Where the workers say they stand."""
    version: int | None
    """The version that they are, to the last bit."""
    wrong: Mapping[str, str]
    """Checkpoint tensors that are not what they were proven to be before, and how that shows."""
    unproven: Mapping[str, str]
    """Those that cannot be read back, and why."""
    tensors: int

    @property
    def holds(self) -> bool:
        return self.version is not None and (self.claimed is None or self.claimed.version == self.version)


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
    found = fingerprint_of(table, live)
    version = version_of(found.position, chain) if found is not None else None
    unproven: dict[str, str] = {}
    if version is None:
        unproven = {
            name: met.unknown.get(name) or total.problem or "where it lives was not proven"
            for name, total in live.items()
            if name not in remembered and name not in met.absent
        }
    if found is None and not wrong and not unproven and met.position is not None:
        # There are tensors that the engine has no use for; all others are as they were when they were proven.
        version = met.position.version if _is_committed(met.position, chain) else None
    return Proof(met.position, version, wrong, unproven, len(table))


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
