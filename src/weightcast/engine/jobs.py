"""The agent's side of jobs: it starts them on all workers, waits, and combines the results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

from weightcast.engine.box_digests import BoxDigest, TensorDigest, combine
from weightcast.engine.client import Engine
from weightcast.engine.messages import BoxDigests, CompareFiles, Digest, JobRequest, ReadJob
from weightcast.errors import EngineError, UsageError
from weightcast.format.spec import TensorTable

_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.2
R = TypeVar("R")


def run_job(engine: Engine, request: JobRequest[R]) -> list[R]:
    """Have all workers do a job, and wait for it; their results, in the order of ranks."""
    engine.ask(request)
    wait = _FIRST_WAIT
    while True:
        reports = engine.ask(ReadJob(request.job))
        for rank, report in enumerate(reports):
            if report.state not in ("running", "done"):
                problem = report.problem or f"the job is {report.state}"
                raise EngineError(f"worker {rank}: {problem}", url=engine.url)
        if all(report.state == "done" for report in reports):
            results = [report.result for report in reports]
            for rank, result in enumerate(results):
                if not isinstance(result, request.result):
                    problem = f"worker {rank} answers a {type(request).__name__} with a {type(result).__name__}"
                    raise EngineError(problem, url=engine.url)
            return results  # type: ignore[return-value]
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)


def combine_digests(
    engine: Engine, table: TensorTable, workers: Sequence[BoxDigests], names: Iterable[str] = ()
) -> dict[str, TensorDigest]:
    """Of ``names`` and every tensor that a worker reports; `EngineError` for a report that contradicts the table."""
    boxes: dict[str, list[BoxDigest]] = {name: [] for name in names}
    for one in workers:
        for name, some in one.items():
            if name not in table:
                problem = "a worker reports a tensor that the channel does not have"
                raise EngineError(problem, url=engine.url, tensor=name)
            boxes.setdefault(name, []).extend(some)
    try:
        return {name: combine(table[name], some) for name, some in boxes.items()}
    except UsageError as error:
        raise EngineError(error.problem, url=engine.url, tensor=error.tensor) from error


def live_digests(engine: Engine, table: TensorTable, names: Sequence[str] | None = None) -> dict[str, TensorDigest]:
    """The digests of the live parameters of all workers, of some tensors or all."""
    request = Digest(None if names is None else tuple(names))
    wanted = [spec.name for spec in table] if names is None else names
    return combine_digests(engine, table, [one.live for one in run_job(engine, request)], wanted)


def compare_files(engine: Engine) -> tuple[frozenset[str], frozenset[str]]:
    """Tensors that are, read through the layout, what the engine loaded when it started; and those that are not."""
    results = run_job(engine, CompareFiles())
    same, other = (frozenset().union(*names) for names in zip(*((one.same, one.other) for one in results), strict=True))
    return same - other, other
