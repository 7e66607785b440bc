"""`verify`: a channel, or a folder, as people and programs see the findings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from cli_world import FOUND, VERSIONS, World, facts, flip, holds, objects, run, text, tree

import weightcast as wc


def test_verify_a_whole_channel(shared: World, tmp_path: Path) -> None:
    assert facts("verify", shared.url) == {"head": 9, "proven_objects": None, "findings": [], "notes": []}
    assert facts("verify", shared.url, "--deep", "--scratch", tmp_path)["proven_objects"] == 12
    assert list(tmp_path.iterdir()) == []
    assert text("verify", shared.url).startswith("intact up to version 9")


def test_verify_names_what_is_missing(world: World) -> None:
    gone = objects(world.url, "deltas")[2]
    gone.unlink()
    done = run("verify", world.url)
    assert done.code == FOUND
    assert gone.name in done.out
    told = run("verify", world.url, "--json")
    assert told.code == FOUND
    assert any(gone.name in finding["key"] for finding in json.loads(told.out)["findings"])


def test_verify_deep_reads_every_bit(world: World) -> None:
    damaged = objects(world.url, "deltas")[2]
    flip(damaged)
    assert run("verify", world.url).code == 0
    done = run("verify", world.url, "--deep")
    assert done.code == FOUND
    assert f"deltas/{damaged.name}" in done.out


def test_verify_a_folder(shared: World, tmp_path: Path) -> None:
    found = facts("verify", shared.checkpoints[6], shared.url)
    assert (found["version"], found["lag"], found["claimed"], found["differing"]) == (6, 3, None, [])
    assert "the digest that it has in version 6" in text("verify", shared.checkpoints[6], shared.url)
    strange = run("verify", shared.checkpoints[VERSIONS], shared.url)
    assert strange.code == FOUND
    assert "no version of this channel has these bits" in strange.out


def test_verify_reads_the_log_of_a_mirror_and_leaves_it(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    for version in (7, 9):
        with wc.Subscriber(shared.url, folder, wc.Pinned(version), fold=False) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
    assert not holds(folder, shared.states[9]), "what came last is in the log"
    before = tree(folder)
    found = facts("verify", folder, shared.url)
    assert (found["version"], found["claimed"], found["differing"]) == (9, 9, [])
    assert facts("plan", shared.url, "--from", folder)["from"] == 9
    assert tree(folder) == before


def test_verify_names_the_tensors_that_differ(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    run("pull", shared.url, folder)
    flip(folder / "model-00002-of-00002.safetensors")
    with wc.Checkpoint(folder) as files:
        (name,) = [
            spec.name
            for spec in files.table
            if not np.array_equal(files.read(spec.name), shared.states[9].read(spec.name))
        ]
    done = run("verify", folder, shared.url)
    assert done.code == FOUND
    assert "1 tensor differs from version 9" in done.out
    assert name in done.out
    told = json.loads(run("verify", folder, shared.url, "--json").out)
    assert (told["version"], told["claimed"], told["differing"]) == (None, 9, [name])
    assert facts("pull", shared.url, folder)["new"] is True, "and pull mends it"
    assert holds(folder, shared.states[9])
