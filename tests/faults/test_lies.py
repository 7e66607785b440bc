"""Objects that are missing, cut, damaged or swapped; records and hints that lie; clocks and listings that lag."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import same_bits, write_file, write_folder
from faults import INJECTED, FaultyStore
from liars import tree
from scripted_store import Request, ScriptedStore
from worlds import DAY, World, follow, model_of, nothing_like, opened

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import (
    ANCHORS,
    CHANNEL,
    DELTAS,
    HEAD,
    INDEX,
    MANIFESTS,
    PINS,
    RECORD,
    REPLICAS,
    SQUASHES,
    WRITER,
    Position,
    manifest_key,
)
from weightcast.channel.pins import pin
from weightcast.channel.policy import Pinned
from weightcast.channel.records import ObjectRef, head_to_json, manifest_to_json
from weightcast.channel.retention import Retention
from weightcast.disk.checkpoint import save
from weightcast.errors import ChannelError, FormatError, SpaceError, WeightcastError
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.upkeep.collect import collect
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify, verify_deep


@pytest.fixture
def world(ram: Path) -> World:
    return World.make(ram / "world").begin(4)


def mirrored(world: World) -> World:
    """A mirror at version 1, to be brought forward."""
    follow(world, policy=Pinned(1))
    return world


@pytest.fixture
def rich(world: World) -> World:
    """Every version can be reached in two ways: two anchors, a squash beside every pair of deltas."""
    mirrored(world)
    follow(world, folder=world.root / "other", policy=Pinned(2))
    with opened(world, world.root / "other") as mirror:
        cut_anchor(world.chain, mirror)
    list(squash(world.chain, world.root / "scratch", levels=(2,)))
    return world


Damage = Callable[[ScriptedStore, str, str], None]


def _swap(store: ScriptedStore, key: str, other: str) -> None:
    one, two = store.get(key), store.get(other)
    store.put(key, two)
    store.put(other, one)


DAMAGES: dict[str, Damage] = {
    "missing": lambda store, key, other: store.delete(key),
    "empty": lambda store, key, other: store.put(key, b""),
    "cut": lambda store, key, other: store.put(key, store.get(key)[: len(store.get(key)) // 2]),
    "one byte short": lambda store, key, other: store.put(key, store.get(key)[:-1]),
    "one byte long": lambda store, key, other: store.put(key, store.get(key) + b"\0"),
    "a bit flipped": lambda store, key, other: store.put(key, _flipped(store.get(key))),
    "another's bytes": lambda store, key, other: store.put(key, store.get(other)),
    "swapped": _swap,
}


def _flipped(data: bytes) -> bytes:
    middle = len(data) * 2 // 3
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def keys_of(world: World, prefix: str) -> list[str]:
    return sorted(key for key in world.objects() if key.startswith(prefix))


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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", [DELTAS, SQUASHES, ANCHORS])
def test_any_one_object_may_be_bad_if_there_is_another_way(rich: World, kind: str, damage: str) -> None:
    keys = keys_of(rich, kind)
    for key in keys:
        world = rich.clone(rich.root.parent / "spoilt")
        alike = [other for other in keys if other != key and Path(other).suffix == Path(key).suffix]
        DAMAGES[damage](world.store, key, alike[0])
        INJECTED["lies"] += 1
        goals = [4]
        # Swapping takes two objects: both ways may be gone.
        assert holds_a_version_or_says_why(world, goals) or damage == "swapped", key
        shutil.rmtree(world.root)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", [DELTAS, ANCHORS, MANIFESTS, CHANNEL, HEAD, INDEX, WRITER])
def test_any_object_may_be_bad_and_nobody_holds_wrong_bits(world: World, kind: str, damage: str) -> None:
    mirrored(world)
    for key in keys_of(world, kind):
        spoilt = world.clone(world.root.parent / "spoilt")
        other = next((other for other in keys_of(world, kind) if other != key), HEAD)
        DAMAGES[damage](spoilt.store, key, other)
        INJECTED["lies"] += 1
        before = tree(spoilt.mirror)
        got = True
        if kind == CHANNEL:
            with pytest.raises(WeightcastError):
                spoilt.pull()
            assert tree(spoilt.mirror) == before
        else:
            got = holds_a_version_or_says_why(spoilt, [2, 3, 4])
        if kind in (HEAD, INDEX, WRITER):
            assert got, "hints are never needed"
        shutil.rmtree(spoilt.root)


def test_damage_is_found_by_verify(rich: World) -> None:
    for kind in (DELTAS, SQUASHES, ANCHORS, MANIFESTS):
        for damage in ("missing", "one byte short", "a bit flipped"):
            key = keys_of(rich, kind)[-1]
            if (kind, damage) in {(SQUASHES, "missing")}:
                continue  # a squash is never promised
            world = rich.clone(rich.root.parent / "spoilt")
            DAMAGES[damage](world.store, key, key)
            shallow = list(verify(world.chain))
            if not shallow and (kind, damage) != (MANIFESTS, "missing"):
                assert [finding for _, finding in verify_deep(world.chain, world.root / "deep") if finding], key
            shutil.rmtree(world.root)


# -- manifests that lie ------------------------------------------------------------------------------------------------


def lie(world: World, version: int, **fields: Any) -> None:
    world.store.put(manifest_key(version), manifest_to_json(replace(world.chain.manifest(version), **fields)))


def _reference(world: World, version: int, **fields: Any) -> ObjectRef:
    return replace(world.chain.manifest(version).object, **fields)


def _digest(world: World, version: int) -> Position:
    """Another digest with the same first digits, as the object's name demands."""
    position = world.chain.manifest(version).position
    return Position(version, position.digest[:16] + "0" * 48)


