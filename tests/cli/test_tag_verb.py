"""`tag`, and tags wherever a version is asked for; labels beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_world import CONFLICT, FOUND, USAGE, VERSIONS, World, facts, holds, refused, run, text, tree

HOSTILE = ["7", "_x", "a/b", "../../x", "a b", "\x1b[2J", "a\nb", "head", "nothing", "a..b", "x" * 101, "\u202ea"]


def test_tag_is_set_listed_moved_and_deleted(world: World) -> None:
    url = world.url
    assert text("tag", url, 6, "release") == "release is version 6\n"
    assert text("tag", url, 6, "release") == "release is version 6 already\n"
    listed = facts("tag", url)["tags"]
    assert [(row["tag"], row["version"]) for row in listed] == [("best", 4), ("release", 6)]
    assert "release" in text("tag", url)
    assert "--force" in refused(url, CONFLICT, "tag", url, 7, "release")
    moved = facts("tag", url, 7, "release", "--force")
    assert (moved["version"], moved["was"], moved["changed"]) == (7, 6, True)
    assert facts("tag", url, "--delete", "release") == {"tag": "release", "deleted": True}
    assert [row["tag"] for row in facts("tag", url)["tags"]] == ["best"]
    assert "there is no tag" in refused(url, USAGE, "tag", url, "--delete", "release")


def test_setting_a_tag_again_repairs_the_index(world: World) -> None:
    """An earlier run may have set the tag and failed to write the index."""
    index = world.url / "index.json"
    before = index.read_bytes()
    run("tag", world.url, 6, "release")
    index.write_bytes(before)
    assert facts("tag", world.url, 6, "release")["changed"] is False
    assert b"tags/release.json" in index.read_bytes()


def test_deleting_a_tag_again_repairs_the_index(world: World) -> None:
    index = world.url / "index.json"
    run("tag", world.url, 6, "release")
    before = index.read_bytes()
    run("tag", world.url, "--delete", "release")
    index.write_bytes(before)
    done = run("tag", world.url, "--delete", "release")
    assert (done.code, "there is no tag" in done.err) == (USAGE, True)
    assert b"tags/release.json" not in index.read_bytes()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tag_is_refused_and_printed_safely(world: World, name: str) -> None:
    line = refused(world.url, USAGE, "tag", world.url, 6, name)
    assert "cannot be a tag" in line
    assert "\x1b" not in line
    if name not in ("7", "head"):
        assert "there is no" in refused(world.url, USAGE, "show", world.url, name)


def test_thousands_of_digits_are_no_version(world: World) -> None:
    for verb in ("show", "log"):
        assert "there is no version or tag" in refused(world.url, USAGE, verb, world.url, "0" * 5000)


def test_half_a_tag_is_refused(world: World) -> None:
    assert "both a version and a name" in refused(world.url, USAGE, "tag", world.url, 6)
    assert "nothing else" in refused(world.url, USAGE, "tag", world.url, 6, "a", "--delete", "b")
    assert "there is no version 77" in refused(world.url, USAGE, "tag", world.url, 77, "late")


def test_every_verb_that_takes_a_version_takes_a_tag(world: World, tmp_path: Path) -> None:
    url, folder = world.url, tmp_path / "replica"
    assert facts("show", url, "best")["version"] == 4
    assert facts("show", url, "head")["version"] == VERSIONS - 1
    assert facts("pull", url, folder, "--version", "best")["version"] == 4
    assert holds(folder, world.states[4])
    assert facts("plan", url, "--from", "best")["from"] == 4
    assert facts("plan", url, "--from", "nothing", "--to", "best")["to"] == 4
    assert facts("unpin", url, "best") == {"version": 4, "pinned": False, "changed": True}
    assert facts("pin", url, "best") == {"version": 4, "pinned": True, "changed": True}
    assert facts("tag", url, "best", "good")["version"] == 4
    assert [row["version"] for row in facts("log", url, "best..6")["versions"]] == [6, 5, 4]


def test_folder_with_the_name_of_a_tag_is_ambiguous(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "best").symlink_to(world.checkpoints[6])
    monkeypatch.chdir(tmp_path)
    assert "./best" in refused(world.url, USAGE, "plan", world.url, "--from", "best")
    assert facts("plan", world.url, "--from", "./best")["from"] == 6


def test_tag_that_names_nothing_is_found(world: World) -> None:
    assert run("verify", world.url).code == 0
    (world.url / "tags" / "odd.json").write_text("{")
    assert run("tag", world.url, 7, "seven").code == 0
    (world.url / "manifests" / f"{7:012d}.json").unlink()
    done = run("verify", world.url)
    assert done.code == FOUND
    assert "tags/odd.json" in done.out
    assert "tags/seven.json  it names version 7, which is not there" in done.out
    assert "which is no longer there" in refused(world.url, USAGE, "show", world.url, "seven")


def test_tag_of_other_weights_is_not_shown(world: World) -> None:
    record = json.loads((world.url / "tags" / "best.json").read_text())
    record |= {"name": "odd", "position": [5, "0" * 64]}
    (world.url / "tags" / "odd.json").write_text(json.dumps(record, sort_keys=True, separators=(",", ":")))
    assert not any("odd" in row["tags"] for row in facts("log", world.url)["versions"])
    assert facts("show", world.url, 5)["tags"] == []
    assert facts("status", world.url)["tags"] == {"best": 4}
    listed = facts("tag", world.url)
    assert ([row["tag"] for row in listed["tags"]], [*listed["damaged"]]) == (["best"], ["tags/odd.json"])
    assert "which now has other weights" in refused(world.url, USAGE, "log", world.url, "odd..")


def test_gc_keeps_tagged_versions_and_deletes_nothing_while_a_tag_cannot_be_read(world: World) -> None:
    now = ("--window", "0s", "--grace", "0s", "--patience", "0s")
    run("tag", world.url, 6, "release")
    assert facts("gc", world.url, *now, "--dry-run")["versions"] == [7, 8]
    (world.url / "tags" / "odd.json").write_text("{")
    before = tree(world.url / "manifests")
    held = facts("gc", world.url, *now)
    assert (held["versions"], held["doomed"]) == ([], [])
    assert any("tags/odd.json" in line for line in held["damage"])
    assert tree(world.url / "manifests") == before


def test_reset_deletes_tags(world: World) -> None:
    run("reset", world.url, "--yes")
    run("init", world.url, world.checkpoints[0])
    assert facts("tag", world.url) == {"tags": [], "damaged": {}}
    assert text("tag", world.url) == "no tags\n"


# -- labels ------------------------------------------------------------------------------------------------------------


def test_label_is_shown_by_log_show_and_status(world: World) -> None:
    label = "lr 3e-5, [bold]warm[/bold]"
    published = facts("publish", world.url, world.checkpoints[VERSIONS], "-m", label)
    assert published["label"] == label
    assert facts("log", world.url)["versions"][0]["label"] == label
    assert facts("show", world.url, "head")["label"] == label
    assert facts("status", world.url)["head"]["label"] == label
    for verb in (("log", world.url), ("show", world.url, "head"), ("status", world.url)):
        assert label in text(*verb)


@pytest.mark.parametrize("label", ["", " ", "a\nb", "\x1b[2J", "\u202e", "x" * 201, "x "])
def test_hostile_label_is_refused_before_anything_is_uploaded(world: World, label: str) -> None:
    line = refused(world.url, USAGE, "publish", world.url, world.checkpoints[VERSIONS], "-m", label)
    assert "cannot be a label" in line
    assert "\x1b" not in line
