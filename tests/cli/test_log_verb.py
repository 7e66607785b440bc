"""`log`: which versions, what is said of each, and how it fits a narrow terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_world import USAGE, VERSIONS, World, facts, objects, run, text

from weightcast.cli.text import Column, Table


def test_log_has_the_newest_first(shared: World) -> None:
    rows = facts("log", shared.url)["versions"]
    assert [row["version"] for row in rows] == list(range(VERSIONS))[::-1]
    assert [row["step"] for row in rows] == [10 * version for version in range(VERSIONS)][::-1]
    sizes = [path.stat().st_size for path in objects(shared.url, "deltas")]
    assert [row["bytes"] for row in rows[:-1]] == sizes[::-1]
    old, new = shared.states[3:5]
    changed = sum(int((old.read(spec.name) != new.read(spec.name)).sum()) for spec in old.table)
    assert rows[-5]["changed"] == changed
    assert rows[-5]["density"] == changed / old.table.elements
    assert {row["version"] for row in rows if row["anchor"]} == {0, VERSIONS - 1}
    assert {row["version"] for row in rows if row["pinned"]} == {4}
    assert {row["version"]: row["squashes"] for row in rows if row["squashes"]} == {8: [8]}


def test_log_for_people(shared: World) -> None:
    head, *lines = text("log", shared.url).splitlines()
    assert head.split() == ["version", "step", "age", "changed", "size", "ratio", "codec", "label", "writer"]
    assert [line.split()[0] for line in lines] == [str(version) for version in range(VERSIONS)][::-1]
    shown = ("⚓", "pinned", "⇤8", "(best)", "after the warm-up")
    marks = {line.split()[0]: [mark for mark in shown if f" {mark} " in line] for line in lines}
    expected = {"9": ["⚓"], "8": ["⇤8"], "5": ["after the warm-up"], "4": ["pinned", "(best)"], "0": ["⚓"]}
    assert {version: found for version, found in marks.items() if found} == expected
    assert len(text("log", shared.url, "-n", 3).splitlines()) == 4


def test_log_finds_versions_before_a_gap(world: World) -> None:
    for version in (5, 6, 7):
        (world.url / "manifests" / f"{version:012d}.json").unlink()
    assert [row["version"] for row in facts("log", world.url, "-n", 4)["versions"]] == [9, 8, 4, 3]
    assert [row["version"] for row in facts("log", world.url, "--all")["versions"]] == [9, 8, 4, 3, 2, 1, 0]


def test_log_shows_what_is_damaged_in_its_place(world: World) -> None:
    (world.url / "manifests" / f"{3:012d}.json").write_text("{")
    rows = {row["version"]: row for row in facts("log", world.url)["versions"]}
    assert "not JSON" in rows[3]["problem"]
    assert "version 3: " in run("log", world.url).err
    assert rows[2]["step"] == 20


# -- which -------------------------------------------------------------------------------------------------------------


def listed(*arguments: str | Path | int) -> list[int]:
    return [row["version"] for row in facts("log", *arguments)["versions"]]


@pytest.mark.parametrize(
    ("wanted", "versions"),
    [
        ("3..5", [5, 4, 3]),
        ("7..", [9, 8, 7]),
        ("..1", [1, 0]),
        ("best", [4]),
        ("best..5", [5, 4]),
        ("8..head", [9, 8]),
        ("6", [6]),
        ("5..3", []),
        ("7..5000", [9, 8, 7]),
    ],
)
def test_range_has_both_ends(shared: World, wanted: str, versions: list[int]) -> None:
    assert listed(shared.url, wanted) == versions


def test_range_and_number_go_together(shared: World) -> None:
    assert listed(shared.url, "..6", "-n", 2) == [6, 5]
    assert text("log", shared.url, "5..3") == "no version matches; the newest is 9\n"


def test_filters(shared: World) -> None:
    assert listed(shared.url, "--step", "30..50") == [5, 4, 3]
    assert listed(shared.url, "--step", "70") == [7]
    assert listed(shared.url, "--step", "..10") == [1, 0]
    assert listed(shared.url, "--marked") == [9, 5, 4, 0]
    assert listed(shared.url, "--marked", "-n", 1, "..8") == [5]
    assert listed(shared.url, "--since", "1h") == listed(shared.url)
    assert listed(shared.url, "--since", "2999-01-01") == []


def test_filter_finds_what_lies_beyond_the_newest(shared: World) -> None:
    assert listed(shared.url, "--step", "0", "-n", 1) == [0]


@pytest.mark.parametrize(
    "arguments", [("3...5",), ("worst",), ("a b",), ("--since", "soon"), ("--step", "x"), ("--step", ".."), ("-1..3",)]
)
def test_impossible_range_or_filter_is_refused(shared: World, arguments: tuple[str, ...]) -> None:
    done = run("log", shared.url, *arguments)
    assert (done.code, done.out) == (USAGE, "")


# -- how it looks ------------------------------------------------------------------------------------------------------


def on_screen(columns: int, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path | int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    return text("log", *arguments).splitlines()


def test_sixty_columns_lose_the_writer_first_and_never_step_marks_or_size(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = on_screen(200, monkeypatch, shared.url)
    assert wide[0].split()[-1] == "writer"
    widest = max(map(len, wide))
    narrower = on_screen(widest - 1, monkeypatch, shared.url)
    assert "writer" not in narrower[0]
    assert {"codec", "ratio", "changed", "label"} <= set(narrower[0].split())
    for columns in (60, 45):
        lines = on_screen(columns, monkeypatch, shared.url)
        assert all(len(line) <= columns for line in lines)
        assert {"version", "step", "age", "size"} <= set(lines[0].split())
        assert any(line.split()[:2] == ["9", "90"] and "⚓" in line for line in lines)
        assert any("pinned (best)" in line for line in lines)
        assert all("…" not in line or "warm" in line or "after" in line for line in lines), "only labels are cut"


def test_long_has_digests_and_times(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = facts("log", shared.url, "-n", 1)["versions"][0]
    lines = on_screen(80, monkeypatch, shared.url, "--long")
    assert lines[0].split()[:5] == ["version", "digest", "time", "(UTC)", "step"]
    assert newest["digest"][:12] in lines[1]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[1])
    assert all(len(line) <= 80 for line in lines)


def test_versions_from_the_future_are_named_as_such(world: World) -> None:
    path = world.url / "manifests" / f"{9:012d}.json"
    path.write_bytes(re.sub(rb'"time":[0-9.]+', b'"time":4102444800.0', path.read_bytes()))
    done = run("log", world.url)
    assert "1 version from the future" in done.err
    assert "check the clocks" in done.err
    assert re.search(r"^ +9 +90 +future ", done.out, re.MULTILINE)
    assert "in the future by" in text("status", world.url)


def test_columns_are_chosen_by_rank() -> None:
    def shown(width: int | None, *more: Column) -> str:
        columns = [Column("a"), Column("b", rank=2), Column("c", rank=1, shortest=4), Column("d", rank=3), *more]
        table = Table(*columns)
        table.add("x" * 5, "x" * 5, "x" * 30, "x" * 5, *("x" * 9 for _ in more))
        return "".join(table.lines(colours=False, width=width)[0].split())

    assert [shown(width) for width in (100, 25, 24, 17, 11, 10, 3)] == ["abcd", "abcd", "abc", "ac", "ac", "a", "a"]
    early = Column("w", rank=9, early=True)
    assert shown(60, early) == "abcd", "before any cell is cut"
    assert shown(62, early) == "abcdw"
    empty = Table("a", "b")
    empty.add("x")
    assert empty.lines(colours=False) == ["a", "x"]
