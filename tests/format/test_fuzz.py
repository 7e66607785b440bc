"""The fuzzer, for a short while; and that it would notice."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_models import models
from fuzz_wire import Command, hostile, outcome, run


def test_hostile_patches_are_refused_or_right(tmp_path: Path) -> None:
    report = run(seconds=600, seed=1, keep=tmp_path, last=999)
    assert report.findings == []
    assert min(report.outcomes[kind] for kind in ("accepted", "FormatError", "ResultError", "UsageError")) > 0, report
    assert report.patches == 1000


def test_honest_patches_are_accepted() -> None:
    for model in models():
        assert {outcome(model, patch) for patch in model.patches} == {"accepted"}


def test_number_and_a_seed_are_always_the_same_patch() -> None:
    assert [hostile(3, number)[1] for number in range(50)] == [hostile(3, number)[1] for number in range(50)]
    assert hostile(3, 0)[1] != hostile(4, 0)[1]


def test_other_bits_would_be_noticed() -> None:
    model = models()[0]
    with pytest.raises(AssertionError, match="with other bits"):
        outcome(replace(model, new=model.old), model.patches[0])
    with pytest.raises(AssertionError, match="leads elsewhere"):
        outcome(replace(model, reached="0" * 64), model.patches[0])


def dying(code: str) -> Command:
    """A child that says at which patch it is, and then does something else."""
    tell = "import os, pathlib, sys, time; f = pathlib.Path(sys.argv[1]).open('r+b')\n"
    tell += "f.write(int(sys.argv[2]).to_bytes(8, 'little')); f.close()\n"
    return lambda seconds, first, progress: [sys.executable, "-c", tell + code, str(progress), str(first)]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("os.kill(os.getpid(), 11)", "signal 11"),
        ("raise MemoryError('too much')", "MemoryError: too much"),
        ("time.sleep(100)", "no end after 2 s"),
    ],
)
def test_crash_and_hang_would_be_noticed(tmp_path: Path, code: str, what: str) -> None:
    report = run(seconds=1, seed=5, keep=tmp_path, command=dying(code), patience=2)
    first = report.findings[0]
    assert (first.number, first.what) == (0, what)
    assert first.file.read_bytes() == hostile(5, 0)[1]
    assert [finding.number for finding in report.findings] == list(range(len(report.findings)))
