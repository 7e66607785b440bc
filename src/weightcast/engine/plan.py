"""How to bring an engine to a version, decided from what it reports and what the mirror holds. No I/O.

- If the engine is where the mirror's newest patches begin, the workers write what these change.
- Else the workers compare what they hold with the mirror, where their layout is trusted.

Tensors that neither can reach go through the engine's own loader in the same pause.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from weightcast.channel.keys import Position
from weightcast.engine.state import EngineState
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorTable


@dataclass(frozen=True)
class Plan:
    """What is done beside the writing of staged patches, where there are any."""

    reload: tuple[str, ...]
    """Tensors for the engine's own loader, by whole layers."""
    unreachable: frozenset[str]
    """Those of them that nothing but a reload can change."""
    compare: tuple[str, ...] = ()
    """Tensors that the workers compare with the mirror."""


def plan_patch(state: EngineState, start: Position | None, before: Fingerprint, after: Fingerprint) -> Plan | None:
    """For patches from ``start`` that lead from one fingerprint to another; None if the engine is not at ``start``."""
    if state.position is None or state.changing or state.position != start:
        return None
    unreachable = _unreachable(state, before.differing(after))
    return Plan(_whole_layers(after.table, unreachable), unreachable)


def plan_update(state: EngineState, table: TensorTable, target: Position) -> Plan | None:
    """For an engine without staged patches to ``target``; None if it is there already."""
    if state.position == target and not state.changing:
        return None
    unreachable = _unreachable(state, {spec.name for spec in table})
    reload = _whole_layers(table, unreachable)
    return Plan(reload, unreachable, tuple(sorted(state.fit.trusted - set(reload))))


def _unreachable(state: EngineState, names: Collection[str]) -> frozenset[str]:
    return frozenset(names) - state.fit.trusted - state.fit.absent


def _whole_layers(table: TensorTable, names: Collection[str]) -> tuple[str, ...]:
    """All tensors of the layers that ``names`` are in: a loader that gets half a layer leaves the rest undefined."""
    layers = {_layer_of(name) for name in names}
    return tuple(spec.name for spec in table if _layer_of(spec.name) in layers)


def _layer_of(name: str) -> str:
    """The layer that a tensor is in, by the first number of its name."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return found.group() if found else ""
