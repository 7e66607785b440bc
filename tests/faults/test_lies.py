"""Objects that are damaged, exchanged or false: a reader takes a detour or reports, and never holds wrong bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import same_bits
from damages import DAMAGES, keys_of, mirrored
from faults import INJECTED
from liars import tree
from worlds import World, follow, opened

from weightcast.channel.keys import (
    ANCHORS,
    CHANNEL,
    DELTAS,
    HEAD,
    INDEX,
    MANIFESTS,
    SQUASHES,
    WRITER,
    Position,
    manifest_key,
)
from weightcast.channel.policy import Pinned
from weightcast.channel.records import ObjectRef, dump_record
from weightcast.errors import ChannelError, FormatError, SpaceError, WeightcastError
from weightcast.upkeep.verify import verify, verify_deep


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
def test_any_single_damaged_object_is_planned_around(rich: World, kind: str, damage: str) -> None:
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
def test_damaged_objects_never_lead_to_wrong_bits(world: World, kind: str, damage: str) -> None:
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


def test_verify_finds_every_damage(rich: World) -> None:
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


def lie(world: World, version: int, **fields: Any) -> None:
    world.store.put(manifest_key(version), dump_record(replace(world.chain.manifest(version), **fields)))


def _reference(world: World, version: int, **fields: Any) -> ObjectRef:
    return replace(world.chain.manifest(version).objects[0], **fields)


def _digest(world: World, version: int) -> Position:
    """Another digest with the same first digits, as the object's name demands."""
    position = world.chain.manifest(version).position
    return Position(version, position.digest[:16] + "0" * 48)


LIES: dict[str, Callable[[World, int], None]] = {
    "digest": lambda world, v: lie(world, v, position=_digest(world, v)),
    "size": lambda world, v: lie(world, v, objects=(_reference(world, v, size=10),)),
    "a huge size": lambda world, v: lie(world, v, objects=(_reference(world, v, size=1 << 62),)),
    "sha256": lambda world, v: lie(world, v, objects=(_reference(world, v, sha256="0" * 64),)),
    "base": lambda world, v: lie(world, v, base=Position(v - 1, "ab" * 32)),
    "no base": lambda world, v: lie(world, v, base=None, codec=None),
    "channel": lambda world, v: lie(world, v, channel="f" * 32),
    "version": lambda world, v: world.store.put(manifest_key(v), world.store.get(manifest_key(v - 1))),
    "another version's object": lambda world, v: lie(world, v, objects=world.chain.manifest(v - 1).objects),
    "codec": lambda world, v: lie(world, v, codec="gap"),
}


@pytest.mark.parametrize("what", LIES)
def test_false_manifest_never_leads_to_wrong_bits(world: World, what: str) -> None:
    mirrored(world)
    for version in (2, 3, 4):
        spoilt = world.clone(world.root.parent / "spoilt")
        LIES[what](spoilt, version)
        INJECTED["lies"] += 1
        holds_a_version_or_says_why(spoilt, [2, 3, 4])
        shutil.rmtree(spoilt.root)


@pytest.mark.parametrize("what", ["size", "a huge size", "sha256", "base"])
def test_manifest_with_a_false_delta_is_planned_around(rich: World, what: str) -> None:
    for version in (3, 4):
        world = rich.clone(rich.root.parent / "spoilt")
        LIES[what](world, version)
        INJECTED["lies"] += 1
        assert holds_a_version_or_says_why(world, [4])
        shutil.rmtree(world.root)


def test_false_huge_size_is_planned_around(rich: World) -> None:
    """It needs no listing for the next version, and so takes the size from the manifest."""
    follow(rich, policy=Pinned(3))
    LIES["a huge size"](rich, 4)
    assert follow(rich) == 4
    rich.check_mirror([4])


def test_errors_name_their_remedy(world: World) -> None:
    for listed in list(world.store.list(ANCHORS)):
        world.store.delete(listed.key)
    with pytest.raises(ChannelError, match="publish --anchor` repairs it"):
        world.pull()
    LIES["channel"](world, 4)
    with pytest.raises(ChannelError, match="it was reset"):
        world.pull()
    world.store.put(manifest_key(4), b"{")
    with pytest.raises(FormatError):
        world.pull()


def test_full_disk_is_not_reported_as_damage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(real(path))(1, 1, 100))
    with pytest.raises(SpaceError):
        world.pull()
