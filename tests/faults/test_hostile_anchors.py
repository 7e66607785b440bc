"""Anchors that are hostile, damaged or half uploaded: planned around, repaired, resumed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import same_bits, write_file, write_folder
from damages import flipped, keys_of, mirrored
from faults import INJECTED, FaultyStore
from liars import tree
from scripted_store import Request, ScriptedStore
from worlds import World, follow, model_of, opened

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import (
    ANCHORS,
    RECORD,
)
from weightcast.channel.policy import Pinned
from weightcast.disk.checkpoint import save
from weightcast.errors import WeightcastError
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.open import init
from weightcast.upkeep.verify import verify_deep


def holds_a_version_or_says_why(world: World, versions: list[int]) -> bool:
    """From nothing and from a mirror: the right bits of one of these versions, or an error and no change."""
    got = 0
    for reader in (lambda: world.pull(), lambda: follow(world)):
        with suppress(WeightcastError):
            got += reader() in versions
    with opened(world) as mirror:
        assert mirror.version in (1, *versions)
        assert same_bits(mirror.weights, world.states[mirror.version])  # type: ignore[arg-type,index]
    assert world.check_files() is not None
    return got == 2


def hostile_record(world: World, files: list[list[Any]], **fields: Any) -> str:
    """An anchor of the head, cheaper than any other way, whose record says this."""
    head = world.chain.manifest(4)
    folder = f"{ANCHORS}{4:012d}-{head.position.digest[:16]}-{'ab' * 8}/"
    for name in ("a", "b"):
        world.store.put(folder + name, b"x")
    record = {
        "channel": world.chain.channel.id,
        "files": [[folder + name, size, sha256] for name, size, sha256 in files],
        "format": 1,
        "kind": "anchor",
        "position": [4, head.position.digest],
        "reference": None,
    } | fields
    world.store.put(folder + RECORD, json.dumps(record).encode())
    return folder


ZERO = "0" * 64


HOSTILE: dict[str, list[list[Any]]] = {
    "a way out": [["../../../../x", 1, ZERO]],
    "our own folder": [[".weightcast", 1, ZERO]],
    "a hidden file": [[".weightcast-redo", 1, ZERO]],
    "a backslash": [["..\\x", 1, ZERO]],
    "a folder": [["sub/x", 1, ZERO]],
    "no name": [["", 1, ZERO]],
    "a line break": [["a\nb", 1, ZERO]],
    "a name too long": [["n" * 300, 1, ZERO]],
    "the same twice": [["a", 1, ZERO], ["a", 1, ZERO]],
    "a negative size": [["a", -1, ZERO]],
    "a size beyond all disks": [["a", 1 << 62, ZERO]],
    "sizes that add up": [[f"f{i}", 1 << 60, ZERO] for i in range(64)],
    "no digest": [["a", 1, "xyz"]],
    "nothing": [],
    "another's bytes": [["a", 1, ZERO]],
    "its own record": [[RECORD, 1, ZERO]],
    "no list": [["a", 1]],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_anchor_is_planned_around(world: World, what: str) -> None:
    mirrored(world)
    files = [file if len(file) == 3 else [*file, 1, ZERO][:3] for file in HOSTILE[what]]
    hostile_record(world, files)
    INJECTED["lies"] += 1
    before = {name for name in tree(world.root) if not name.startswith("mirror")}
    assert holds_a_version_or_says_why(world, [4])
    assert {name for name in tree(world.root) if not name.startswith("mirror")} == before
    assert sorted(path.name for path in world.root.iterdir()) == sorted(
        path.name for path in world.root.iterdir() if path.name in ("tmp", "mirror", "checkpoint-0")
    )


def test_anchor_whose_index_points_elsewhere_is_planned_around(world: World) -> None:
    mirrored(world)
    folder = world.checkpoint(4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["a"] = "../checkpoint-0/model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_anchor_of_other_weights_than_its_name_is_planned_around(world: World) -> None:
    """Every SHA-256 is right; only the digests of the tensors show it."""
    mirrored(world)
    files = {path.name: path for path in world.checkpoint(5).iterdir()}
    world.chain.put_anchor(world.chain.manifest(4).position, files)
    assert holds_a_version_or_says_why(world, [4])
    with Subscriber(world.store, world.root / "fresh", Pinned(4), threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    world.check_mirror([4], world.root / "fresh")


@pytest.mark.parametrize("result", [4, 3])
def test_squash_to_other_weights_than_its_name_is_planned_around(world: World, result: int) -> None:
    """Whether it is the last of a route or one in the middle."""
    mirrored(world)
    patch = world.root / "squash"
    patch.write_bytes(wc.encode(wc.diff(world.states[1], world.states[5]), "banded", world.states[1]))
    world.chain.put_squash(1, world.chain.manifest(result).position, patch)
    patch.unlink()
    assert holds_a_version_or_says_why(world, [4])


def test_anchor_with_a_decoy_file_is_planned_around(world: World) -> None:
    """A file missing from the index has the right bits of a tensor; the one in the index has others."""
    mirrored(world)
    right, wrong = world.states[4], world.states[5]
    mixed = model_of({s.name: (wrong if s.name == "a" else right).read(s.name) for s in right.table})
    folder = world.root / "checkpoint-mixed"
    write_folder(folder, mixed)
    write_file(folder / "decoy.safetensors", right, ["a"])
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_anchor_whose_index_names_no_safetensors_files_is_planned_around(world: World) -> None:
    mirrored(world)
    folder = world.checkpoint(4)
    index = (folder / "model.safetensors.index.json").read_text()
    for path in list(folder.glob("*.safetensors")):
        path.rename(path.with_suffix(".txt"))
    (folder / "model.safetensors.index.json").write_text(index.replace(".safetensors", ".txt"))
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_anchor_of_another_model_is_planned_around(world: World) -> None:
    mirrored(world)
    other = wc.Arrays({"other": world.states[0].read("a").reshape(30, 10)}, {"other": "BF16"})
    folder = world.root / "other"
    folder.mkdir()
    save(other, folder)
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_damaged_anchor_is_repaired_by_uploading_it_again(world: World) -> None:
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    files = [key for key in keys_of(world, f"{ANCHORS}000000000004") if key.endswith(".safetensors")]
    world.store.put(files[0], flipped(world.store.get(files[0])))
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep") if finding]
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep2") if finding] == []


def test_interrupted_upload_of_an_anchor_is_resumed(world: World) -> None:
    follow(world)
    calls = FaultyStore(world.store, "refuse")
    with opened(world) as mirror:
        chain = Chain.open(calls)
        calls.at = len(calls.calls) + 5
        with pytest.raises(WeightcastError):
            cut_anchor(chain, mirror)
        before = keys_of(world, f"{ANCHORS}000000000004")
        assert before
        again = FaultyStore(world.store)
        cut_anchor(Chain.open(again), mirror)
    assert not set(again.asked("put")) & set(before)
    world.check_readers([4])


def test_checkpoint_with_a_file_of_a_reserved_name_is_refused(world: World, ram: Path) -> None:
    folder = world.checkpoint(0)
    (folder / RECORD).write_text("{}")
    with pytest.raises(wc.errors.UsageError, match=r"cannot hold a file called anchor\.json"):
        init(ScriptedStore(), folder)


def test_checkpoint_that_changes_during_the_upload_does_not_become_an_anchor(world: World) -> None:
    follow(world)

    def change_a_file(_: Request) -> None:
        path = world.mirror / "model-00001-of-00002.safetensors"
        path.write_bytes(flipped(path.read_bytes()))

    store = ScriptedStore(world.store)
    store.after("put", ANCHORS, change_a_file)
    with opened(world) as mirror, pytest.raises(WeightcastError, match="changed while it was being read"):
        cut_anchor(Chain.open(store), mirror)
    assert [edge.result for edge in world.chain.anchor_edges()] == [0]
