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
    if not met.learned:
        teach(engine, chain.channel)
        met = meet(engine, table)
    _, told = carry_out(engine, table, {"do": "verify"})
    live, remembered = told.sums, told.remembered
    unproven = {
        spec.name: met.unknown.get(spec.name) or live[spec.name].problem or ""
        for spec in table
        if live[spec.name].digest is None and spec.name not in remembered
    }
    wrong = {
        name: live[name].problem or "its bits are not the version's"
        for name, before in remembered.items()
        if before.digest is not None and live[name].digest != before.digest
    }
    found = fingerprint_of(table, live)
    version = None
    if found is not None:
        head = chain.head()
        version = chain.find(found.position, head) if head else None
    if met.position is not None and version is None and not wrong and not unproven:
        problem = f"the engine says that it is at version {met.position}, and is at none of this channel"
        raise EngineError(problem, url=engine.url, hint="It follows another channel, or a version that was collected.")
    if version is not None:
        _refuse_other_commit(chain, version, found.position if found else "", engine.url)
    return Proof(met.position, version, wrong, unproven, len(table))


def _refuse_other_commit(chain: Chain, version: int, digest: str, url: str) -> None:
    """Names have the first digits of a digest; the commit has all, where it was not collected."""
    try:
        committed = chain.manifest(version).position.digest
    except MissingError:
        return
    if committed != digest:
        raise EngineError(f"version {version} was committed with other bits than the engine has", url=url)
