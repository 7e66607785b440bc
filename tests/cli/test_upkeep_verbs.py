"""`squash`, `gc`, `pin`, `reset` and `status`."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from cli_world import CHANNEL, STORE, USAGE, VERSIONS, Folder, Web, World, facts, flip, holds, objects, run, text, tree
from commands import COMMAND

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import Position
from weightcast.channel.records import Heartbeat
from weightcast.cli.console import SHORT
from weightcast.store import open_store


def test_squash_cuts_what_is_due_once(world: World, tmp_path: Path) -> None:
    for path in objects(world.url, "squashes"):
        path.unlink()
    kept = tmp_path / "kept" / "deep"
    found = facts("squash", world.url, "--folder", kept)
    assert [(edge["base"], edge["result"]) for edge in found["squashes"]] == [(0, 8)]
    assert found["anchor"] is None
    assert kept.is_dir()
    assert facts("squash", world.url, "--folder", kept)["squashes"] == []
    assert text("squash", world.url) == "no squash is due\n"


def test_squash_cuts_an_anchor_at_the_head(world: World, tmp_path: Path) -> None:
    run("publish", world.url, world.checkpoints[VERSIONS])
    assert facts("squash", world.url, "--anchor")["anchor"] == VERSIONS
    assert facts("status", world.url)["anchors"] == [0, 9, 10]
    assert facts("plan", world.url, "--from", "nothing")["route"][0]["result"] == VERSIONS
    before = tree(world.url)
    assert "⚓ version 10" in text("squash", world.url, "--anchor")
    assert tree(world.url) == before


def test_gc_keeps_pins_and_deletes_the_rest_in_two_runs(world: World, tmp_path: Path) -> None:
    now = ("--window", "0s", "--grace", "0s", "--patience", "0s")
    before = tree(world.url)
    planned = facts("gc", world.url, *now, "--dry-run")
    assert tree(world.url) == before
    assert planned["versions"] == [5, 6, 7, 8]
    assert facts("gc", world.url)["versions"] == [], "by default a week is kept"
    first, second = facts("gc", world.url, *now), facts("gc", world.url, *now)
    assert (first["versions"], first["objects"]) == ([5, 6, 7, 8], [])
    assert set(second["objects"]) == set(first["doomed"])
    assert second["bytes"] == sum(len(before[key] or b"") for key in second["objects"])
    assert [row["version"] for row in facts("log", world.url)["versions"]] == [9, 4, 3, 2, 1, 0]
    for version in (4, 9):
        assert facts("pull", world.url, tmp_path / "replica", "--version", version)["version"] == version
        assert holds(tmp_path / "replica", world.states[version])
    assert "0 versions deleted" in text("gc", world.url, *now)


def test_pin_and_unpin(world: World) -> None:
    assert facts("pin", world.url, 6) == {"version": 6, "pinned": True, "changed": True}
    assert facts("pin", world.url, 6)["changed"] is False
    assert facts("status", world.url)["pins"] == [4, 6]
    assert facts("unpin", world.url, 6) == {"version": 6, "pinned": False, "changed": True}
    assert facts("unpin", world.url, 6)["changed"] is False
    assert facts("status", world.url)["pins"] == [4]


def test_reset_needs_a_yes(world: World) -> None:
    before = tree(world.url)
    done = run("reset", world.url)
    assert done.code == USAGE
    assert "--yes" in done.complaint
    assert tree(world.url) == before
    assert facts("reset", world.url, "--yes")["deleted"] > 20
    assert run("status", world.url).code == CHANNEL
    assert facts("init", world.url, world.checkpoints[3])["version"] == 0


def test_reset_of_a_channel_with_a_damaged_head_asks_too(world: World) -> None:
    (world.url / "manifests" / f"{9:012d}.json").write_text("{")
    assert "--yes" in run("reset", world.url).complaint
    assert facts("reset", world.url, "--yes")["deleted"] > 20


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_reset_asks_on_a_terminal(world: World, answer: str, code: int) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, "reset", world.url], stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        said = b""
        while b"[y/N]" not in said:
            said += os.read(ours, 1000)
        os.write(ours, f"{answer}\n".encode())
        assert child.wait(60) == code
    os.close(ours)
    assert "up to 9" in re.sub(r"\s+", " ", said.decode())
    assert (world.url / "channel.json").exists() == (answer == "n")


def test_status(world: World) -> None:
    chain = Chain.open(open_store(world.url))
    put_heartbeat(chain, Heartbeat("rack-1", Position(9, "0" * 64), time.time()))
    put_heartbeat(chain, Heartbeat("rack-2", Position(3, "0" * 64), time.time(), "the disk is full"))
    found = facts("status", world.url)
    assert (found["head"]["version"], found["head"]["step"]) == (9, 90)
    assert found["head"]["age"] >= 0
    assert found["writer"]["name"] == facts("log", world.url)["versions"][0]["writer"]
    assert (found["anchors"], found["pins"]) == ([0, 9], [4])
    for kind in ("anchors", "deltas", "squashes", "manifests"):
        files = [path for path in (world.url / kind).rglob("*") if path.is_file()]
        assert found["stored"][kind] == {"objects": len(files), "bytes": sum(path.stat().st_size for path in files)}
    assert [(row["name"], row["version"], row["lag"], row["error"]) for row in found["replicas"]] == [
        ("rack-1", 9, 0, None),
        ("rack-2", 3, 6, "the disk is full"),
    ]
    lines = text("status", world.url).splitlines()
    assert any(re.match(r" +head  version 9, step 90, .* ago", line) for line in lines)
    assert re.match(r"rack-2 +3 +6 .* ago +the disk is full", lines[-1])


def test_status_and_log_over_http(shared: World) -> None:
    with Web(partial(Folder, directory=str(shared.url))) as web:
        assert facts("status", web.address)["head"]["version"] == 9
        assert len(facts("log", web.address)["versions"]) == VERSIONS
        assert facts("show", web.address, 5)["tensors"] == facts("show", shared.url, 5)["tensors"]
        done = run("pin", web.address, 5)
        assert done.code == STORE
        assert "nothing can be written over http" in done.complaint


# -- retention ---------------------------------------------------------------------------------------------------------

NOW = ("--window", "0s", "--grace", "0s", "--patience", "0s")


def test_dry_run_counts_objects_and_bytes_and_says_why_versions_stay(world: World) -> None:
    before = tree(world.url)
    planned = facts("gc", world.url, *NOW, "--dry-run")
    assert planned["doomed_bytes"] == sum(len(before[key] or b"") for key in planned["doomed"]) > 0
    assert planned["kept"]["9"] == ["newest version"]
    assert planned["kept"]["4"] == ["pinned", "tag best"]
    assert planned["kept"]["2"] == ["on the route to version 4"]
    lines = text("gc", world.url, *NOW, "--dry-run").splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["kept", "9", "4", "0–3"]
    assert any(re.fullmatch(r"4 versions would be deleted: 5–8", line) for line in lines)
    assert re.fullmatch(r"\d+ objects to delete in a run 0s from now, [\d.]+ k?B", lines[-1])
    assert tree(world.url) == before


def test_keep_rules_keep_what_they_say(world: World, tmp_path: Path) -> None:
    assert facts("gc", world.url, *NOW, "--keep-last", 2, "--dry-run")["versions"] == [5, 6, 7]
    day = 86400
    for version in range(VERSIONS):
        at = time.time() - (VERSIONS - version) * day
        os.utime(world.url / "manifests" / f"{version:012d}.json", (at, at))
    kept = facts("gc", world.url, *NOW, "--keep-daily", 4)["kept"]
    assert {version for version, why in kept.items() if any(one.startswith("daily") for one in why)} == set("6789")
    assert facts("pull", world.url, tmp_path / "replica", "--version", 6)["version"] == 6
    assert holds(tmp_path / "replica", world.states[6])


def test_anchor_of_an_older_version_is_reported_and_exits_13(world: World, tmp_path: Path) -> None:
    run("publish", world.url, world.checkpoints[VERSIONS])
    flip(objects(world.url, "deltas")[-1])
    done = run("squash", world.url, "--anchor", "--folder", tmp_path / "scratch")
    assert done.code == SHORT
    assert "not the newest" in done.err
    told = run("squash", world.url, "--anchor", "--folder", tmp_path / "scratch", "--json")
    assert told.code == SHORT
    assert json.loads(told.out)["anchor"] == VERSIONS - 1
    assert json.loads(told.out)["short"]["kind"]


def test_reset_names_the_replicas_it_leaves(world: World) -> None:
    put_heartbeat(Chain.open(open_store(world.url)), Heartbeat("rack-1", Position(9, "0" * 64), time.time()))
    done = run("reset", world.url, "--yes")
    assert done.code == 0
    assert "1 replica reported and may hold its weights: rack-1" in done.out


def test_forget_and_repair_in_both_forms(world: World) -> None:
    chain = Chain.open(open_store(world.url))
    for name in ("rack-1", "rack-2"):
        put_heartbeat(chain, Heartbeat(name, Position(9, "0" * 64), time.time()))
    assert text("forget", world.url, "rack-1") == "replica rack-1 forgotten\n"
    assert facts("forget", world.url, "rack-2") == {"forgotten": "rack-2"}
    assert text("repair", world.url).startswith("nothing to repair")
    assert facts("repair", world.url)["restored_from"] is None
