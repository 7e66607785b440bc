"""Names and records of a channel: the bytes as SPEC 11 has them, and one test per lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.channel.keys import (
    DeltaObject,
    Position,
    SquashObject,
    anchor_folder,
    check_name,
    delta_key,
    is_plain_file,
    manifest_key,
    read_anchor_key,
    read_delta_key,
    read_manifest_key,
    read_pin_key,
    read_squash_key,
    squash_key,
)
from weightcast.channel.records import (
    Anchor,
    Channel,
    Heartbeat,
    Lease,
    Manifest,
    ObjectRef,
    Reference,
    channel_from_json,
    channel_to_json,
    dump_record,
    head_from_json,
    head_to_json,
    load_record,
)
from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.format.spec import TensorSpec, TensorTable

A, B = "a" * 64, "b" * 64
POSITION, BASE = Position(41, A), Position(40, B)
DELTA = ObjectRef(delta_key(POSITION, B), 1234, B)
FOLDER = anchor_folder(POSITION, B)
ID = "c0ffee" + 26 * "0"
MANIFEST = Manifest(ID, POSITION, BASE, (DELTA,), "banded", 77, 12, 1.5, "trainer")
ANCHORED = Manifest(ID, POSITION, None, (ObjectRef(f"{FOLDER}anchor.json", 9, B),), None, 5, None, 1.5, "trainer")
ANCHOR = Anchor(ID, POSITION, (ObjectRef(f"{FOLDER}model.safetensors", 10, A),))
CHANNEL = Channel(ID, TensorTable.of([TensorSpec("w", "BF16", (2, 3))], {"tied": "w"}))


def test_names_are_those_of_the_spec() -> None:
    assert manifest_key(41) == "manifests/000000000041.json"
    assert manifest_key(41, "me") == "manifests/000000000041-me.json"
    assert delta_key(POSITION, B) == f"deltas/000000000041-{'a' * 16}-{'b' * 16}.safetensors"
    assert squash_key(40, POSITION, B) == f"squashes/000000000040-000000000041-{'a' * 16}-{B}.safetensors"
    assert f"anchors/000000000041-{'a' * 16}-{'b' * 16}/" == FOLDER


def test_manifest_has_these_bytes() -> None:
    assert dump_record(MANIFEST).decode() == (
        '{"base":[40,"' + B + '"],"changed":77,"channel":"' + ID + '","codec":"banded","format":1,"kind":"manifest",'
        '"objects":[["'
        + DELTA.key
        + '",1234,"'
        + B
        + '"]],"position":[41,"'
        + A
        + '"],"step":12,"time":1.5,"writer":"trainer"}'
    )


def test_channel_has_these_bytes() -> None:
    assert channel_to_json(CHANNEL).decode() == (
        '{"aliases":{"tied":"w"},"fence":"create","format":1,"id":"' + CHANNEL.id + '","kind":"channel",'
        '"nonce":"' + ID + '","tensors":[["w","BF16",[2,3]]]}'
    )


@pytest.mark.parametrize("manifest", [MANIFEST, ANCHORED])
def test_manifests_round_trip(manifest: Manifest) -> None:
    assert load_record(Manifest, dump_record(manifest)) == manifest


def test_other_records_round_trip() -> None:
    assert channel_from_json(channel_to_json(CHANNEL)) == CHANNEL
    assert load_record(Anchor, dump_record(ANCHOR)) == ANCHOR
    elsewhere = Anchor(ID, POSITION, (), Reference("org/model", "main"))
    assert load_record(Anchor, dump_record(elsewhere)) == elsewhere
    assert head_from_json(head_to_json(POSITION)) == POSITION
    beat = Heartbeat("host", POSITION, 2.5, "the bucket is gone")
    assert load_record(Heartbeat, dump_record(beat)) == beat
    assert b"seconds" not in dump_record(beat)
    timed = Heartbeat("host", POSITION, 2.5, pause=0.005, seconds={"fetch": 0.25, "apply": 0.125})
    assert load_record(Heartbeat, dump_record(timed)) == timed
    assert b'"seconds":{"apply":0.125,"fetch":0.25}' in dump_record(timed)
    lease = Lease("trainer", "host", 1, 2.5)
    assert load_record(Lease, dump_record(lease)) == lease


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_keys_round_trip(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert read_manifest_key(manifest_key(one)) == (one, None)
    assert read_manifest_key(manifest_key(one, "a-b.c")) == (one, "a-b.c")
    for folder in (None, "0123456789abcdef"):
        key = delta_key(Position(one, A), B, folder)
        delta = key if folder is None else key.removesuffix(f"{B[:16]}.safetensors")
        assert read_delta_key(key) == DeltaObject(one, A[:16], delta)
    for signature in (None, (A[:16], "-_" * 43)):
        squash = read_squash_key(squash_key(low, Position(high, A), B, signature))
        assert squash == (SquashObject(low, high, A[:16], B, signature) if low < high else None)
    place = read_anchor_key(anchor_folder(Position(one, A), B) + "config.json")
    assert place is not None
    assert (place.version, place.digest, place.name) == (one, A[:16], "config.json")


@given(st.integers(0, 10**12 - 2))
def test_keys_sort_as_versions_do(version: int) -> None:
    assert manifest_key(version) < manifest_key(version + 1)
    assert manifest_key(version, "~") < manifest_key(version + 1)
    assert delta_key(Position(version, A), A) < delta_key(Position(version + 1, A), A)


def test_digits_of_other_scripts_are_not_versions() -> None:
    assert read_manifest_key("manifests/" + "٠" * 11 + "١.json") is None
    assert read_pin_key("pins/" + "０" * 12 + ".json") is None


@given(st.text())
def test_other_keys_are_not_edges(key: str) -> None:
    readers: list[Callable[[str], Any]] = [
        read_delta_key,
        read_squash_key,
        read_anchor_key,
        read_manifest_key,
        read_pin_key,
    ]
    assert all(reader(key) is None for reader in readers)


@pytest.mark.parametrize("name", ["../x", "a/b", ".weightcast", "..", ".", "", "a\\b", "a\0b", "a\nb", "x" * 256])
def test_file_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    assert not is_plain_file(name)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", ".a", "x" * 101, "ä"])
def test_name_that_could_not_be_part_of_a_key_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        check_name(name, "writer")


def lied(record: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(record) | changes).encode()


LIES: dict[str, dict[str, Any]] = {
    "another kind": {"kind": "anchor"},
    "no format": {"format": "1"},
    "a version below zero": {"position": [-1, A]},
    "a version that is no number": {"position": ["41", A]},
    "a version that is true": {"position": [True, A]},
    "a version out of range": {"position": [10**12, A]},
    "a digest that is too short": {"position": [41, "a"]},
    "a digest in capitals": {"position": [41, "A" * 64]},
    "a base that is not the version before": {"base": [39, B]},
    "a base of the future": {"base": [41, B]},
    "an object of another version": {"objects": [[delta_key(Position(42, A), B), 1, B]]},
    "an object of another digest": {"objects": [[delta_key(Position(41, B), B), 1, B]]},
    "an object outside the channel": {"objects": [["../../etc/passwd", 1, B]]},
    "an object of negative size": {"objects": [[DELTA.key, -1, B]]},
    "an object without a hash": {"objects": [[DELTA.key, 1]]},
    "no codec": {"codec": None},
    "a count below zero": {"changed": -1},
    "a step that is a fraction": {"step": 1.5},
    "a time that is none": {"time": "noon"},
    "a time that is no number": {"time": float("nan")},
    "a writer with line breaks": {"writer": "a\nb"},
    "a field too many": {"extra": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_false_manifest_is_refused(lie: str) -> None:
    with pytest.raises(FormatError):
        load_record(Manifest, lied(dump_record(MANIFEST), **LIES[lie]))


@pytest.mark.parametrize(
    "seconds",
    [
        {},
        [["fetch", 1.0]],
        {"fetch": -1.0},
        {"fetch": "1"},
        {"fetch": 1e300},
        {"fetch\u001b[2J": 1.0},
        {"": 1.0},
        {"f" * 21: 1.0},
        {chr(97 + i // 26) + chr(97 + i % 26): 1.0 for i in range(33)},
    ],
    ids=["none", "a list", "negative", "text", "for ever", "a name that acts", "no name", "a long name", "too many"],
)
def test_false_phases_of_a_heartbeat_are_refused(seconds: object) -> None:
    beat = dump_record(Heartbeat("host", POSITION, 2.5, seconds={"fetch": 1.0}))
    assert load_record(Heartbeat, beat).seconds == {"fetch": 1.0}
    with pytest.raises(FormatError, match="impossible"):
        load_record(Heartbeat, lied(beat, seconds=seconds))


def test_manifest_without_a_base_names_an_anchor_of_its_own_position() -> None:
    elsewhere = anchor_folder(Position(7, A), B) + "anchor.json"
    with pytest.raises(FormatError, match="the name of an anchor is impossible"):
        load_record(Manifest, lied(dump_record(ANCHORED), objects=[[elsewhere, 9, B]]))
    with pytest.raises(FormatError, match="the name of an anchor is impossible"):
        load_record(Manifest, lied(dump_record(ANCHORED), objects=[[f"{FOLDER}model.safetensors", 9, B]]))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{}", b"\xff", b'{"kind":"manifest"}', b'{"a":1,"a":1}', b"[" * 10**5]
)
def test_malformed_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        load_record(Manifest, data)


def test_newer_format_is_refused_by_name() -> None:
    with pytest.raises(VersionError, match=r"format version 2.*install a newer one"):
        load_record(Manifest, lied(dump_record(MANIFEST), format=2))


@pytest.mark.parametrize(
    "tensors",
    [
        "w",
        [["w", "BF16"]],
        [["w", "BF16", [2.0]]],
        [["w", "BF16", [-1]]],
        [["w", "BF16", [1 << 49]]],
        [["w", "BF16", [1 << 30, 1 << 30]]],
        [["w", "BF16", [1] * 65]],
        [["w", "NOPE", [1]]],
        [["w", 7, [1]]],
        [[7, "BF16", [1]]],
        [["w", "F4", [1]]],
        [["w", "BF16", [1]], ["w", "BF16", [1]]],
        [["x" * 5000, "BF16", [1]]],
    ],
)
def test_channel_with_an_impossible_table_is_refused(tensors: Any) -> None:
    with pytest.raises((FormatError, VersionError)):
        channel_from_json(lied(channel_to_json(CHANNEL), tensors=tensors))


@pytest.mark.parametrize("aliases", [[], {"x": 1}, {"x": "nobody"}, {"w": "w"}])
def test_channel_with_impossible_aliases_is_refused(aliases: Any) -> None:
    with pytest.raises(FormatError):
        channel_from_json(lied(channel_to_json(CHANNEL), aliases=aliases))


@pytest.mark.parametrize(
    "files",
    [
        [],
        [[f"{FOLDER}../../x", 1, A]],
        [[f"{FOLDER}.hidden", 1, A]],
        [[anchor_folder(Position(40, A), B) + "model.safetensors", 1, A]],
        [[f"{FOLDER}a", 1, A], [f"{FOLDER}a", 1, A]],
        [[f"{FOLDER}a", -1, A]],
        [["model.safetensors", 1, A]],
    ],
)
def test_anchor_with_impossible_files_is_refused(files: Any) -> None:
    with pytest.raises(FormatError):
        load_record(Anchor, lied(dump_record(ANCHOR), files=files))


def test_anchor_has_files_or_a_reference_and_not_both() -> None:
    with pytest.raises(FormatError):
        load_record(Anchor, lied(dump_record(ANCHOR), reference=["org/model", "main"]))
