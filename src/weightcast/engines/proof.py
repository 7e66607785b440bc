"""Live proof: are the parameters that an engine computes with, fused and sharded as they are, a version's bits?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.chain import Chain
from weightcast.engines.client import Engine
from weightcast.engines.meeting import carry_out, fingerprint_of, meet, teach
from weightcast.errors import MissingError
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
    if not met.learned:
        teach(engine, chain.channel)
        met = meet(engine, table)
    _, told = carry_out(engine, table, {"do": "verify"})
    live, remembered = told.sums, told.remembered
    absent = {name for name, total in live.items() if total.held_by_none} - met.unknown.keys()
    unproven = {
        name: met.unknown.get(name) or total.problem or "it cannot be read"
        for name, total in live.items()
        if total.digest is None and name not in remembered and name not in absent
    }
    wrong = {
        name: live[name].problem or "its bits are not the version's"
        for name, before in remembered.items()
        if before.digest is not None and live[name].digest != before.digest
    }
    found = fingerprint_of(table, live)
    if found is not None:
        version = _version_of(found.position, chain)
    else:
        # Tensors that the engine has no use for: the others were proven when they were written, and are as they were.
        as_written = met.position is not None and not wrong and not unproven
        version = met.position.version if met.position is not None and as_written else None
    return Proof(met.position, version, wrong, unproven, len(table))


def _version_of(digest: str, chain: Chain) -> int | None:
    """The version with these bits; names have only the first digits of a digest, its commit has all."""
    head = chain.head()
    version = chain.find(digest, head) if head else None
    if version is None:
        return None
    try:
        return version if chain.manifest(version).position.digest == digest else None
    except MissingError:
        return version
