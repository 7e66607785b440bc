"""What an agent says to an engine, and its answers. `protocol` writes and reads them as JSON.

*Requests* go to all workers: each names the type of its answer, and a request that starts a *job* also the type of the
job's result. `UpdateEngine` goes to the engine's own process, which carries it out (`control`). Every number is a
natural number below 2**64.
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
from weightcast.format.cut import Cut

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
    cuts: tuple[Cut, ...] = ()
    """The parts of tensors that are held."""


@dataclass(frozen=True)
class SurveyResult:
    """How the tensors of a channel would fit, compared with the engine's own checkpoint."""

    fit: Fit
    broken: Reason | None
    """Why the engine's loader cannot take the channel's tensors, although it can take its own checkpoint's."""
    strange: Mapping[str, int]
    """Parameters that the engine's own checkpoint covers and the channel does not."""


@dataclass(frozen=True)
class Learned:
    """The channel whose layout a worker has learned, if any."""

    channel: Channel | None


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
    undecoded: frozenset[str] = frozenset()
    """Tensors of which the worker holds a part, and cannot decode it: nothing of them is prepared."""


@dataclass(frozen=True)
class Comparison:
    """Tensors whose live bits are what the engine loaded when it started, and tensors whose bits are not."""

    same: frozenset[str]
    other: frozenset[str]


@dataclass(frozen=True)
class JobProgress:
    """How far a job is. ``gone``: the worker has no such job, since another one replaced it."""

    state: Literal["running", "done", "failed", "gone"]


@dataclass(frozen=True)
class JobReport:
    """The state of a job, as of `JobProgress`, and what came of it."""

    state: Literal["running", "done", "failed", "gone"]
    result: Digests | Staged | Comparison | None = None
    problem: Reason | None = None

    def __post_init__(self) -> None:
        if (self.result is not None, self.problem is not None) != (self.state == "done", self.state == "failed"):
            raise FormatError(f"job_report: state {self.state} with a result or a problem of another state")


@dataclass(frozen=True)
class Owner:
    """The agent that may change an engine."""

    name: str
    seconds: int
    """Until its lease ends, unless it is renewed."""


@dataclass(frozen=True)
class EngineReport:
    """What is known about an engine without computing anything."""

    workers: tuple[WorkerState, ...]
    served: str
    """The version that the engine names in its answers."""
    paused: bool
    paused_by_update: bool
    """Whether an update that failed left it paused."""
    owner: Owner | None


@dataclass(frozen=True)
class Outcome:
    """What came of an `UpdateEngine`.

    ``live``: it was written, verified as asked, and the engine goes on. ``refused``: nothing was written, and the
    engine goes on as it was. ``broken``: the parameters are a mix of versions, and the engine stays paused.
    """

    result: Literal["live", "refused", "broken"]
    problem: Reason | None
    workers: tuple[WorkerState, ...]
    wrong: frozenset[str]
    """Tensors of ``verify`` that do not have the digest that they should have."""
    rounded: frozenset[str]
    """Those of them that the engine holds in a narrower dtype."""
    microseconds: Mapping[str, int]
    """By phase: ``pause``, ``apply``, ``prove``, ``resume``. The engine stood still in all of them."""


ANSWERS = (Done, Failed, WorkerState, Fit, SurveyResult, Learned, JobProgress, JobReport, EngineReport, Outcome)


# -- requests ----------------------------------------------------------------------------------------------------------


class Request(Generic[Answered]):
    """A request to every worker."""

    answer: ClassVar[type] = Done

    @property
    def changes(self) -> bool:
        """Whether it changes what a worker knows or holds: only the engine's owner may do that."""
        return True


class ReadRequest(Request[Answered]):
    """A request that changes nothing."""

    @property
    def changes(self) -> bool:
        return False


@dataclass(frozen=True)
class Hello(ReadRequest[WorkerState]):
    answer: ClassVar[type] = WorkerState


@dataclass(frozen=True)
class ReadFit(ReadRequest[Fit]):
    """How does the learned table fit?"""

    answer: ClassVar[type] = Fit


@dataclass(frozen=True)
class ReadLearned(ReadRequest[Learned]):
    """Which channel's layout was learned?"""

    answer: ClassVar[type] = Learned


@dataclass(frozen=True)
class Survey(ReadRequest[SurveyResult]):
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
    """The live parameters are this version, by their digests."""

    position: Position


@dataclass(frozen=True)
class PollJob(ReadRequest[JobProgress]):
    """How far is a job? Its result may be large."""

    answer: ClassVar[type] = JobProgress
    job: str


@dataclass(frozen=True)
class ReadJob(ReadRequest[JobReport]):
    answer: ClassVar[type] = JobReport
    job: str


@dataclass(frozen=True)
class ApplyUpdate(Request[WorkerState]):
    """Write what a job prepared, then load tensors through the engine's own loader. The engine must be paused.

    The answer says whether it ``failed``, and by ``changing`` whether anything was written before that.
    """

    answer: ClassVar[type] = WorkerState
    job: str | None
    position: Position
    mirror: str | None
    """The folder of a mirror on the worker's host, if there is one."""
    reload: tuple[str, ...]
    settle: bool
    """Whether the parameters are this version now. Else `SetPosition` follows, once they were verified."""


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

    @property
    def changes(self) -> bool:
        return self.remember


@dataclass(frozen=True)
class StagePatches(JobRequest[Staged]):
    """Prepare staged patches, in this order, for the tensors whose layout is trusted."""

    result: ClassVar[type] = Staged
    paths: tuple[str, ...]


@dataclass(frozen=True)
class StageCoded(JobRequest[Staged]):
    """Decode a route's objects against the live parameters, and prepare what they change."""

    result: ClassVar[type] = Staged
    versions: tuple[tuple[str, ...], ...]
    """The files of each edge's objects, in the order of the route."""
    plain: tuple[str, ...] = ()
    """Files of staged patches, in this order, with what the route changes in some tensors: those are not decoded."""


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


JOBS = (Digest, StagePatches, StageCoded, StageWeights, CompareFiles)
READING = (Hello, ReadFit, ReadLearned, Survey, PollJob, ReadJob)
REQUESTS = (*READING, Learn, Trust, Distrust, SetPosition, ApplyUpdate, *JOBS)


# -- to the engine's own process ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateEngine:
    """Pause, have all workers write, verify, name the version, clear caches, go on: all of a version, in one call."""

    job: str | None
    """What the workers prepared, if they did."""
    position: Position
    mirror: str | None
    """The folder of a mirror on the engine's host, if there is one."""
    reload: tuple[str, ...] = ()
    """Tensors for the engine's own loader."""
    verify: Mapping[str, int] = field(default_factory=dict)
    """The digests that these tensors must have in the live parameters. They are read back before the engine goes on."""
    trusted: frozenset[str] = frozenset()
    """Tensors whose layout is verified: if one of them is wrong, so are the parameters, and not only how they are read.
    """
    clear_caches: bool = True
    """Whether to drop what was computed with old weights: prefixes, also of connectors, and encoders' outputs."""
