"""What the workers have staged, once it is known that it leads to the version's bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weightcast.engine.client import Engine
from weightcast.engine.jobs import combine_digests
from weightcast.engine.messages import JobRequest, Staged
from weightcast.errors import EngineError
from weightcast.format.digest import Fingerprint


@dataclass(frozen=True)
class Ready:
    """An update that the workers can write: what a job staged, if any, and what is reloaded after it."""

    job: str | None
    reload: tuple[str, ...]
    changed: int = 0
    nbytes: int = 0
    reads_mirror: bool = True
    """Whether the workers read the mirror while they write."""


class StagedWrongError(EngineError):
    """What the workers prepared does not lead to the version's bits: nothing was written."""


def ready_of(
    engine: Engine,
    request: JobRequest[Staged],
    results: Sequence[Staged],
    fingerprint: Fingerprint,
    reload: tuple[str, ...],
    names: Collection[str] = (),
) -> Ready:
    """`StagedWrongError` unless the digests of ``names``, and of all that was staged, will be the version's."""
    digests = combine_digests(engine.url, fingerprint.table, [one.digests for one in results], names)
    for name, found in digests.items():
        if found.digest != fingerprint[name] and not found.rounded:
            problem = found.problem or "what is staged would not be the version's bits"
            hint = "Something else changed the engine's memory; the agent compares it with the mirror now."
            raise StagedWrongError(problem, url=engine.url, tensor=name, hint=hint)
    changed, nbytes = sum(one.changed for one in results), sum(one.nbytes for one in results)
    reads_mirror = bool(reload) or any(one.reads_mirror for one in results)
    return Ready(request.job, reload, changed, nbytes, reads_mirror)
