"""The results of workers' jobs: read, and combined to digests of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from weightcast.engine.box_digests import BoxDigest, TensorDigest, combine
from weightcast.engine.host import read_answers
from weightcast.engine.messages import BoxDigests, CompareFiles, Digest, JobRequest, ReadJob
from weightcast.errors import EngineError, UsageError
from weightcast.format.spec import TensorTable

if TYPE_CHECKING:
    from weightcast.engine.client import Engine

R = TypeVar("R")


def read_results(request: JobRequest[R], texts: Iterable[object], url: str) -> list[R]:
    """The workers' results, in the order of ranks, from their encoded reports."""
    reports = read_answers(ReadJob(request.job), texts, url)
    # A worker that failed comes first: the others may not have ended because of it.
    for rank, report in sorted(enumerate(reports), key=lambda one: one[1].state == "running"):
        if report.state != "done":
            problem = report.problem or f"the job is {report.state}"
            raise EngineError(f"worker {rank}: {problem}", url=url)
        if not isinstance(report.result, request.result):
            problem = f"worker {rank} answers a {type(request).__name__} with a {type(report.result).__name__}"
            raise EngineError(problem, url=url)
    return [report.result for report in reports]  # type: ignore[misc]


def combine_digests(
    url: str, table: TensorTable, workers: Sequence[BoxDigests], names: Iterable[str] = ()
) -> dict[str, TensorDigest]:
    """Of ``names`` and every tensor that a worker reports; `EngineError` for a report that contradicts the table."""
    boxes: dict[str, list[BoxDigest]] = {name: [] for name in names}
    for one in workers:
        for name, some in one.items():
            if name not in table:
                problem = "a worker reports a tensor that the channel does not have"
                raise EngineError(problem, url=url, tensor=name)
            boxes.setdefault(name, []).extend(some)
    try:
        return {name: combine(table[name], some) for name, some in boxes.items()}
    except UsageError as error:
        raise EngineError(error.problem, url=url, tensor=error.tensor) from error


def live_digests(engine: Engine, table: TensorTable) -> dict[str, TensorDigest]:
    """The digests of the live parameters of all workers."""
    results = engine.run(Digest())
    return combine_digests(engine.url, table, [one.live for one in results], (spec.name for spec in table))


def compare_files(engine: Engine) -> tuple[frozenset[str], frozenset[str]]:
    """Tensors that are, read through the layout, what the engine loaded when it started; and those that are not."""
    results = engine.run(CompareFiles())
    same, other = (frozenset().union(*names) for names in zip(*((one.same, one.other) for one in results), strict=True))
    return same - other, other
