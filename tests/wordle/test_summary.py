"""What a run is recorded and summarised as."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from examples.wordle.boxes import Message
from examples.wordle.record import Record
from examples.wordle.summary import Proof, failures, percentile, phases, summary
from examples.wordle.view import View


def recorded(*messages: tuple[str, str, dict]) -> Record:  # type: ignore[type-arg]
    record = Record()
    for box, event, fields in messages:
        record.take(Message(box, {"event": event, "time": 0.0, **fields}))
    return record


def evaluation(when: str, wins: int, low: float, high: float) -> tuple[str, str, dict]:  # type: ignore[type-arg]
    fields = {"when": when, "version": 0, "games": 100, "wins": wins, "low": low, "high": high, "reward": 1.0}
    return "trainer", "evaluation", fields


RUN = (
    ("trainer", "begin", {"elements": 1000, "nbytes": 2000, "version": 0, "step": 0}),
    evaluation("before", 50, 0.4, 0.6),
    ("replica-a", "version", {"version": 0, "nbytes": 2000, "pause": 9.0, "time": 5.0}),
    ("trainer", "step", {"step": 1, "of": 2, "staleness": 0, "reward": 0.5, "wins": 0.5}),
    ("trainer", "commit", {"version": 1, "changed": 0.02, "nbytes": 100, "stepped": 10.0, "time": 10.5}),
    ("replica-a", "version", {"version": 1, "nbytes": 100, "pause": 0.002, "time": 11.0}),
    ("trainer", "first", {"version": 1, "time": 12.0}),
    ("trainer", "first", {"version": 1, "time": 99.0}),
    ("trainer", "rollouts", {"games": 256}),
    ("trainer", "dropped", {"games": 256}),
    ("trainer", "trouble", {"text": "lost"}),
    evaluation("after", 80, 0.7, 0.9),
    ("trainer", "end", {"version": 1, "digest": "ab" * 32, "exact": True}),
)
GOOD = {"replica-a": Proof(1, "ab" * 32)}


def test_phases_are_joined_by_version() -> None:
    found = phases(list(recorded(*RUN).versions.values()))
    assert found == {
        "step → committed": [0.5],
        "committed → live in the first replica": [0.5],
        "live → first rollout on it": [1.0],
        "step → first rollout on it": [2.0],
    }


def test_summary_has_the_figures() -> None:
    record = recorded(*RUN)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(View("title", record))
    console.print(summary(record, GOOD))
    text = " ".join(console.export_text().split())
    for figure in (
        "50.0%",
        "40.0 – 60.0 %",
        "80.0%",
        "20.0 : 1",
        "2.00% median",
        "500 500 2.0 2.0",
        "256 games were too old",
        "Every replica is bit-identical",
    ):
        assert figure in text
    assert failures(record, GOOD) == []
    assert [replica.pauses for replica in record.replicas.values()] == [[0.002]], "the first version is no pause"


@pytest.mark.parametrize(
    ("proofs", "message", "why"),
    [
        ({"replica-a": Proof(0, "ab" * 32)}, None, "replica-a holds version 0"),
        ({"replica-a": Proof(1, "cd" * 32)}, None, "replica-a holds version 1 (cdcdcdcdcdcd)"),
        (GOOD, ("trainer", "end", {"version": 1, "digest": "ab" * 32, "exact": False}), "not what the trainer holds"),
        (GOOD, evaluation("after", 55, 0.45, 0.65), "did not get measurably better"),
    ],
)
def test_run_that_did_not_end_well_says_why(proofs: dict, message: tuple | None, why: str) -> None:  # type: ignore[type-arg]
    record = recorded(*RUN, *([message] if message else []))
    assert why in "\n".join(failures(record, proofs))


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 50) == 3.0
