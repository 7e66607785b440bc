"""The worker's side of jobs: threads that read and prepare while the engine serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

from weightcast.engine.messages import Comparison, Digests, JobReport, Staged
from weightcast.engine.prepared import Prepared

Result = Digests | Staged | Comparison
_log = logging.getLogger("weightcast")


class _CancelledError(Exception):
    """Ends a job whose result is no longer wanted."""


class Job:
    """Work in a thread; ``report`` is for the agent, ``prepared`` for the update that may follow."""

    def __init__(self, name: str, work: Callable[[Job], Result]):
        self.name = name
        self.report = JobReport("running")
        self.prepared: Prepared | None = None
        self._work = work
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightcast-job", daemon=True)
        self._thread.start()

    def refuse_cancelled(self) -> None:
        """Called between tensors: ends a job that was cancelled."""
        if self._cancelled.is_set():
            raise _CancelledError

    def cancel(self) -> None:
        self._cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.report = JobReport("done", self._work(self))
        except _CancelledError:
            pass  # `Jobs` has dropped it: its report cannot be asked for
        except Exception as error:  # noqa: BLE001 -- the agent gets it in the report
            _log.exception("a job failed")
            self.report = JobReport("failed", problem=f"{type(error).__name__}: {error}")


class Jobs:
    """At most one job that reads and one that prepares an update: a verification does not drop what was staged."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def start(self, purpose: Literal["read", "update"], name: str, work: Callable[[Job], Result]) -> None:
        """Cancels the earlier job of this purpose."""
        if purpose in self._jobs:
            self._jobs.pop(purpose).cancel()
        self._jobs[purpose] = Job(name, work)

    def report(self, name: str) -> JobReport:
        return next((job.report for job in self._jobs.values() if job.name == name), JobReport("gone"))

    def take_prepared(self, name: str) -> Prepared | None:
        """What an update job prepared, once; None if it is gone."""
        job = self._jobs.get("update")
        if job is None or job.name != name:
            return None
        prepared, job.prepared = job.prepared, None
        return prepared

    def cancel(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()
