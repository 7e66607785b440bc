"""`compare`: exact counts between any two versions, and what it prints."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cases import Bag
from cli_world import USAGE, World, facts, refused, run, text

import weightcast as wc


def truth(old: Bag, new: Bag) -> dict[str, int]:
    found = {spec.name: int((old.read(spec.name) != new.read(spec.name)).sum()) for spec in old.table}
    return {name: changed for name, changed in found.items() if changed}


@pytest.mark.parametrize(("one", "other"), [(3, 9), (9, 3), (0, 1)])
def test_counts_are_exact_in_both_directions(shared: World, one: int, other: int, tmp_path: Path) -> None:
    found = facts("compare", shared.url, one, other, "--scratch", tmp_path)
    expected = truth(shared.states[one], shared.states[other])
    assert {row["name"]: row["changed"] for row in found["tensors"]} == expected
    assert (found["changed"], found["changed_tensors"]) == (sum(expected.values()), len(expected))
    assert (found["from"]["version"], found["to"]["version"]) == (one, other)
    assert list(tmp_path.iterdir()) == [], "nothing is left"
    counts = [row["changed"] for row in found["tensors"]]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("verb", "work"), [(("compare", 3, 9), "compare.compare"), (("verify", "--deep"), "verify.verify_deep")]
)
def test_copies_that_a_killed_run_left_are_swept(
    shared: World, verb: tuple[str | int, ...], work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill leaves is the working folder as it is during the work."""

    def killed(*arguments: object) -> list[object]:
        (made,) = tmp_path.iterdir()
        shutil.copytree(made, tmp_path / f"{made.name}x")
        return []

    command = (verb[0], shared.url, *verb[1:], "--scratch", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(f"weightcast.upkeep.{work}", killed)
        assert run(*command).code == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert run(*command).code == 0
    assert list(tmp_path.iterdir()) == []


def test_cost_is_that_of_the_cheapest_route(shared: World) -> None:
    found = facts("compare", shared.url, "best", "head")
    plan = facts("plan", shared.url, "--from", 4)
    assert (found["bytes"], found["objects"]) == (plan["bytes"], len(plan["route"]))
    back = facts("compare", shared.url, "head", "best")
    assert back["bytes"] == facts("plan", shared.url, "--from", "nothing", "--to", 4)["bytes"]


def test_version_compared_with_itself_costs_nothing(shared: World) -> None:
    found = facts("compare", shared.url, 4, "best")
    assert (found["changed"], found["bytes"], found["tensors"]) == (0, 0, [])
    assert "0 elements" in text("compare", shared.url, 4, "best")


def test_elements_that_returned_do_not_count(tmp_path: Path) -> None:
    url, bits = tmp_path / "channel", np.zeros(100, np.float32)
    wc.init(url, wc.Arrays({"w": bits}))
    with wc.Publisher(url, wc.Arrays({"w": bits})) as publisher:
        for value in (1.0, 0.0):
            changed = bits.copy()
            changed[:50] = value
            changed[99] = 7.0
            publisher.publish(weights=wc.Arrays({"w": changed})).result(60)
    assert facts("compare", url, 0, 2)["changed"] == 1


def test_most_changed_tensors_come_first_and_all_on_request(tmp_path: Path) -> None:
    url = tmp_path / "channel"
    names = [f"layers.{layer}.w" for layer in range(25)]
    bits = {name: np.zeros(64, np.float32) for name in names}
    wc.init(url, wc.Arrays(bits))
    changed = {name: np.zeros(64, np.float32) for name in names}
    for layer, name in enumerate(names):
        changed[name][: 9 if layer in (2, 10) else 1] = 1.0
    with wc.Publisher(url, wc.Arrays(bits)) as publisher:
        publisher.publish(weights=wc.Arrays(changed)).result(60)
    lines = text("compare", url, 0, 1).splitlines()
    listed = [line.split()[-1] for line in lines if "layers." in line]
    assert listed[:4] == ["layers.2.w", "layers.10.w", "layers.0.w", "layers.1.w"]
    assert len(listed) == 20
    assert lines[-1] == "5 more changed tensors: --all lists them"
    whole = text("compare", url, 0, 1, "--all").splitlines()
    assert [line.split()[-1] for line in whole if "layers." in line][-1] == "layers.24.w"


def test_missing_version_or_scratch_is_refused(shared: World, tmp_path: Path) -> None:
    assert "there is no version 77" in refused(tmp_path, USAGE, "compare", shared.url, 0, 77)
    assert "there is no tag" in refused(tmp_path, USAGE, "compare", shared.url, "worst", 1)
    scratch = ("--scratch", tmp_path / "nowhere")
    assert "no such folder" in refused(tmp_path, USAGE, "compare", shared.url, 0, 1, *scratch)
