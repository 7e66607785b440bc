"""Live proof: whether the parameters that an engine computes with, fused and sharded, are exactly a version's bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.engine.box_digests import fingerprint_of
from weightcast.engine.client import Engine
from weightcast.engine.fit import counted, listed, teach
from weightcast.engine.jobs import combine_digests
from weightcast.engine.messages import Digest, Digests
from weightcast.engine.state import EngineState, read_state, state_of
from weightcast.errors import EngineError, MissingError
from weightcast.format.digest import Fingerprint

_LOOKS = 3
"""At most: an engine that is updated more often cannot be read in between."""


@dataclass(frozen=True)
class Proof:
    """Which version's bits the live parameters of all workers are."""

    claimed: Position | None
    """The version that the workers report."""
    position: Position | None
    """The version whose bits they are, in all tensors that have a place in the engine."""
    wrong: Mapping[str, str]
    """Tensors that changed since they were last verified, and how that shows."""
    unproven: Mapping[str, str]
    """Tensors that cannot be read back, and why."""
    tensors: int
    absent: tuple[str, ...] = ()
    """Tensors that have no place in the engine: nothing of them was compared."""
    uncovered: Mapping[str, int] = field(default_factory=dict)
    """Parameters that no tensor covers, with the number of elements left out: nothing of them was compared."""
    holds_but_for: Position | None = None
    """The version whose bits they are but for ``unproven``, as far as that can be known."""

    @property
    def version(self) -> int | None:
        return self.position.version if self.position else None

    @property
    def holds(self) -> bool:
        """Whether the engine is at a version, and reports no other. Positions are compared: a number may be reused."""
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
        """One line that claims no more than was compared."""
        if self.wrong:
            return f"{counted(self.wrong, 'tensor')} of the live engine are not what they should be"
        if self.holds_but_for is not None:
            unproven = f"{counted(self.unproven, 'tensor')} that cannot be read back: {listed(self.unproven)}"
            return f"version {self.holds_but_for.version}, but for {unproven}"
        if self.position is None and self.absent and not self.unproven:
            return f"no version can be recognised by its digest: {self._not_compared}"
        if self.position is None:
            return "no version of this channel has these bits"
        if self.claimed not in (None, self.position):
            return f"these are the bits of version {self.version}, but the engine reports {self.claimed}"
        if not self._not_compared:
            return f"version {self.version} to the last bit, live on all workers"
        placed = f"all {self.tensors - len(self.absent):,} tensors of the channel that have a place in the engine"
        return f"version {self.version}: {placed}, live on all workers; {self._not_compared}"

    @property
    def _not_compared(self) -> str:
        parts = []
        if self.absent:
            verb = "has" if len(self.absent) == 1 else "have"
            parts.append(f"{counted(self.absent, 'tensor')} {verb} no place: {listed(self.absent)}")
        if self.uncovered:
            verb = "is" if len(self.uncovered) == 1 else "are"
            parts.append(
                f"{counted(self.uncovered, 'parameter')} {verb} covered by no tensor: {listed(self.uncovered)}"
            )
        return "; ".join(parts)


def prove(engine: Engine, chain: Chain) -> Proof:
    """Digest the live parameters on every worker, and compare with the manifests; nothing is written.

    If they are written meanwhile, what was read is of no version: they are read again. `EngineError` if that goes on.
    """
    table = chain.channel.table
    state = read_state(engine, table)
    if not state.learned and state.table:
        hint = "Name the channel that its agent follows."
        raise EngineError("the engine follows a channel of other tensors", url=engine.url, hint=hint)
    if not state.learned:
        teach(engine, chain.channel, allow_absent=True, allow_uncovered=False)
        state = read_state(engine, table)
    for _ in range(_LOOKS):
        results = engine.run(Digest(remember=False))
        before, state = state, state_of(engine, engine.report(), table, state)
        if _written(before) == _written(state):
            return _proof(engine, chain, state, results)
    hint = "Verify it again, or have its agent hold it with --version."
    raise EngineError("the engine was updated while it was read", url=engine.url, hint=hint)


def _written(state: EngineState) -> tuple[object, ...]:
    """What is another one after something was written."""
    return state.instances, state.updates, state.position, state.changing


def _proof(engine: Engine, chain: Chain, state: EngineState, results: Sequence[Digests]) -> Proof:
    table = chain.channel.table
    live = combine_digests(engine.url, table, [one.live for one in results], (spec.name for spec in table))
    expected = combine_digests(engine.url, table, [one.remembered for one in results])
    remembered = {name: one.digest for name, one in expected.items() if one.digest is not None}
    wrong = {
        name: live[name].problem or "its bits are not the version's"
        for name, before in remembered.items()
        if live[name].digest != before
    }
    found = fingerprint_of(table, live)
    position = position_of(found, chain) if found is not None else None
    unproven: dict[str, str] = {}
    if position is None:
        unproven = {
            name: state.fit.unknown.get(name) or one.problem or "its layout was not verified"
            for name, one in live.items()
            if name not in remembered and name not in state.fit.absent
        }
    if found is None and not wrong and not unproven and state.position is not None:
        # Some tensors have no place in the engine; all others are as they were when they were verified.
        position = state.position if _is_committed(state.position, chain) else None
    but_for = None
    if position is None and not wrong and unproven and state.position is not None and not state.changing:
        # All that can be read back is what it was when it was verified at this version.
        but_for = state.position if _is_committed(state.position, chain) else None
    absent = tuple(sorted(state.fit.absent))
    return Proof(state.position, position, wrong, unproven, len(table), absent, state.fit.uncovered, but_for)


def _is_committed(position: Position, chain: Chain) -> bool:
    try:
        return chain.manifest(position.version).position == position
    except MissingError:
        return False


def position_of(fingerprint: Fingerprint, chain: Chain) -> Position | None:
    """The newest version of the channel with these bits."""
    head = chain.head()
    version = chain.find(fingerprint.digest, head) if head else None
    return None if version is None else Position(version, fingerprint.digest)
