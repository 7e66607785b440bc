"""`analyze`: exact numbers of a channel's last versions or of two checkpoints, and the page."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from anatomies import DIRECT, MASTERS, publish
from anatomy import recorded
from cli_world import CHANNEL, CHECKPOINT, USAGE, VERSIONS, World, facts, refused, run, text

import weightcast as wc


def flips(world: World, first: int, last: int) -> list[int]:
    """How many elements each step changes."""
    return [
        sum(int((old.read(spec.name) != new.read(spec.name)).sum()) for spec in old.table)
        for old, new in pairwise(world.states[first : last + 1])
    ]


@pytest.mark.parametrize(("last", "first"), [((), 0), (("--last", 4), VERSIONS - 5)])
def test_flips_of_the_last_versions_are_exact(shared: World, last: tuple[str | int, ...], first: int) -> None:
    found = facts("analyze", shared.url, *last)
    assert (found["source"]["first"], found["source"]["last"]) == (first, VERSIONS - 1)
    assert found["changed_by_step"] == flips(shared, first, VERSIONS - 1)
    assert found["changed"] == sum(found["changed_by_step"]) == sum(row["changed"] for row in found["tensors"])
    log = {row["version"]: row for row in facts("log", shared.url)["versions"]}
    for row, measured in zip(found["published"], found["codecs"][-1]["by_step"], strict=True):
        assert row["bytes"] == measured == log[row["version"]]["bytes"]


def test_two_checkpoints_are_analyzed_without_a_channel(shared: World) -> None:
    old, new = shared.checkpoints[2], shared.checkpoints[3]
    found = facts("analyze", old, new)
    assert found["changed_by_step"] == flips(shared, 2, 3)
    assert found["source"] == {"old": str(old), "new": str(new)}
    assert "cadence" not in found
    assert found["returned_share"] is None
    assert "how to cut" not in text("analyze", old, new)


@pytest.mark.parametrize("option", ["--last", "--replicas", "--joins"])
def test_options_for_channels_are_refused_with_two_checkpoints(shared: World, tmp_path: Path, option: str) -> None:
    both = shared.checkpoints[2], shared.checkpoints[3]
    assert "not for two checkpoints" in refused(tmp_path, USAGE, "analyze", *both, option, 1)


def test_flips_by_layer_are_drawn_as_show_draws_them(shared: World) -> None:
    compared = text("show", shared.url, VERSIONS - 1).splitlines()
    drawn = text("analyze", shared.url, "--last", 1).splitlines()
    grid = [line for line in compared if re.match(r" *(layer|\d+) ", line)]
    assert grid
    assert all(line in drawn for line in grid)


def test_weights_that_return_are_counted(tmp_path: Path) -> None:
    bits = np.arange(400, dtype=np.float32)
    moved = bits.copy()
    moved[:100] += 1
    states = [wc.Arrays({"w": some.copy()}) for some in (bits, moved, bits, moved)]
    publish(tmp_path / "channel", states)
    found = facts("analyze", tmp_path / "channel")
    assert (found["changed"], found["returned"], found["returned_share"]) == (300, 200, 1.0)
    assert [(row["versions"], row["changed"], row["touched"]) for row in found["intervals"]] == [
        (1, 100, 100),
        (2, 0, 100),
    ]


def test_weights_that_are_no_floats_are_said_to_be(tmp_path: Path) -> None:
    publish(tmp_path / "channel", [wc.Arrays({"w": np.full(64, value, np.int32)}) for value in (0, 1)])
    found = facts("analyze", tmp_path / "channel")
    assert found["dtypes"] == [{"dtype": "I32", "elements": 64, "changed": 64, "exponents": None}]
    assert "no floats" in text("analyze", tmp_path / "channel")


def test_step_that_changes_nothing_is_shown(tmp_path: Path) -> None:
    folders = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in folders:
        path.write_bytes((MASTERS / "anchor.safetensors").read_bytes())
    found = facts("analyze", *folders)
    assert found["changed"] == 0
    assert found["codecs"][0]["bits_per_change"] is None
    assert "no number flipped" in text("analyze", *folders, "-o", tmp_path / "page.html")


@pytest.mark.parametrize(("trace", "like"), [(MASTERS, "masters of higher"), (DIRECT, "rounded after each")])
def test_recorded_training_is_told_by_its_flips(trace: Path, like: str, tmp_path: Path) -> None:
    publish(tmp_path / "channel", recorded(trace))
    said = text("analyze", tmp_path / "channel")
    assert re.search(rf"looks like  .*{like}.*: 1\.[01]% of flips", said)


def test_assumed_fleet_changes_the_estimate_alone(shared: World) -> None:
    many, none = (facts("analyze", shared.url, "--replicas", number) for number in (64, 0))
    assert {key for key in many if many[key] != none[key]} == {"cadence"}
    best = none["cadence"]["ways"][0]
    assert (best["squash_levels"], best["anchor_every"], best["downloaded"]) == ([], None, 0)
    assert many["cadence"]["ways"][0]["moved"] > best["moved"]


def test_page_holds_all_that_programs_are_told(shared: World, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = facts("analyze", shared.url, "-o", page)
    written = page.read_text()
    embedded = re.search(r'<script type="application/json" id="found">(.*?)</script>', written, re.DOTALL)
    assert embedded is not None
    assert {**json.loads(embedded[1]), "tensors_left_out": 0} == {**told, "tensors_left_out": 0}
    assert "://" not in re.sub(r"http://www\.w3\.org/\S+", "", written.replace(str(shared.url), ""))


def test_page_replaces_nothing_unless_told(shared: World, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert "exists already" in refused(tmp_path, USAGE, "analyze", shared.url, "-o", page)
    assert run("analyze", shared.url, "-o", page, "--force").code == 0
    assert page.read_text().startswith("<!doctype html>")
    old = tmp_path / "old.safetensors"
    old.write_bytes((MASTERS / "anchor.safetensors").read_bytes())
    same = ("analyze", old, old, "-o", old, "--force")
    assert "would replace what it is made from" in refused(tmp_path, USAGE, *same)


def test_what_cannot_be_analyzed_is_refused(shared: World, tmp_path: Path) -> None:
    publish(tmp_path / "one", [wc.Arrays({"w": np.zeros(4, np.float32)})])
    assert "no two successive versions" in refused(tmp_path, CHANNEL, "analyze", tmp_path / "one")
    assert "there is no channel here" in refused(tmp_path, CHANNEL, "analyze", tmp_path / "nowhere")
    other = MASTERS / "anchor.safetensors"
    assert "a tensor is on one side only" in refused(tmp_path, USAGE, "analyze", shared.checkpoints[0], other)
    gone = tmp_path / "gone"
    assert str(gone) in refused(tmp_path, CHECKPOINT, "analyze", shared.checkpoints[0], gone)


def test_nothing_is_left_in_scratch(shared: World, tmp_path: Path) -> None:
    assert run("analyze", shared.url, "--scratch", tmp_path).code == 0
    assert list(tmp_path.iterdir()) == []
