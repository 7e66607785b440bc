"""The worker's side of jobs: threads that read and prepare while the engine serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weightcast.engine.messages import Comparison, Digests, JobReport, Staged
from weightcast.engine.prepared import Prepared
from weightcast.errors import UsageError

Result = Digests | Staged | Comparison
_log = logging.getLogger("weightcast")

_MOST_READING = 4
"""Jobs that read at the same time, and results of them that are kept."""


class _CancelledError(Exception):
    """Ends a job whose result is no longer wanted."""


class Job:
    """Work in a thread; ``report`` is for the agent, ``prepared`` for the update that may follow."""

    def __init__(self, name: str, work: Callable[[Job], Result], after: Job | None = None):
        """The thread begins with the work once the job ``after`` has ended."""
        self.name = name
        self.report = JobReport("running")
        self.prepared: Prepared | None = None
        self._work, self._after = work, after
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightcast-job", daemon=True)
        self._thread.start()

    def refuse_cancelled(self) -> None:
        """Called between tensors: ends a job that was cancelled."""
        if self._cancelled.is_set():
            raise _CancelledError

    def cancel(self) -> None:
        """End it at its next look; returns at once."""
        self._cancelled.set()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        if self._after is not None:
            self._after.wait()
            self._after = None
        try:
            self.refuse_cancelled()
            self.report = JobReport("done", self._work(self))
        except _CancelledError:
            pass  # `Jobs` has dropped it: its report cannot be asked for
        except Exception as error:  # noqa: BLE001 -- the agent gets it in the report
            _log.exception("a job failed")
            self.report = JobReport("failed", problem=f"{type(error).__name__}: {error}")


class Jobs:
    """At most one job that prepares an update, and a few that read: each verification has its own result."""

    def __init__(self) -> None:
        self._update: Job | None = None
        self._reading: dict[str, Job] = {}

    def start_update(self, name: str, work: Callable[[Job], Result]) -> None:
        """Cancels the update that was prepared before, and returns at once: the engine computes in this thread.

        The work begins when that update's has ended: two of them would need the memory of both.
        """
        before = self._update
        if before is not None:
            before.cancel()
        self._update = Job(name, work, before)

    def start_reading(self, name: str, work: Callable[[Job], Result], is_owners: bool = False) -> None:
        """Forgets the oldest results; `UsageError` if too many jobs are running, unless it is the owner's.

        What was reloaded is read back in a pause, which others must not make longer.
        """
        finished = [one for one, job in self._reading.items() if job.report.state != "running"]
        for one in finished[: max(0, len(self._reading) - _MOST_READING + 1)]:
            del self._reading[one]
        if len(self._reading) >= _MOST_READING and not is_owners:
            raise UsageError(f"{_MOST_READING} verifications are running already", hint="Wait until one has ended.")
        self._reading[name] = Job(name, work)

    def report(self, name: str) -> JobReport:
        update = self._update
        job = update if update is not None and update.name == name else self._reading.get(name)
        return JobReport("gone") if job is None else job.report

    def take_prepared(self, name: str) -> Prepared | None:
        """What an update job prepared, once; None if it is gone."""
        job = self._update
        if job is None or job.name != name:
            return None
        prepared, job.prepared = job.prepared, None
        return prepared

    def cancel(self) -> None:
        """Cancel all, and wait for their end, a tensor's work at most: the parameters are about to be replaced."""
        jobs = [*self._reading.values(), *([self._update] if self._update is not None else [])]
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.wait()
        self._reading.clear()
        self._update = None
