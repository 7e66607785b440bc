"""Labels and tags: the bytes as SPEC 11.6 and 11.8 have them, hostile text, and who wins a name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from channels import channel_of
from hypothesis import given
from hypothesis import strategies as st
from scripted_store import ScriptedStore

from weightcast.channel.chain import Chain
from weightcast.channel.keys import (
    MAX_LABEL,
    Position,
    check_label,
    check_tag,
    delta_key,
    manifest_key,
    read_tag_key,
    tag_key,
)
from weightcast.channel.pins import pin, pins
from weightcast.channel.records import Manifest, ObjectRef, Tag, dump_record, load_record
from weightcast.channel.tags import delete_tag, read_tag, set_tag, tag_names, tags, tags_by_position, valid_tags
from weightcast.errors import ConflictError, FormatError, MissingError, UsageError
from weightcast.store.memory import MemoryStore

A, B = "a" * 64, "b" * 64
ID = "c0ffee" + 26 * "0"
POSITION = Position(41, A)
PLAIN = Manifest(
    ID, POSITION, Position(40, B), (ObjectRef(delta_key(POSITION, B), 9, B),), "banded", 7, None, 1.5, "trainer"
)
TAG = Tag(ID, "best", POSITION, 1.5)

HOSTILE = ["", " ", " x", "x ", "a\nb", "a\tb", "\x1b[2J", "\x00", "\u202eevil", "a\u2028b", "\ud800", "x" * 201]
NO_TAGS = [
    *("", "7", "007", "1e5", "0x10", "-best", ".best", "_best", "a..b", "head", "HEAD", "nothing"),
    *("a b", "a/b", "../x", "a\n", "best\n", "\x1b[2J", "ä", "\u202ebest", "７", "x" * 101),
]


# -- labels ------------------------------------------------------------------------------------------------------------


def test_manifest_without_label_has_no_such_field() -> None:
    assert "label" not in json.loads(dump_record(PLAIN))


def test_manifest_with_label_round_trips() -> None:
    labelled = replace(PLAIN, label="lr 3e-5, “warm” — 学習")
    data = dump_record(labelled)
    assert data.isascii()
    assert load_record(Manifest, data) == labelled


@pytest.mark.parametrize("label", [*HOSTILE, None, 7, ["x"]])
def test_reader_refuses_impossible_label(label: Any) -> None:
    with pytest.raises(FormatError):
        load_record(Manifest, json.dumps(json.loads(dump_record(PLAIN)) | {"label": label}).encode())


@pytest.mark.parametrize("label", [*HOSTILE, 7])
def test_writer_refuses_impossible_label(label: Any) -> None:
    with pytest.raises(UsageError, match="cannot be a label") as refused:
        check_label(label)
    assert len(str(refused.value)) < 1000


@given(st.text(max_size=MAX_LABEL + 5))
def test_label_that_a_writer_accepts_is_accepted_by_every_reader(text: str) -> None:
    try:
        label = check_label(text)
    except UsageError:
        return
    assert load_record(Manifest, dump_record(replace(PLAIN, label=label))).label == text


def test_draft_carries_the_label() -> None:
    store = MemoryStore()
    channel_of(store, 0)
    chain = Chain.open(store)
    head = chain.head()
    assert head is not None
    position = Position(1, A)
    ref = ObjectRef(delta_key(position, B), 9, B)
    assert chain.draft(position, head.position, ref, "gap", 1, None, "w", label="first").label == "first"
    with pytest.raises(UsageError, match="cannot be a label"):
        chain.draft(position, head.position, ref, "gap", 1, None, "w", label="a\nb")


# -- names of tags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NO_TAGS)
def test_impossible_tag_is_refused_and_its_key_ignored(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a tag"):
        check_tag(name)
    assert read_tag_key(tag_key(name)) is None


@pytest.mark.parametrize("name", ["best", "v3", "v1.0-rc.2", "run_7", "a", "x" * 100, "best.json"])
def test_name_becomes_a_key_and_back(name: str) -> None:
    assert read_tag_key(tag_key(check_tag(name))) == name


@given(st.text())
def test_no_tag_is_a_number(text: str) -> None:
    try:
        check_tag(text)
    except UsageError:
        return
    with pytest.raises(ValueError, match="invalid literal"):
        int(text)


# -- records -----------------------------------------------------------------------------------------------------------


def test_tag_has_these_bytes() -> None:
    expected = '{"channel":"' + ID + '","format":1,"kind":"tag","name":"best","position":[41,"' + A + '"],"time":1.5}'
    assert dump_record(TAG).decode() == expected
    assert load_record(Tag, dump_record(TAG)) == TAG


@pytest.mark.parametrize(
    "lie", [{"channel": "x"}, {"position": None}, {"position": [41]}, {"name": "a\nb"}, {"time": -1}, {"extra": 1}]
)
def test_false_tag_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        load_record(Tag, json.dumps(json.loads(dump_record(TAG)) | lie).encode())


# -- in a channel ------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain() -> Chain:
    store = MemoryStore()
    channel_of(store, 3)
    return Chain.open(store)


def position(chain: Chain, version: int) -> Position:
    return chain.manifest(version).position


def test_tag_is_set_read_listed_and_deleted(chain: Chain) -> None:
    assert set_tag(chain, "best", position(chain, 2)) is None
    assert set_tag(chain, "first", position(chain, 0)) is None
    assert set_tag(chain, "also", position(chain, 2)) is None
    assert read_tag(chain, "best").position == position(chain, 2)
    assert tags_by_position(chain) == {position(chain, 0): ("first",), position(chain, 2): ("also", "best")}
    delete_tag(chain, "best")
    assert list(tag_names(chain)) == ["also", "first"]
    for missing in ("best", "../x", "7"):
        with pytest.raises(UsageError, match="there is no"):
            delete_tag(chain, missing)


def test_only_force_moves_a_tag(chain: Chain) -> None:
    set_tag(chain, "best", position(chain, 1))
    assert set_tag(chain, "best", position(chain, 1)) == position(chain, 1), "setting it again is fine"
    with pytest.raises(ConflictError, match=r"names version 1.*--force"):
        set_tag(chain, "best", position(chain, 2))
    assert read_tag(chain, "best").position.version == 1
    assert set_tag(chain, "best", position(chain, 2), force=True) == position(chain, 1)
    assert read_tag(chain, "best").position.version == 2


def test_one_of_two_creations_of_a_tag_wins(chain: Chain) -> None:
    """The other creates it between our read and our create."""
    late = ScriptedStore(chain.store)
    late.before("create", "", lambda _: set_tag(chain, "best", position(chain, 1)))
    with pytest.raises(ConflictError, match="names version 1"):
        set_tag(Chain(late, chain.channel), "best", position(chain, 2))
    assert read_tag(chain, "best").position.version == 1


def test_tag_of_a_version_collected_meanwhile_stays_as_it_was(chain: Chain) -> None:
    set_tag(chain, "old", position(chain, 2))
    collected = position(chain, 1)
    late = ScriptedStore(chain.store)
    late.after("create put", "tags/", lambda _: chain.store.delete(manifest_key(1)))
    for name in ("new", "old"):
        with pytest.raises(UsageError, match="version 1 is gone"):
            set_tag(Chain(late, chain.channel), name, collected, force=True)
    assert list(tag_names(chain)) == ["old"]
    assert read_tag(chain, "old").position.version == 2


def test_pin_of_a_version_collected_meanwhile_is_removed(chain: Chain) -> None:
    late = ScriptedStore(chain.store)
    late.after("put", "pins/", lambda _: chain.store.delete(manifest_key(1)))
    with pytest.raises(MissingError):
        pin(Chain(late, chain.channel), 1)
    assert pins(chain) == {}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "not JSON"),
        (dump_record(TAG), "another channel"),
        (b"x" * 100, "not JSON"),
        (b" " * 5000, "larger than 4,096 bytes"),
    ],
)
def test_damaged_tag_is_refused_by_name_and_force_repairs_it(chain: Chain, data: bytes, problem: str) -> None:
    chain.store.put(tag_key("best"), data)
    with pytest.raises(FormatError, match=problem):
        read_tag(chain, "best")
    good, bad = tags(chain)
    assert (good, [key for key, _ in bad]) == ([], [tag_key("best")])
    with pytest.raises(FormatError):
        set_tag(chain, "best", position(chain, 1))
    set_tag(chain, "best", position(chain, 1), force=True)
    assert read_tag(chain, "best").position.version == 1


def test_tag_copied_to_another_name_is_refused(chain: Chain) -> None:
    set_tag(chain, "best", position(chain, 1))
    chain.store.put(tag_key("worst"), chain.store.get(tag_key("best")))
    with pytest.raises(FormatError, match="'best'"):
        read_tag(chain, "worst")


def test_tag_of_a_version_that_is_gone_or_has_other_weights_is_not_valid(chain: Chain) -> None:
    set_tag(chain, "good", position(chain, 1))
    for name, at in {"other": Position(1, A), "gone": Position(99, A)}.items():
        chain.store.put(tag_key(name), dump_record(Tag(chain.channel.id, name, at, 1.5)))
    good, bad = valid_tags(chain)
    assert [tag.name for tag in good] == ["good"]
    assert sorted(key for key, _ in bad) == [tag_key("gone"), tag_key("other")]


def test_keys_that_are_not_tags_are_ignored(chain: Chain) -> None:
    for key in ("tags/7.json", "tags/a b.json", "tags/deep/er.json", "tags/best"):
        chain.store.put(key, b"{}")
    assert list(tag_names(chain)) == []
