"""An engine's state: what its workers report, taken together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from weightcast.channel.keys import Position
from weightcast.engine.client import Engine
from weightcast.engine.fit import combine_fits
from weightcast.engine.messages import EngineReport, Fit, ReadFit
from weightcast.errors import EngineError
from weightcast.format.digest import table_json
from weightcast.format.spec import TensorTable


@dataclass(frozen=True)
class EngineState:
    instances: tuple[str, ...]
    """Of the workers' processes: other ones after a restart."""
    position: Position | None
    """Of all workers; None if one does not know, or they differ."""
    changing: bool
    """Whether an update broke off: the parameters are a mix of versions and must not be served."""
    updates: int
    """Since the engine started; before the first, it holds what it loaded."""
    table: str | None
    """The digest of a table that a worker has learned, if any has."""
    learned: bool
    """Whether all workers know the layout of this channel's tensors."""
    fit_revisions: tuple[int, ...]
    fit: Fit
    """Empty unless ``learned``."""


def read_state(engine: Engine, table: TensorTable) -> EngineState:
    """Ask the workers for their state."""
    return state_of(engine, engine.report(), table)


def state_of(
    engine: Engine, report: EngineReport, table: TensorTable, before: EngineState | None = None
) -> EngineState:
    """The state in a report; how the table fits is asked only if it changed since ``before``."""
    workers = report.workers
    world = workers[0].world if workers else 1
    if world > len(workers) or {one.rank for one in workers} != set(range(world)):
        raise EngineError("not all workers answer", url=engine.url)
    positions = {one.position for one in workers}
    instances = tuple(one.instance for one in workers)
    revisions = tuple(one.fit_revision for one in workers)
    ours = table_digest(table)
    learned = all(one.table == ours for one in workers)
    fit = Fit()
    if learned and before is not None and (before.instances, before.fit_revisions) == (instances, revisions):
        fit = before.fit
    elif learned:
        fit = combine_fits(engine.ask(ReadFit()))
    return EngineState(
        instances=instances,
        position=workers[0].position if len(positions) == 1 else None,
        changing=any(one.changing for one in workers) or len(positions) > 1,
        updates=max(one.updates for one in workers),
        table=next((one.table for one in workers if one.table), None),
        learned=learned,
        fit_revisions=revisions,
        fit=fit,
    )


def table_digest(table: TensorTable) -> str:
    """Identifies a table between agent and worker."""
    return hashlib.sha256(table_json(table).encode()).hexdigest()
