"""The one event: a phase of a version has ended, on one side or the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

PHASES = (
    "step",
    "detect",
    "resolve",
    "encode",
    "upload",
    "commit",
    "find",
    "fetch",
    "decode",
    "verify",
    "stage",
    "learn",
    "recognise",
    "compare",
    "fold",
    "pause",
    "apply",
    "prove",
    "resume",
    "load",
)
"""All phases: those of a trainer, of a follower, and of an engine with its agent."""

ROLES = ("trainer", "replica", "mirror", "agent", "engine")
"""Who did it: what publishes, a follower, the mirror beside an engine, the engine's agent, the engine itself."""

FORMAT = 1
"""The number of the fields of `Event.as_json`."""


@dataclass(frozen=True)
class Event:
    """A phase of a version has ended. ``channel`` and ``digest`` are the same on all sides, and link its events.

    A trainer's come when the version is committed, since nobody knows its number before; a follower's come when the
    route to it is staged, and when it is applied. What failed has no event. Phases that alternate, as decoding and
    verifying do tensor by tensor, are added up: they lasted ``seconds`` in all from ``began`` on.
    """

    phase: str
    """What was done: step, detect, resolve, encode, upload, commit; find, fetch, decode, verify, stage, apply; …"""
    role: str
    """Who did it: trainer, replica, mirror, agent or engine."""
    name: str | None
    """The writer's or the replica's."""
    channel: str
    """The channel's id."""
    version: int
    digest: str
    """The version's position digest."""
    began: float
    """Seconds since 1970, by the clock of the host that timed it."""
    seconds: float
    nbytes: int = 0
    """Bytes encoded, uploaded or fetched, or staged by an engine's workers; 0 for other phases."""
    step: int | None = None
    """The training step, if the one who tells of it knows that."""

    def as_json(self) -> dict[str, Any]:
        """The fields of a line of JSON. Fields may be added; ``format`` changes if one changes its meaning."""
        return {
            "format": FORMAT,
            "phase": self.phase,
            "role": self.role,
            "name": self.name,
            "channel": self.channel,
            "version": self.version,
            "digest": self.digest,
            "step": self.step,
            "began": round(self.began, 6),
            "seconds": round(self.seconds, 6),
            "bytes": self.nbytes,
        }


class Sink(Protocol):
    """Where events go: any callable of one `Event`.

    It is called on the thread that did the phase, one event after the other, and by objects with several threads from
    several of them: it should return at once, and put what takes long into a queue. If it raises, the log says so
    once, and the work goes on.
    """

    def __call__(self, event: Event, /) -> None: ...
