"""The requests of an agent to an engine's workers, and their answers. `protocol` writes and reads them as JSON.

Every number is a natural number below 2**64. Each request names the type of its answer; a request that starts a *job*
also names the type of the job's result.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

from weightcast.channel.keys import Position
from weightcast.channel.records import Channel
from weightcast.engine.box_digests import BoxDigest
from weightcast.errors import FormatError

Answered = TypeVar("Answered", covariant=True)
Produced = TypeVar("Produced", covariant=True)

Reason = Annotated[str, "for people"]
"""A sentence for people. `protocol` cuts a long one off, since it ends up in errors and logs."""

BoxDigests = Mapping[str, tuple[BoxDigest, ...]]
"""By the names of tensors."""


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """The request was carried out, or its job was started."""


@dataclass(frozen=True)
class Failed:
    """The request was not carried out."""

    problem: Reason


@dataclass(frozen=True)
class WorkerState:
    """What a worker knows about itself without computing anything."""

    instance: str
    """Of the worker's process: another one after a restart."""
    rank: int
    world: int
    position: Position | None = None
    """Of its live parameters; None if it does not know."""
    changing: bool = False
    """Whether an update began to write and did not finish: the parameters are a mix of versions."""
    failed: Reason | None = None
    """Why the last update failed, if it did."""
    paused_by_agent: bool = False
    updates: int = 0
    """How often something wrote to the parameters since the worker started."""
    table: str | None = None
    """SHA-256 of the table whose layout the worker has learned."""
    fit_revision: int = 0
    """How often what `ReadFit` answers has changed."""

    def __post_init__(self) -> None:
        if self.rank >= self.world:
            raise FormatError(f"worker_state: rank {self.rank} of {self.world} workers")


@dataclass(frozen=True)
class Fit:
    """How the tensors of a table fit the parameters of one worker, or of all workers together."""

    unknown: Mapping[str, Reason] = field(default_factory=dict)
    """Tensors that cannot be traced into the parameters, and why."""
    absent: frozenset[str] = frozenset()
    """Tensors that have no place in the parameters."""
    uncovered: Mapping[str, int] = field(default_factory=dict)
    """Parameters that no tensor covers, with the number of elements left out."""
    cannot_reload: Reason | None = None
    """Why the engine's own loader must not be used, if so."""
    trusted: frozenset[str] = frozenset()
    """Tensors whose layout was verified: patches may be written through it."""


@dataclass(frozen=True)
class SurveyResult:
    """How the tensors of a channel would fit, compared with the engine's own checkpoint."""

    fit: Fit
    broken: Reason | None
    """Why the engine's loader cannot take the channel's tensors, although it can take its own checkpoint's."""
    strange: Mapping[str, int]
    """Parameters that the engine's own checkpoint covers and the channel does not."""


@dataclass(frozen=True)
class Digests:
    """Digests of the boxes of tensors, from the live parameters."""

    live: BoxDigests
    remembered: BoxDigests = field(default_factory=dict)
    """What a worker expected of tensors whose layout it trusts; only for a `Digest` that is not remembered."""


@dataclass(frozen=True)
class Staged:
    """An update is ready to be written; ``digests`` are those of the touched tensors afterwards."""

    digests: BoxDigests
    changed: int
    nbytes: int
    reads_mirror: bool = False
    """Whether parts of it are read from the mirror when it is written."""


@dataclass(frozen=True)
class Comparison:
    """Tensors whose live bits are what the engine loaded when it started, and tensors whose bits are not."""

    same: frozenset[str]
    other: frozenset[str]


@dataclass(frozen=True)
class JobReport:
    """The state of a job. ``gone``: the worker has no such job, since another one replaced it."""

    state: Literal["running", "done", "failed", "gone"]
    result: Digests | Staged | Comparison | None = None
    problem: Reason | None = None

    def __post_init__(self) -> None:
        if (self.result is not None, self.problem is not None) != (self.state == "done", self.state == "failed"):
            raise FormatError(f"job_report: state {self.state} with a result or a problem of another state")


ANSWERS = (Done, Failed, WorkerState, Fit, SurveyResult, JobReport)


# -- requests ----------------------------------------------------------------------------------------------------------


class Request(Generic[Answered]):
    """A request to every worker."""

    answer: ClassVar[type] = Done


@dataclass(frozen=True)
class Hello(Request[WorkerState]):
    answer: ClassVar[type] = WorkerState


@dataclass(frozen=True)
class ReadFit(Request[Fit]):
    """How does the learned table fit?"""

    answer: ClassVar[type] = Fit


@dataclass(frozen=True)
class Survey(Request[SurveyResult]):
    """How would the tensors of a channel fit? What was learned before stays."""

    answer: ClassVar[type] = SurveyResult
    channel: Channel


@dataclass(frozen=True)
class Learn(Request[Done]):
    """Learn the layout of a channel's tensors; forget that of another table."""

    channel: Channel


@dataclass(frozen=True)
class Trust(Request[Done]):
    """Mark the layout of these tensors as verified: their live digests were a version's."""

    names: frozenset[str]


@dataclass(frozen=True)
class Distrust(Request[Done]):
    """Mark the layout of these tensors as wrong, whatever is read through it later."""

    names: frozenset[str]
    reason: Reason


@dataclass(frozen=True)
class SetPosition(Request[Done]):
    """The live parameters are this version; None: they are a mix of versions."""

    position: Position | None


@dataclass(frozen=True)
class SetPausedByAgent(Request[Done]):
    """Whether an agent has paused the engine: the next agent must know whose pause it is."""

    paused: bool


@dataclass(frozen=True)
class ReadJob(Request[JobReport]):
    answer: ClassVar[type] = JobReport
    job: str


@dataclass(frozen=True)
class ApplyUpdate(Request[Done]):
    """Write what a job prepared, then load tensors through the engine's own loader.

    It travels through the engine's own update route. There is no answer: `WorkerState` reports the outcome.
    """

    job: str | None
    position: Position
    mirror: str
    """The folder of a mirror on the worker's host."""
    reload: tuple[str, ...]


@dataclass(frozen=True)
class JobRequest(Request[Done], Generic[Produced]):
    """Starts a job on every worker, which runs in the background; `ReadJob` asks for its result."""

    result: ClassVar[type]
    job: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True)


@dataclass(frozen=True)
class Digest(JobRequest[Digests]):
    """Digest the live parameters, of some tensors or all."""

    result: ClassVar[type] = Digests
    names: tuple[str, ...] | None = None
    remember: bool = True
    """Whether the digests become what the worker expects; else it also reports what it expected."""


@dataclass(frozen=True)
class StagePatches(JobRequest[Staged]):
    """Prepare staged patches, in this order, for the tensors whose layout is trusted."""

    result: ClassVar[type] = Staged
    paths: tuple[str, ...]


@dataclass(frozen=True)
class StageWeights(JobRequest[Staged]):
    """Prepare all that differs from a mirror, in these tensors."""

    result: ClassVar[type] = Staged
    mirror: str
    """The folder of a mirror on the worker's host."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class CompareFiles(JobRequest[Comparison]):
    """Compare the live parameters, read through the layout, with the checkpoint that the engine loaded."""

    result: ClassVar[type] = Comparison


JOBS = (Digest, StagePatches, StageWeights, CompareFiles)
REQUESTS = (Hello, ReadFit, Survey, Learn, Trust, Distrust, SetPosition, SetPausedByAgent, ReadJob, ApplyUpdate, *JOBS)
