"""`plan`: the cheapest route, and what others cost."""

from __future__ import annotations

from pathlib import Path

from cli_world import USAGE, VERSIONS, World, facts, objects, run, text, tree


def test_plan_takes_the_squash(shared: World) -> None:
    sizes = {path.name[:12]: path.stat().st_size for path in objects(shared.url, "deltas")}
    (squash,) = objects(shared.url, "squashes")
    found = facts("plan", shared.url, "--from", 0)
    kinds = [(edge["kind"], edge["base"], edge["result"]) for edge in found["route"]]
    assert kinds == [("squash", 0, 8), ("delta", 8, 9)]
    assert found["bytes"] == squash.stat().st_size + sizes[f"{9:012d}"]
    assert found["replay"] == {"bytes": sum(sizes.values()), "objects": 9}
    assert found["anchor_and_replay"]["objects"] == 1
    assert (found["from"], found["to"]) == (0, 9)


def test_plan_from_nothing(shared: World) -> None:
    route = facts("plan", shared.url, "--from", "nothing", "--to", 8)["route"]
    assert [(edge["kind"], edge["base"], edge["result"]) for edge in route] == [("anchor", None, 0), ("squash", 0, 8)]
    assert facts("plan", shared.url, "--from", 9, "--to", 8)["route"] == route, "nothing leads back"


def test_plan_from_a_folder(shared: World, tmp_path: Path) -> None:
    assert facts("plan", shared.url, "--from", shared.checkpoints[5])["from"] == 5
    run("pull", shared.url, tmp_path / "mirror", "--version", 3)
    before = tree(tmp_path)
    assert facts("plan", shared.url, "--from", tmp_path / "mirror")["from"] == 3
    assert tree(tmp_path) == before
    done = run("plan", shared.url, "--from", shared.checkpoints[VERSIONS])
    assert done.code == USAGE
    assert "no version of this channel" in done.complaint


def test_plan_for_people(shared: World) -> None:
    lines = [line.split() for line in text("plan", shared.url, "--from", 0).splitlines()]
    assert lines[0] == ["kind", "from", "to", "size"]
    assert [line[:4] for line in lines[1:3]] == [["squash", "0", "→", "8"], ["delta", "8", "→", "9"]]
    assert [line[:2] for line in lines[4:]] == [["this", "route"], ["every", "delta"], ["newest", "anchor,"]]
    assert text("plan", shared.url, "--from", 9) == "nothing to fetch: version 9 is there already\n"
