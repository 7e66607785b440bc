"""docs/guides/operations.md: its commands run, and its tables of errors and exit codes are complete and right."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest
from cli_world import facts, make_world
from guides import Page, play

from weightcast import errors
from weightcast.channel.retention import Retention
from weightcast.cli.console import EXIT_CODES_HELP, code_of

PAGE = Page.of("operations.md")
RESULTS = Page.of("benchmarks/RESULTS.md")
ERRORS = PAGE.table("error")


def test_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    world = make_world(tmp_path / "made")
    shutil.copytree(world.url, "channel")
    Path("checkpoint").symlink_to(world.checkpoints[-1])
    places = {"s3://bucket/run-42": world.url, "s3://backup/run-42": tmp_path / "backup"}
    places |= {"s3://other/run-42": tmp_path / "other", "gpu-0": facts("status", world.url)["writer"]["name"]}
    play(PAGE, places=places, codes=frozenset({0, 3, 13}))


def test_defaults_of_retention_are_those_of_the_code() -> None:
    said = {option: row[2] for row in PAGE.table("rule") for option in re.findall(r"--(\w+) TIME", row[0])}
    days = {option: f"{getattr(Retention(), option) / 86400:.0f}" for option in ("window", "grace")}
    assert {option: text.split()[0] for option, text in said.items()} == days
    assert PAGE.table("rule")[4][2] == f"{Retention().patience / 86400:.0f} days"


def test_figures_of_the_disk_are_those_of_the_results() -> None:
    figures = {figure for row in PAGE.table("what") for figure in re.findall(r"\d+\.\d\d", row[2])}
    assert figures == set(re.findall(r"\d\.\d\d(?= \|)", RESULTS.section("Disk").text))


def test_figures_of_memory_are_those_of_the_results() -> None:
    measured = RESULTS.section("Memory").text
    rows = PAGE.table("role")
    assert len(rows) == 7
    for row in rows:
        role = row[0].split(",")[0]
        lines = [line for line in measured.splitlines() if line.startswith(f"| {role}")]
        figures = {figure for cell in row[1:] for figure in re.findall(r"\d+\.\d", cell)}
        assert figures <= set(re.findall(r"\d+\.\d", "".join(lines))), role


def test_every_error_class_has_one_row() -> None:
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert sorted(row[0].strip("`") for row in ERRORS) == sorted(classes)
    assert sorted({*classes, "about"}) == sorted(errors.__all__)


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row[0].strip("`"))
def test_row_of_an_error_says_how_the_command_exits_and_what_to_do(row: list[str]) -> None:
    name, code, meaning, remedy = row
    kind = getattr(errors, name.strip("`"))
    assert code_of(kind.__new__(kind)) == int(code)
    assert meaning
    assert remedy


def test_all_exit_codes_of_the_command_are_in_the_tables() -> None:
    told = {row[1] for row in ERRORS} | {code for row in PAGE.table("exit") for code in row[0].split(", ")}
    assert told - {"143"} == set(re.findall(r"\b(\d+) ", EXIT_CODES_HELP))


def test_class_tree_in_the_docstring_has_every_class() -> None:
    assert set(re.findall(r"^[ │├└─]+(\w+)", errors.__doc__ or "", re.MULTILINE)) == set(errors.__all__) - {"about"}