LIES: dict[str, Callable[[World, int], None]] = {
    "digest": lambda world, v: lie(world, v, position=_digest(world, v)),
    "size": lambda world, v: lie(world, v, object=_reference(world, v, size=10)),
    "a huge size": lambda world, v: lie(world, v, object=_reference(world, v, size=1 << 62)),
    "sha256": lambda world, v: lie(world, v, object=_reference(world, v, sha256="0" * 64)),
    "base": lambda world, v: lie(world, v, base=Position(v - 1, "ab" * 32)),
    "no base": lambda world, v: lie(world, v, base=None, codec=None),
    "channel": lambda world, v: lie(world, v, channel="f" * 32),
    "version": lambda world, v: world.store.put(manifest_key(v), world.store.get(manifest_key(v - 1))),
    "another version's object": lambda world, v: lie(world, v, object=world.chain.manifest(v - 1).object),
    "codec": lambda world, v: lie(world, v, codec="gap"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_manifest_that_lies_misleads_nobody(world: World, what: str) -> None:
    mirrored(world)
    for version in (2, 3, 4):
        spoilt = world.clone(world.root.parent / "spoilt")
        LIES[what](spoilt, version)
        INJECTED["lies"] += 1
        holds_a_version_or_says_why(spoilt, [2, 3, 4])
        shutil.rmtree(spoilt.root)


@pytest.mark.parametrize("what", ["size", "a huge size", "sha256", "base"])
def test_a_manifest_that_lies_about_its_delta_is_passed_by(rich: World, what: str) -> None:
    for version in (3, 4):
        world = rich.clone(rich.root.parent / "spoilt")
        LIES[what](world, version)
        INJECTED["lies"] += 1
        assert holds_a_version_or_says_why(world, [4])
        shutil.rmtree(world.root)


def test_a_follower_one_step_behind_passes_by_a_huge_lie(rich: World) -> None:
    """It needs no listing for the next version, and so takes the size from the manifest."""
    follow(rich, policy=Pinned(3))
    LIES["a huge size"](rich, 4)
    assert follow(rich) == 4
    rich.check_mirror([4])


# -- anchors that are hostile ------------------------------------------------------------------------------------------


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
def test_an_anchor_that_is_hostile_is_passed_by(world: World, what: str) -> None:
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


def test_an_anchor_whose_index_points_elsewhere_is_passed_by(world: World) -> None:
    mirrored(world)
    folder = world.checkpoint(4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["a"] = "../checkpoint-0/model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_an_anchor_of_other_weights_than_its_name_says_is_passed_by(world: World) -> None:
    """Every SHA-256 is right; only the digests of the tensors tell."""
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
def test_a_squash_to_other_weights_than_its_name_says_is_passed_by(world: World, result: int) -> None:
    """Whether it is the last of a route or one in the middle."""
    mirrored(world)
    patch = world.root / "squash"
    patch.write_bytes(wc.encode(wc.diff(world.states[1], world.states[5]), "banded", world.states[1]))
    world.chain.put_squash(1, world.chain.manifest(result).position, patch)
    patch.unlink()
    assert holds_a_version_or_says_why(world, [4])


def test_an_anchor_with_a_decoy_is_passed_by(world: World) -> None:
    """A file that the index does not speak of has the right bits of a tensor, the one that it speaks of has others."""
    mirrored(world)
    right, wrong = world.states[4], world.states[5]
    mixed = model_of({s.name: (wrong if s.name == "a" else right).read(s.name) for s in right.table})
    folder = world.root / "checkpoint-mixed"
    write_folder(folder, mixed)
    write_file(folder / "decoy.safetensors", right, ["a"])
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_an_anchor_whose_index_speaks_of_no_safetensors_files_is_passed_by(world: World) -> None:
    mirrored(world)
    folder = world.checkpoint(4)
    index = (folder / "model.safetensors.index.json").read_text()
    for path in list(folder.glob("*.safetensors")):
        path.rename(path.with_suffix(".txt"))
    (folder / "model.safetensors.index.json").write_text(index.replace(".safetensors", ".txt"))
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_an_anchor_of_another_model_is_passed_by(world: World) -> None:
    mirrored(world)
    other = wc.Arrays({"other": world.states[0].read("a").reshape(30, 10)}, {"other": "BF16"})
    folder = world.root / "other"
    folder.mkdir()
    save(other, folder)
    world.chain.put_anchor(world.chain.manifest(4).position, {path.name: path for path in folder.iterdir()})
    assert holds_a_version_or_says_why(world, [4])


def test_a_damaged_anchor_is_mended_by_uploading_it_again(world: World) -> None:
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    files = [key for key in keys_of(world, f"{ANCHORS}000000000004") if key.endswith(".safetensors")]
    world.store.put(files[0], _flipped(world.store.get(files[0])))
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep") if finding]
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    assert [finding for _, finding in verify_deep(world.chain, world.root / "deep2") if finding] == []


def test_an_upload_of_an_anchor_goes_on_where_it_was_cut(world: World) -> None:
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


def test_a_checkpoint_that_has_a_file_of_our_name_is_refused(world: World, ram: Path) -> None:
    folder = world.checkpoint(0)
    (folder / RECORD).write_text("{}")
    with pytest.raises(wc.errors.UsageError, match=r"cannot hold a file called anchor\.json"):
        init(ScriptedStore(), folder)


def test_a_checkpoint_that_changes_while_it_is_uploaded_is_no_anchor(world: World) -> None:
    follow(world)

    def change_a_file(_: Request) -> None:
        path = world.mirror / "model-00001-of-00002.safetensors"
        path.write_bytes(_flipped(path.read_bytes()))

    store = ScriptedStore(world.store)
    store.after("put", ANCHORS, change_a_file)
    with opened(world) as mirror, pytest.raises(WeightcastError, match="changed while it was being read"):
        cut_anchor(Chain.open(store), mirror)
    assert [edge.result for edge in world.chain.anchor_edges()] == [0]


# -- hints, listings, clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hint",
    [b"", b"{", b"[]", b"null", head_to_json(Position(0, ZERO)), head_to_json(Position(2, ZERO)),
     head_to_json(Position(99, ZERO)), head_to_json(Position(10**12 - 1, ZERO)), b"x" * ((1 << 26) + 2)],
    ids=["empty", "cut", "a list", "null", "old", "older", "ahead", "far ahead", "huge"],
)  # fmt: skip
def test_whatever_the_head_hint_says_the_head_is_found(world: World, hint: bytes) -> None:
    world.store.put(HEAD, hint)
    INJECTED["lies"] += 1
    assert world.head() == 4
    assert world.pull() == 4
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        assert publisher.publish(weights=world.states[5]).result(30).position.version == 5
    world.check_readers([5])


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_stale_listings_and_a_stale_hint_hide_no_version(world: World, lacking: int) -> None:
    """Neither shows the last few: what follows is looked for."""
    store = FaultyStore(world.store, "stale", 10**6, lacking)
    for old in (None, 0, 2):
        store.old_head = None if old is None else head_to_json(Position(old, ZERO))
        head = Chain.open(store).head()
        assert head is not None
        assert head.position.version == 4
        assert world.pull(store=store) == 4
        INJECTED["lies"] += 1


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_collecting_by_stale_listings_loses_nothing(world: World, lacking: int) -> None:
    world.store.now += 1000 * DAY
    calls = FaultyStore(world.store, "stale", 10**6, lacking)
    with pytest.raises(WeightcastError):
        collect(Chain.open(calls), Retention())

    stale = ScriptedStore(world.store)
    stale.hide(HEAD)
    stale.answer("list", lambda prefix: prefix in (MANIFESTS, DELTAS, ANCHORS), lambda found: found[:-lacking])
    for _ in range(3):
        world.store.now += 1000.0
        collect(Chain.open(stale), Retention(100.0, 10.0, 100.0))
        world.check_readers([4])


@pytest.mark.parametrize("skew", [-3e8, 3e8])
def test_what_is_young_is_a_matter_of_the_stores_clock(
    world: World, skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is ten years off writes and collects: nothing young goes, and what is old does."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    with Publisher(world.store, wc.Arrays.copy_of(world.states[4]), threads=1) as publisher:
        publisher.publish(weights=world.states[5]).result(30)
    with Subscriber(world.store, nothing_like(world.states[0]), threads=1, replica="skewed") as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    before = world.objects()
    assert not any(collect(world.chain, Retention()).versions)
    assert world.objects() == before
    world.store.now += 100 * DAY
    assert collect(world.chain, Retention()).versions == (0, 1, 2, 3, 4)
    world.check_readers([5])


def test_notes_that_make_no_sense_stop_nobody(world: World) -> None:
    pin(world.chain, 2)
    for key in (f"{REPLICAS}junk.json", f"{PINS}junk.json", WRITER, INDEX, "doomed/junk.json", f"{DELTAS}junk",
                f"{ANCHORS}junk/x", f"{MANIFESTS}junk", "elsewhere/x"):  # fmt: skip
        world.store.put(key, b"\xff{")
    world.store.now += 1000 * DAY
    collect(world.chain, Retention())
    world.check_readers([4])
    world.pull(2)
    left = world.objects()
    assert {f"{DELTAS}junk", f"{ANCHORS}junk/x", f"{MANIFESTS}junk", "elsewhere/x"} <= left, "not ours to delete"


def test_a_replica_that_has_been_silent_for_ages_is_forgotten(world: World) -> None:
    with Subscriber(world.store, nothing_like(world.states[0]), threads=1, replica="pod-1") as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert keys_of(world, REPLICAS)
    world.store.now += 10 * DAY
    collect(world.chain, Retention())
    assert keys_of(world, REPLICAS)
    world.store.now += 30 * DAY
    collect(world.chain, Retention())
    assert keys_of(world, REPLICAS) == []


def test_what_is_damaged_is_not_made_worse_by_collecting(world: World) -> None:
    """A delta is lost, and an anchor leads to the versions behind it: it is neither the newest nor the oldest."""
    for version in (3, 4):
        follow(world, policy=Pinned(version))
        with opened(world) as mirror:
            cut_anchor(world.chain, mirror)
    world.store.delete(world.chain.manifest(2).object.key)
    for _ in range(3):
        world.store.now += 2.0
        collect(world.chain, Retention(window=1e9, grace=1.0))
    for version in (0, 1, 3, 4):
        world.pull(version)


@pytest.mark.parametrize("damage", ["missing", "empty", "one byte short"])
@pytest.mark.parametrize("kind", [f"{ANCHORS}000000000002", f"{DELTAS}000000000003", f"{DELTAS}000000000004"])
def test_what_is_damaged_is_not_relied_on_by_collecting(rich: World, kind: str, damage: str) -> None:
    """There is another way to the head than the one that would be cheapest were it whole; it must not go."""
    with Publisher(rich.store, wc.Arrays.copy_of(rich.states[4]), threads=1) as publisher:
        publisher.publish(weights=rich.states[5]).result(30)
    for key in keys_of(rich, kind):
        world = rich.clone(rich.root.parent / "spoilt")
        DAMAGES[damage](world.store, key, key)
        for _ in range(3):
            world.store.now += 1000.0
            collect(world.chain, Retention(100.0, 10.0, 100.0))
        assert world.pull() == 5, key
        shutil.rmtree(world.root)


def test_versions_that_began_anew_stay_reachable_within_the_window(world: World) -> None:
    """An anchor in the middle of the window, and a newer one behind it: the versions between need the first."""
    position = Position(5, wc.fingerprint(world.states[5]).digest)
    ref = world.chain.put_anchor(position, {path.name: path for path in world.checkpoint(5).iterdir()})
    world.chain.commit(world.chain.draft(position, None, ref, None, 0, None, "anew"))
    for version in (6, 7):
        with Publisher(world.store, wc.Arrays.copy_of(world.states[version]), threads=1) as publisher:
            assert publisher.publish().result(30).position.version == version
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    for _ in range(3):
        world.store.now += 2.0
        collect(world.chain, Retention(window=1e9, grace=1.0))
    for version in range(8):
        world.pull(version)


def test_a_trainer_that_restarts_from_an_older_checkpoint_goes_on_from_the_head(world: World) -> None:
    with Publisher(world.store, wc.Arrays.copy_of(world.states[2]), threads=1) as publisher:
        assert publisher.publish().result(30).position.version == 5
        publisher.publish(weights=world.states[6]).result(30)
    world.states[5] = world.states[2]
    world.check_readers([6])
    world.pull(5)


def test_manifests_collected_under_a_slow_readers_feet(world: World) -> None:
    """It has listed everything, and when it comes to fetch, all but the newest anchor is gone."""
    follow(world)
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)

    def collect_all(_: Request) -> None:
        for _ in range(3):
            world.store.now += 1000.0
            collect(world.chain, Retention(100.0, 10.0, 100.0))

    slow = ScriptedStore(world.store)
    slow.before("get", (ANCHORS, DELTAS), collect_all, times=1)
    with pytest.raises(WeightcastError):
        world.pull(1, slow)
    assert world.pull(store=slow) == 4
    behind = wc.Arrays.copy_of(world.states[2])
    with Subscriber(world.store, behind, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 4
    assert same_bits(behind, world.states[4])


def test_errors_of_these_kinds_say_what_to_do(world: World) -> None:
    for listed in list(world.store.list(ANCHORS)):
        world.store.delete(listed.key)
    with pytest.raises(ChannelError, match="mends it"):
        world.pull()
    LIES["channel"](world, 4)
    with pytest.raises(ChannelError, match="it was reset"):
        world.pull()
    world.store.put(manifest_key(4), b"{")
    with pytest.raises(FormatError):
        world.pull()


def test_a_lack_of_room_is_not_taken_for_a_lie(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(real(path))(1, 1, 100))
    with pytest.raises(SpaceError):
        world.pull()
