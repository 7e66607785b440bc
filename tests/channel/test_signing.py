"""Keys, their files, and the list that says what they may sign."""

from __future__ import annotations

import copy
import json
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.channel.key_file import read_private, read_public, write_private
from weightcast.channel.keyring import AllowedKey, Keyring, first_keyring, load_keyring, read_keyring
from weightcast.channel.keys import RECORD, Position, anchor_folder, delta_key, keyring_key
from weightcast.channel.records import (
    Anchor,
    Channel,
    Heartbeat,
    Manifest,
    ObjectRef,
    channel_to_json,
    dump_record,
    load_record,
)
from weightcast.channel.signed import signed, signed_bytes, signed_with_bytes, without_signature
from weightcast.channel.signing import PrivateKey, PublicKey, decode_signature, encode_signature, message
from weightcast.channel.trust import Seen, Trust, seen_from_json, seen_to_json, signing_of
from weightcast.errors import FormatError, TrustError, UsageError
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.store.memory import MemoryStore

ROOT, OTHER = PrivateKey(b"r" * 32), PrivateKey(b"o" * 32)
CHANNEL = "0" * 32


def test_key_of_rfc_8032_signs_as_it_says() -> None:
    """Section 7.1, test 3."""
    key = PrivateKey(bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7"))
    signature = (
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
    )
    assert str(key.public) == "ed25519:fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025"
    assert key.sign(b"\xaf\x82") == encode_signature(bytes.fromhex(signature))


@given(st.binary(max_size=100), st.integers(0, 511))
def test_signature_is_of_these_bytes_by_this_key_alone(data: bytes, bit: int) -> None:
    signature = ROOT.sign(data)
    assert ROOT.public.verifies(signature, data)
    assert not OTHER.public.verifies(signature, data)
    assert not ROOT.public.verifies(signature, data + b"\0")
    raw = bytearray(decode_signature(signature) or b"")
    raw[bit // 8] ^= 1 << bit % 8
    assert not ROOT.public.verifies(encode_signature(bytes(raw)), data)


@given(st.text(max_size=100))
def test_other_texts_are_no_signature(text: str) -> None:
    raw = decode_signature(text)
    assert raw is None or encode_signature(raw) == text


def test_signature_has_one_spelling() -> None:
    signature = encode_signature(bytes(64))
    assert decode_signature(signature) == bytes(64)
    assert decode_signature(signature[:-1] + "B") is None
    assert decode_signature(signature + "==") is None


def test_kinds_and_channels_are_kept_apart() -> None:
    records = {message(kind, channel, b"{}") for kind in ("manifest", "anchor") for channel in (CHANNEL, "1" * 32)}
    assert len(records) == 4


# -- private keys ------------------------------------------------------------------------------------------------------


def test_private_key_is_in_no_text_of_it() -> None:
    key = PrivateKey.new()
    shown = repr(key) + str(key) + f"{key!r}" + str(vars(type(key)))
    assert key.secret().hex() not in shown
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            leave(key)


def test_private_key_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "root.key"
    write_private(path, ROOT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_private(path).public == ROOT.public
    with pytest.raises(UsageError, match="a file already"):
        write_private(path, OTHER)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_private_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "root.key"
    write_private(path, ROOT)
    path.chmod(mode)
    with pytest.raises(UsageError, match="others than its owner") as raised:
        read_private(path)
    assert "chmod 600" in str(raised.value)
    assert ROOT.secret().hex() not in str(raised.value)


@pytest.mark.parametrize("read", [read_private, read_public])
@pytest.mark.parametrize("name", ["", ".", "no/file", "a\0b", "x" * 5000])
def test_what_is_no_file_of_a_key_is_a_mistake_of_usage(
    read: Callable[[str], object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"key|not a file"):
        read(name)


@pytest.mark.parametrize("damage", [b"", b"weightcast-private-key ed25519 ", b"\xff" * 10])
def test_error_about_a_damaged_key_does_not_hold_it(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "root.key"
    path.write_bytes(damage + ROOT.secret().hex().encode()[:-1])
    path.chmod(0o600)
    with pytest.raises(UsageError, match="holds no private key") as raised:
        read_private(path)
    assert ROOT.secret().hex()[:20] not in str(raised.value) + repr(raised.value)


def test_private_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "key", ROOT)
    monkeypatch.setenv("MY_KEY", (tmp_path / "key").read_text())
    assert read_private("env:MY_KEY").public == ROOT.public
    with pytest.raises(UsageError, match="the variable OTHER holds no private key"):
        read_private("env:OTHER")


def test_private_key_is_not_taken_for_a_public_one(tmp_path: Path) -> None:
    write_private(tmp_path / "key", ROOT)
    with pytest.raises(UsageError, match="this is a private key") as raised:
        read_public(str(tmp_path / "key"))
    assert ROOT.secret().hex() not in str(raised.value)


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:" + "0" * 63, "ed25519:" + "G" * 64, "rsa:" + "0" * 64])
def test_other_texts_are_no_public_key(text: str) -> None:
    with pytest.raises(UsageError):
        PublicKey.parse(text)
    with pytest.raises(UsageError):
        Trust(text)


def test_trust_in_a_file_is_trust_in_its_key(tmp_path: Path) -> None:
    (tmp_path / "root.pub").write_text(f"{ROOT.public}\n")
    assert Trust(str(tmp_path / "root.pub")).root == ROOT.public


def test_signer_that_checks_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must check those that they follow"):
        signing_of(None, ROOT)
    assert signing_of(None, ROOT, begins=True).is_root


def test_what_was_seen_round_trips() -> None:
    keyring = first_keyring(CHANNEL, [AllowedKey(OTHER.public, "writer", 3, 5)], ROOT)
    for seen in (Seen(), Seen(CHANNEL, keyring, 7, "a" * 64, 1.5)):
        assert seen_from_json(seen_to_json(ROOT.public, seen)) == (ROOT.public, seen)
    with pytest.raises(FormatError):  # a list that another key has signed
        seen_from_json(seen_to_json(OTHER.public, Seen(CHANNEL, keyring)))


# -- the key list ------------------------------------------------------------------------------------------------------


def entries(*keys: tuple[AllowedKey, ...]) -> list[Keyring]:
    found = [first_keyring(CHANNEL, keys[0], ROOT)]
    for more in keys[1:]:
        found.append(found[-1].followed_by(more, ROOT))
    return found


def stored(rings: list[Keyring]) -> MemoryStore:
    store = MemoryStore()
    for ring in rings:
        store.put(keyring_key(ring.number), ring.to_json())
    return store


def test_key_list_is_read_up_to_its_newest_entry() -> None:
    rings = entries((), (AllowedKey(OTHER.public, "writer"),), (AllowedKey(OTHER.public, "writer", 0, 9),))
    assert read_keyring(stored(rings), CHANNEL, ROOT.public, None) == rings[-1]
    assert read_keyring(stored(rings), CHANNEL, ROOT.public, rings[0]) == rings[-1]
    assert read_keyring(stored(rings[:1]), CHANNEL, ROOT.public, rings[-1]) == rings[-1], "never back"
    assert read_keyring(MemoryStore(), CHANNEL, ROOT.public, None) is None


def test_entry_that_does_not_follow_is_refused() -> None:
    one, other = (entries((), (AllowedKey(OTHER.public, role),)) for role in ("writer", "cutter"))
    forked = stored([one[0], other[1]])
    assert read_keyring(forked, CHANNEL, ROOT.public, None) == other[1]
    third = one[1].followed_by((), ROOT)
    with pytest.raises(TrustError) as raised:
        read_keyring(stored([other[0], other[1], third]), CHANNEL, ROOT.public, other[1])
    assert raised.value.reason == "fork"
    with pytest.raises(TrustError):  # under another number than its own
        read_keyring_at(one[1])


def read_keyring_at(ring: Keyring) -> None:
    store = MemoryStore()
    store.put(keyring_key(1), ring.to_json())
    read_keyring(store, CHANNEL, ROOT.public, None)


def test_entry_of_another_channel_or_key_is_refused() -> None:
    data = first_keyring(CHANNEL, (), ROOT).to_json()
    assert load_keyring(data, ROOT.public, CHANNEL).number == 1
    with pytest.raises(TrustError):
        load_keyring(data, ROOT.public, "1" * 32)
    with pytest.raises(TrustError):
        load_keyring(data, OTHER.public, CHANNEL)
    with pytest.raises(TrustError):
        load_keyring(data.replace(b'"number":1', b'"number":2'), ROOT.public, CHANNEL)


@given(st.integers(0, 20), st.integers(0, 20), st.none() | st.integers(0, 20))
def test_key_counts_for_its_versions(version: int, first: int, last: int | None) -> None:
    covers = AllowedKey(OTHER.public, "writer", first, last).covers(version)
    assert covers == (version in range(first, 100 if last is None else last + 1))


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=40), st.booleans())
def test_signature_is_cut_out_of_the_very_bytes(label: str, mimics: bool) -> None:
    """What is checked is what was signed, also where a text looks like the field itself."""
    position = Position(1, "a" * 64)
    ref = ObjectRef(delta_key(position, "b" * 64), 1, "b" * 64)
    text = f'"signature":"{"A" * 86}",' if mimics else label
    bare = Manifest(CHANNEL, position, Position(0, "c" * 64), (ref,), "gap", 1, None, 1.5, "w", text)
    made = signed(bare, CHANNEL, ROOT)
    cut = without_signature(dump_record(made), made)
    assert cut is not None
    assert message("manifest", CHANNEL, cut) == signed_bytes(made, CHANNEL)
    assert load_record(Manifest, dump_record(made)) == made


_AT = Position(1, "a" * 64)
_FOLDER = anchor_folder(_AT, "b" * 16)


@pytest.mark.parametrize(
    "record",
    [
        Channel("0" * 32, TensorTable.of([TensorSpec("w", "BF16", (2,))])),
        Manifest(CHANNEL, _AT, None, (ObjectRef(_FOLDER + RECORD, 1, "b" * 64),), None, 1, None, 1.5, "w"),
        Anchor(CHANNEL, _AT, (ObjectRef(_FOLDER + "model.safetensors", 1, "b" * 64),)),
        Heartbeat("rack-7", _AT, 1.5),
    ],
    ids=lambda record: type(record).__name__,
)
def test_bytes_that_come_with_a_signature_are_those_of_the_record(
    record: Channel | Manifest | Anchor | Heartbeat,
) -> None:
    made, data = signed_with_bytes(record, CHANNEL, ROOT)
    assert data == (channel_to_json(made) if isinstance(made, Channel) else dump_record(made))
    assert made.signature is not None
    assert ROOT.public.verifies(made.signature, signed_bytes(made, CHANNEL))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["channel", "keys", "number", "previous", "signature", "signer"]), JSON, st.integers(0, 4))
def test_hostile_values_in_a_key_list_raise_our_errors(name: str, value: object, column: int) -> None:
    honest = first_keyring(CHANNEL, [AllowedKey(OTHER.public, "writer", 3, 5)], ROOT)
    record = json.loads(honest.to_json())
    if name == "keys" and column < 4:
        record["keys"][0][column] = value
    else:
        record[name] = value
    data = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    if data != honest.to_json():
        with pytest.raises((FormatError, TrustError)):
            load_keyring(data, ROOT.public, CHANNEL)


@given(st.sampled_from(["channel", "keyring", "manifest", "root", "time", "version"]), JSON)
def test_hostile_values_in_what_was_seen_raise_our_errors(name: str, value: object) -> None:
    record = json.loads(seen_to_json(ROOT.public, Seen(CHANNEL, None, 7, "a" * 64, 1.5)))
    data = json.dumps(record | {name: value}, sort_keys=True, separators=(",", ":")).encode()
    try:
        root, _ = seen_from_json(data)
    except FormatError:
        return
    assert root == ROOT.public
