"""`weightcast estimate`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_world import FORMAT, USAGE, facts, refused, run, text

from weightcast.estimate.model import ASSUMPTIONS, METHODS

RATES = Path(__file__).parents[2] / "docs" / "guides" / "rates" / "h200.json"
GIVEN = ("--rates", RATES)


def test_all_methods_and_assumptions_are_shown() -> None:
    shown = text("estimate", "7B", *GIVEN)
    for method in METHODS:
        assert method in shown
    for assumption in ASSUMPTIONS:
        assert assumption in shown
    assert "estimates" in shown


def test_programs_get_the_same_figures() -> None:
    found = facts("estimate", "7B", *GIVEN, "--step-time", "60s", "--regions", "2", "--egress-price", "0.1")
    assert set(found["methods"]) == set(METHODS)
    ours = found["methods"]["banded"]
    assert ours["seconds"] == pytest.approx(sum(ours["phases"].values()))
    assert ours["money"] == pytest.approx(ours["bytes"] / 1e9 * 0.1)
    assert found["model"]["parameters"] == 7_000_000_000
    assert found["assumptions"] == list(ASSUMPTIONS)


def test_rates_that_were_saved_give_the_same_estimate(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    assert text("estimate", "1B", *GIVEN, "--save-rates", saved) == text("estimate", "1B", "--rates", saved)
    assert "exists already" in refused(tmp_path, USAGE, "estimate", "1B", *GIVEN, "--save-rates", saved)
    assert "no such folder" in refused(
        tmp_path, USAGE, "estimate", "1B", *GIVEN, "--save-rates", tmp_path / "none" / "x"
    )


@pytest.mark.parametrize("parameters", ["", "B", "0", "-1B", "1e9", "1e309", "nan", "1001T", "9" * 400, "1 000", "٧B"])
def test_impossible_number_of_parameters_is_refused(parameters: str) -> None:
    done = run("estimate", *GIVEN, "--", parameters)
    assert done.code == USAGE
    assert "not a number of parameters" in done.complaint


@pytest.mark.parametrize(
    "option",
    [
        ("--density", "0"),
        ("--density", "91"),
        ("--density", "nan"),
        ("--latency", "nan"),
        ("--latency", "-1"),
        ("--egress-price", "nan"),
        ("--egress-price", "inf"),
        ("--up", "fast"),
        ("--step-time", "0s"),
        ("--step-time", "soon"),
        ("--ranks", "0"),
        ("--dtype", "I8"),
    ],
    ids=" ".join,
)
def test_impossible_option_is_refused(option: tuple[str, str]) -> None:
    assert run("estimate", "1B", *GIVEN, *option).code == USAGE


def test_file_that_holds_no_rates_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    done = run("estimate", "1B", "--rates", wrong)
    assert done.code == FORMAT
    assert "--save-rates" in done.complaint


def test_file_of_rates_that_is_missing_is_named(tmp_path: Path) -> None:
    done = run("estimate", "1B", "--rates", tmp_path / "none.json")
    assert done.code == 1
    assert "none.json" in done.complaint
