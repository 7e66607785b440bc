"""docs/comparison.md: every figure has a source, and what it calls measured is in benchmarks/RESULTS.md."""

from __future__ import annotations

import re

import pytest
from guides import Page

PAGE, RESULTS = Page.of("docs/comparison.md"), Page.of("benchmarks/RESULTS.md").text
SOURCE = re.compile(r"measured|run once|the same|20\d\d|RESULTS|\]\(http")


@pytest.mark.parametrize("title", ["Bits for each changed weight", "Time of a sync"])
def test_every_row_of_figures_says_where_it_is_from(title: str) -> None:
    rows = [line for line in PAGE.section(title).text.splitlines() if re.match(r"\| [^-]", line)]
    figures = [row for row in rows if re.search(r"\d", row.partition("|")[2])]
    assert len(figures) > 8
    assert [row for row in figures if not SOURCE.search(row)] == []


def test_measured_figures_are_those_of_the_results() -> None:
    measured = [line for line in PAGE.text.splitlines() if line.startswith("| weightcast") and "measured" in line]
    assert len(measured) == 4
    for line in measured:
        found = re.findall(r"\d+\.\d+", re.sub(r"\(.*?\)", "", line))
        assert found
        assert [figure for figure in found if figure not in RESULTS] == []
