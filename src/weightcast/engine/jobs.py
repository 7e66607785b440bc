"""Jobs: what takes a worker long and goes on in the background while the engine serves. The agent waits for them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from weightcast.engine.box_digests import BoxDigest, TensorDigest, combine
from weightcast.engine.client import Engine
from weightcast.engine.messages import BoxDigests, CompareFiles, Digest, JobRequest, ReadJob
from weightcast.errors import EngineError, UsageError
from weightcast.format.spec import TensorTable

_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.2
R = TypeVar("R")


def new_job() -> str:
    return uuid.uuid4().hex


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


def combine_digests(engine: Engine, table: TensorTable, workers: Sequence[BoxDigests]) -> dict[str, TensorDigest]:
    """Of every tensor that some worker reports; `EngineError` for a report that does not go with the table."""
    boxes: dict[str, list[BoxDigest]] = {}
    for one in workers:
        for name, some in one.items():
            if name not in table:
                raise EngineError(
                    "a worker reports a tensor that the channel does not have", url=engine.url, tensor=name
                )
            boxes.setdefault(name, []).extend(some)
    try:
        return {name: combine(table[name], some) for name, some in boxes.items()}
    except UsageError as error:
        raise EngineError(error.problem, url=engine.url, tensor=error.tensor) from error


def live_digests(engine: Engine, table: TensorTable, names: Iterable[str] | None = None) -> Mapping[str, TensorDigest]:
    """The digests of the live parameters of all workers, of some tensors or all."""
    request = Digest(new_job(), None if names is None else tuple(sorted(names)))
    found = combine_digests(engine, table, [one.live for one in run_job(engine, request)])
    missing = TensorDigest(None, "no worker reports it")
    wanted = [spec.name for spec in table] if request.names is None else request.names
    return {name: found.get(name, missing) for name in wanted}


def compare_files(engine: Engine) -> tuple[set[str], set[str]]:
    """Tensors that are, read through the layout, what the engine loaded when it started; and those that are not."""
    results = run_job(engine, CompareFiles(new_job()))
    same, other = (set[str]().union(*names) for names in ([r.same for r in results], [r.other for r in results]))
    return same - other, other
