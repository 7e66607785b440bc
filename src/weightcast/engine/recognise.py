"""Which version an engine holds that does not say so, and which layouts are right: found by live digests."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.engine.box_digests import fingerprint_of
from weightcast.engine.client import Engine
from weightcast.engine.jobs import compare_files, live_digests
from weightcast.engine.messages import Distrust, SetPosition, Trust
from weightcast.engine.proof import position_of
from weightcast.engine.state import EngineState
from weightcast.errors import StoreError
from weightcast.events.phases import Phases
from weightcast.format.digest import Fingerprint


def recognise(
    engine: Engine, state: EngineState, chain: Chain, phases: Phases, mirror: tuple[Position, Fingerprint] | None
) -> tuple[EngineState, Fingerprint | None]:
    """The state with the version found, if one was, and the fingerprint of what is live, if all of it can be read.

    ``mirror`` is what a mirror holds, with which an engine at no version of the channel can be compared.
    """
    table, fit = chain.channel.table, state.fit
    with phases.phase("recognise"):
        digests = live_digests(engine, table)
    same: set[str] = set()
    position = None
    if mirror is not None:
        same = {name for name, one in digests.items() if one.digest == mirror[1][name]}
        position = mirror[0] if len(same | fit.absent) == len(table) else None
    found = fingerprint_of(table, digests)
    if position is None and found is not None:
        # During an outage it is compared with the mirror instead.
        with suppress(StoreError) if mirror is not None else nullcontext():
            position = position_of(found, chain)
    trusted = digests.keys() - fit.absent if position else same | fit.trusted
    if position is None and not state.updates and mirror is not None:
        with phases.phase("compare"):
            loaded, other = compare_files(engine)
        packed = other - fit.trusted  # a trusted one differs because it was changed since
        engine.ask(Distrust(packed, "the engine changes it after loading"))
        trusted = (trusted | loaded) - packed
    fit = replace(fit, trusted=frozenset(trusted))
    engine.ask(Trust(fit.trusted))
    if position is not None:
        engine.ask(SetPosition(position))
    return replace(state, position=position, fit=fit), found
