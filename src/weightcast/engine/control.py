"""What agents may do with an engine, carried out in the engine's own process: one owner, one call per version.

`Control.update` writes a version: pause, write on all workers, verify, clear caches, name the version, resume. An agent
that dies or loses the answer leaves nothing half done behind: it asks, and is told what state the engine is in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from weightcast.engine.host import Host, read_answers
from weightcast.engine.jobs import combine_digests, read_results
from weightcast.engine.lease import SECONDS as LEASE
from weightcast.engine.lease import Lease
from weightcast.engine.messages import (
    ApplyUpdate,
    Digest,
    EngineReport,
    Hello,
    JobRequest,
    Outcome,
    PollJob,
    ReadJob,
    ReadLearned,
    Request,
    SetPosition,
    Trust,
    UpdateEngine,
    WorkerState,
)
from weightcast.engine.protocol import decode_request, encode
from weightcast.errors import EngineError, FormatError
from weightcast.events.phases import Phases
from weightcast.store.backoff import CLOCK, Clock

MIXED = "updating"
"""The version that an engine names while its weights are a mix of versions."""

UNKNOWN = "unknown"
"""The version that an engine names whose workers do not know theirs, as after a reload by somebody else."""

_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.2
"""Seconds between two looks at a job."""

_LONGEST_JOB = 1800.0
PATIENCE = 20.0
"""Less than a client waits for an answer."""

_OTHER_BITS = "its live bits are not the version's"

A = TypeVar("A")


class Control:
    """One engine. Its methods may be called from any thread; ``owner`` is the secret id of the agent that calls."""

    def __init__(self, host: Host, url: str, clock: Clock = CLOCK, *, patience: float = PATIENCE, lease: float = LEASE):
        """A call waits ``patience`` seconds for an update in progress; a ``lease`` lasts so many without a renewal."""
        self.url, self._patience = url, patience
        self._host, self._clock = host, clock
        self._lease = Lease(url, clock, lease)
        self._updating = threading.Lock()
        self._paused = False
        """Whether the engine is paused, and by an update."""

    # -- for everybody -------------------------------------------------------------------------------------------------

    def report(self) -> EngineReport:
        workers = tuple(self._ask(Hello()))
        paused = self._host.is_paused()
        return EngineReport(workers, self._host.served(), paused, paused and self._paused, self._lease.holder())

    def exchange(self, owner: str, text: str) -> list[str]:
        """Send a request to every worker; the encoded answers, which may be large and are not read here."""
        request = decode_request(text)
        if isinstance(request, ApplyUpdate):
            raise FormatError("an update is sent as a whole: pause, write, resume")
        if not request.changes:
            return self._host.exchange(text)
        self._lease.refuse_others(owner)
        with self._between_updates():
            self._lease.refuse_others(owner)  # it may have waited for long
            answers = self._host.exchange(text)
            if isinstance(request, SetPosition):
                read_answers(request, answers, self.url)
                self._host.name_version(str(request.position.version))
        return answers

    def run(self, owner: str, text: str) -> list[str]:
        """Have every worker do a job, and wait for it; the encoded `JobReport` of each."""
        request = decode_request(text)
        if not isinstance(request, JobRequest):
            raise FormatError(f"{type(request).__name__} is not a job")
        if request.changes:
            self._lease.refuse_others(owner)
        return self._run(request)

    def _run(self, request: JobRequest[object]) -> list[str]:
        self._ask(request)
        wait, end = _FIRST_WAIT, time.monotonic() + _LONGEST_JOB
        while "running" in (states := {one.state for one in self._ask(PollJob(request.job))}) and states <= _GOING_ON:
            if time.monotonic() > end:
                raise EngineError(f"a job takes longer than {_LONGEST_JOB:.0f} s", url=self.url)
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return self._host.exchange(encode(ReadJob(request.job)))

    def _ask(self, request: Request[A]) -> list[A]:
        return read_answers(request, self._host.exchange(encode(request)), self.url)

    # -- for the owner -------------------------------------------------------------------------------------------------

    def meet(self, owner: str, name: str) -> EngineReport:
        """Take the lease, or renew it, and say what state the engine is in. `EngineBusyError` if another has it."""
        self._lease.refuse_others(owner)
        with self._between_updates():
            self._lease.take(owner, name)
            return self._end_or_begin_pause()

    def renew(self, owner: str) -> None:
        self._lease.renew(owner)

    def leave(self, owner: str) -> EngineReport:
        """Give the lease back. A pause is ended unless the weights are a mix of versions."""
        self._lease.refuse_others(owner)
        with self._between_updates():
            try:
                return self._end_or_begin_pause()
            finally:
                self._lease.release(owner)

    def update(self, owner: str, update: UpdateEngine) -> Outcome:
        """Bring the engine to a version. `EngineError` if it does not answer: it is then asked what state it is in."""
        self._lease.refuse_others(owner)
        with self._between_updates():
            if not self._lease.is_held_by(owner):
                hint = "The agent takes it again, and asks which version the engine is at."
                raise EngineError("the agent's lease has ended", url=self.url, hint=hint)
            with self._lease.kept():
                return self._update(update)

    @contextmanager
    def _between_updates(self) -> Iterator[None]:
        if not self._updating.acquire(timeout=self._patience):
            raise EngineError("the engine is being updated", url=self.url, hint="Ask again when that has ended.")
        try:
            yield
        finally:
            self._updating.release()

    def _end_or_begin_pause(self) -> EngineReport:
        """Go on after an update that failed between writing and resuming; but never with a mix of versions."""
        report = self.report()
        if not report.paused:
            self._paused = False  # a pause that failed was none, or somebody else has ended it
        if _mixed(report.workers):
            if not report.paused:
                self._paused = True
                self._host.pause()
            self._host.name_version(MIXED)
            return self.report()
        if report.served.isdigit() and all(one.position is None for one in report.workers):
            self._host.name_version(UNKNOWN)
            report = self.report()
        if not report.paused_by_update or _missing(report.workers):
            return report
        self._host.clear_caches()
        position = report.workers[0].position
        if position is not None:
            self._host.name_version(str(position.version))
        self._resume()
        return self.report()

    # -- update --------------------------------------------------------------------------------------------------------

    def _update(self, update: UpdateEngine) -> Outcome:
        phases = Phases(self._clock)
        was_paused = self._host.is_paused()
        by_others = was_paused and not self._paused  # such a pause is left to whoever began it
        with phases.phase("pause"):
            self._paused = not by_others  # before the pause: it must be ended whatever happens in between
            if not was_paused:
                self._host.pause()
        with phases.phase("apply"):
            workers, problem = self._write(update)
        if problem is not None and not _mixed(workers) and not _missing(workers):
            with phases.phase("resume"):
                self._resume()
            return _outcome("refused", problem, workers, phases)
        wrong: Mapping[str, bool] = {}
        if problem is None and update.verify:
            with phases.phase("prove"):
                wrong, problem = self._verify(update)
                workers = tuple(self._ask(Hello()))
        if problem is not None:
            self._host.name_version(MIXED)
            return _outcome("broken", problem, workers, phases, wrong)
        with phases.phase("resume"):
            if update.clear_caches:
                self._host.clear_caches()
            self._host.name_version(str(update.position.version))
            self._resume()
        return _outcome("live", None, workers, phases, wrong)

    def _write(self, update: UpdateEngine) -> tuple[tuple[WorkerState, ...], str | None]:
        """The workers' states afterwards, and what is wrong with them."""
        settle = not update.verify
        request = ApplyUpdate(update.job, update.position, update.mirror, update.reload, settle)
        workers = tuple(self._ask(request))
        for one in workers:
            if one.failed is not None:
                return workers, one.failed
            is_written = one.position == update.position if settle else one.changing
            if not is_written:
                return workers, f"worker {one.rank} missed the update"
        return workers, "not all workers answer" if _missing(workers) else None

    def _verify(self, update: UpdateEngine) -> tuple[Mapping[str, bool], str | None]:
        """Read back what must be verified; wrong tensors and whether they are rounded, and what that means."""
        learned = self._ask(ReadLearned())[0].channel
        if learned is None:
            raise EngineError("no layout was learned yet", url=self.url)
        request = Digest(tuple(update.verify))
        results = read_results(request, self._run(request), self.url)
        digests = combine_digests(self.url, learned.table, [one.live for one in results], update.verify)
        wrong = {name: one.rounded for name, one in digests.items() if one.digest != update.verify[name]}
        for name, is_rounded in wrong.items():
            if name in update.trusted and not is_rounded:
                return wrong, f"{name}: {digests[name].problem or _OTHER_BITS}"
        self._ask(Trust(frozenset(update.verify.keys() - wrong.keys())))
        self._ask(SetPosition(update.position))  # last: until here no worker says that it is at the version
        return wrong, None

    def _resume(self) -> None:
        if self._paused:
            self._host.resume()
            self._paused = False


_GOING_ON = {"running", "done"}


def _mixed(workers: tuple[WorkerState, ...]) -> bool:
    """Whether an update broke off: such weights must not be served."""
    return any(one.changing for one in workers) or len({one.position for one in workers}) > 1


def _missing(workers: tuple[WorkerState, ...]) -> bool:
    """Whether some workers did not answer: nothing is known of what they hold."""
    return {one.rank for one in workers} != set(range(workers[0].world))


def _outcome(
    result: str, problem: str | None, workers: tuple[WorkerState, ...], phases: Phases, wrong: Mapping[str, bool] = {}
) -> Outcome:
    rounded = frozenset(name for name, is_rounded in wrong.items() if is_rounded)
    microseconds = {phase: round(1e6 * seconds) for phase, seconds in phases.seconds.items()}
    return Outcome(result, problem, workers, frozenset(wrong), rounded, microseconds)  # type: ignore[arg-type]
