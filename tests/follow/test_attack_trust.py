"""One who trusts a root key, and everyone who may attack: a test for each attacker of SPEC 15.6."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from collisions import forged
from scripted_store import ScriptedStore
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keyring import AllowedKey, first_keyring
from weightcast.channel.keys import KEYRING, keyring_key, manifest_key
from weightcast.channel.records import Manifest, dump_record, load_record
from weightcast.channel.signed import signed
from weightcast.channel.signing import PrivateKey
from weightcast.channel.trust import Signing, signing_of
from weightcast.disk.checkpoint import save
from weightcast.errors import FormatError, NoRouteError, TrustError
from weightcast.publish.from_checkpoint import publish
from weightcast.store.file import FileStore
from weightcast.upkeep.verify import verify

VERSIONS = 9


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[SignedChannel, dict[str, bytes]]:
    """A signed channel of ten versions with a squash of the first eight, and all its objects."""
    channel = SignedChannel(tmp_path_factory.mktemp("signed"), VERSIONS)
    channel.squash()
    return channel, channel.snapshot()


@pytest.fixture
def channel(made: tuple[SignedChannel, dict[str, bytes]], tmp_path: Path) -> SignedChannel:
    """The same channel for each test, with mirrors of its own."""
    again = object.__new__(SignedChannel)
    again.__dict__.update(made[0].__dict__ | {"home": tmp_path, "url": tmp_path / "bucket"})
    for path in made[0].home.glob("*.key"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name).chmod(0o600)
    again.url.mkdir()
    again.put_back(made[1])
    return again


def refused(channel: SignedChannel, folder: str = "victim", trust: wc.Trust | str | None = None) -> TrustError:
    """The error of a pull, which has changed nothing."""
    place = channel.home / folder
    before = channel.held(folder) if (place / "model.safetensors").exists() else None
    with pytest.raises((TrustError, NoRouteError)) as raised:
        channel.pull(folder, trust or channel.trust)
    error = raised.value.reason if isinstance(raised.value, NoRouteError) else raised.value
    assert isinstance(error, TrustError)
    assert error.hint
    if before is None:
        assert not list(place.glob("*.safetensors"))
    else:
        assert np.array_equal(channel.held(folder), before)
    return error


def test_signed_channel_is_followed_by_who_trusts_its_root(channel: SignedChannel) -> None:
    channel.pull("mirror", channel.trust)
    assert np.array_equal(channel.held(), bits_of(VERSIONS))
    assert list(verify(channel.chain())) == []


def test_reader_without_a_key_reads_a_signed_channel(channel: SignedChannel) -> None:
    channel.pull("mirror")
    assert np.array_equal(channel.held(), bits_of(VERSIONS))


def test_trust_is_remembered_by_the_mirror(channel: SignedChannel) -> None:
    channel.pull("victim", channel.trust)
    channel.publish()
    channel.rewrite(manifest_key(VERSIONS + 1), signature=None, signer=None)
    with pytest.raises(TrustError) as raised:
        channel.pull("victim")
    assert raised.value.reason == "unsigned"


def test_mirror_that_was_filled_without_a_key_is_not_vouched_for(channel: SignedChannel) -> None:
    channel.pull("mirror")
    with pytest.raises(TrustError, match="filled without a trusted key"):
        channel.pull("mirror", channel.trust)


def test_damaged_record_of_trust_is_no_reason_to_trust_all(channel: SignedChannel) -> None:
    channel.pull("mirror", channel.trust)
    (channel.home / "mirror/.weightcast/trust.json").write_text("{}")
    with pytest.raises(wc.errors.CheckpointError, match="not known what to trust"):
        channel.pull("mirror")


# -- can read ----------------------------------------------------------------------------------------------------------


def test_who_can_read_finds_no_secret(channel: SignedChannel) -> None:
    channel.pull("mirror", channel.trust)
    objects = b"".join(channel.snapshot().values())
    kept = b"".join(path.read_bytes() for path in (channel.home / "mirror").rglob("*") if path.is_file())
    for key in channel.keys.values():
        assert key.secret() not in objects + kept
        assert key.secret().hex().encode() not in objects + kept


# -- can write squashes only -------------------------------------------------------------------------------------------


def test_who_writes_squashes_cannot_forge_a_digest(channel: SignedChannel) -> None:
    """Weights with the very digest of a committed version, in a squash that is the cheapest route."""
    good = bits_of(VERSIONS)
    evil = forged(good, 50)
    assert wc.fingerprint(arrays(evil)) == wc.fingerprint(arrays(good))
    channel.put_squash(0, evil)
    channel.pull("gullible")
    assert np.array_equal(channel.held("gullible"), evil), "without a key the attack succeeds: SPEC 4.4"
    channel.pull("victim", channel.trust)
    assert np.array_equal(channel.held("victim"), good)
    assert any("not signed by a cutter's key" in finding.problem for finding in verify(channel.chain()))


@pytest.mark.parametrize("signer", ["stranger", "writer"])
def test_squash_of_who_may_not_cut_is_not_used(channel: SignedChannel, signer: str) -> None:
    evil = forged(bits_of(VERSIONS), 50)
    channel.put_squash(0, evil, signer)
    channel.pull("victim", channel.trust)
    assert np.array_equal(channel.held("victim"), bits_of(VERSIONS))


def test_signature_of_a_squash_is_of_its_own_bytes_alone(channel: SignedChannel) -> None:
    """The signature of an honest squash, moved to one from the same base with other bits."""
    evil = forged(bits_of(VERSIONS), 50)
    forged_key = channel.put_squash(0, evil)
    (honest,) = (listed.key for listed in channel.store.list("squashes/") if listed.key != forged_key)
    signature = honest.removesuffix(".safetensors")[-104:]
    moved = forged_key.replace(".safetensors", f"{signature}.safetensors")
    channel.path(forged_key).rename(channel.path(moved))
    channel.pull("victim", channel.trust)
    assert np.array_equal(channel.held("victim"), bits_of(VERSIONS))


def test_unsigned_anchor_cannot_bring_another_tokenizer(channel: SignedChannel, tmp_path: Path) -> None:
    """An anchor of the right weights, but with a chat template of the attacker's."""
    channel.pull("mirror", channel.trust)
    files = {"model.safetensors": channel.home / "mirror/model.safetensors", "chat_template.jinja": tmp_path / "evil"}
    (tmp_path / "evil").write_text("{{ evil }}")
    opened = Chain.open(channel.store)
    chain = Chain(channel.store, replace(opened.channel, signer=None, signature=None))
    chain.put_anchor(wc.Position(VERSIONS, wc.fingerprint(arrays(bits_of(VERSIONS))).digest), files)
    channel.pull("gullible")
    assert (channel.home / "gullible/chat_template.jinja").exists()
    channel.pull("victim", channel.trust)
    assert not (channel.home / "victim/chat_template.jinja").exists()


def test_files_of_a_signed_anchor_are_covered(channel: SignedChannel) -> None:
    (record,) = (listed.key for listed in channel.store.list("anchors/") if listed.key.endswith("anchor.json"))
    name = record.replace("anchor.json", "model.safetensors")
    data = bytearray(channel.path(name).read_bytes())
    data[-1] ^= 1
    channel.overwrite(name, bytes(data))
    files = json.loads(channel.path(record).read_text())["files"]
    files[0][2] = hashlib.sha256(bytes(data)).hexdigest()
    channel.rewrite(record, files=files)
    with pytest.raises((TrustError, NoRouteError, FormatError)):
        channel.pull("victim", channel.trust)
    assert not list((channel.home / "victim").glob("*.safetensors"))


# -- can write everything ----------------------------------------------------------------------------------------------


def test_who_writes_everything_cannot_commit_a_version(channel: SignedChannel) -> None:
    """A version that follows the rules of the format in everything, by a writer without a key."""
    channel.pull("victim", channel.trust)
    opened = Chain.open(channel.store)
    chain = Chain(channel.store, replace(opened.channel, signer=None, signature=None))
    head = opened.manifest(VERSIONS)
    position = wc.Position(VERSIONS + 1, wc.fingerprint(arrays(bits_of(VERSIONS + 1))).digest)
    patch = wc.diff(arrays(bits_of(VERSIONS)), arrays(bits_of(VERSIONS + 1)))
    ref = chain.put_delta(position, wc.encode(patch, "plain"))
    chain.commit(chain.draft(position, head.position, ref, "plain", 60, None, "evil"))
    assert refused(channel).reason == "unsigned"
    assert channel.pull("gullible").version == VERSIONS + 1


def test_follower_goes_on_once_the_forged_version_is_gone(channel: SignedChannel) -> None:
    """It stays where it is and says why; when the owner has put things right, it follows again."""
    held, errors = arrays(bits_of(0)), []
    with wc.Subscriber(channel.url, held, threads=1, trust=channel.trust) as subscriber:
        subscriber.sync()
        channel.publish()
        genuine = channel.snapshot()
        channel.rewrite(manifest_key(VERSIONS + 1), signature="A" * 86)

        def repair(error: wc.WeightcastError) -> None:
            errors.append(error)
            assert np.array_equal(held.read("w"), bits_of(VERSIONS))
            channel.put_back(genuine)

        for update in subscriber.follow(every=0.01, on_error=repair):
            assert update.position.version == VERSIONS + 1
            subscriber.stop()
    assert [error.reason for error in errors if isinstance(error, TrustError)] == ["forged"]
    assert np.array_equal(held.read("w"), bits_of(VERSIONS + 1))


def signed_by(channel: SignedChannel, key: PrivateKey, version: int, **fields: object) -> None:
    """Replace a manifest by one with other fields, signed by a key."""
    path = channel.path(manifest_key(version))
    manifest = replace(load_record(Manifest, path.read_bytes()), **fields)  # type: ignore[arg-type]
    path.write_bytes(dump_record(signed(manifest, manifest.channel, key)))


def test_manifest_of_a_stranger_is_refused(channel: SignedChannel) -> None:
    signed_by(channel, channel.keys["stranger"], VERSIONS)
    error = refused(channel)
    assert (error.reason, error.signer) == ("unknown key", channel.public("stranger").id)


def test_manifest_by_a_key_with_another_role_is_refused(channel: SignedChannel) -> None:
    signed_by(channel, channel.keys["cutter"], VERSIONS)
    assert refused(channel).reason == "not allowed"


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 999},
        {"label": "evil"},
        {"time": 1.5},
        {"writer": "evil"},
        {"previous": "0" * 64},
        {"keyring": None},
        {"changed": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_changed_field_of_a_manifest_is_noticed(channel: SignedChannel, fields: dict[str, object]) -> None:
    channel.rewrite(manifest_key(VERSIONS), **fields)
    assert refused(channel).reason == "forged"


def test_manifest_that_is_not_canonical_is_refused(channel: SignedChannel) -> None:
    path = channel.path(manifest_key(VERSIONS))
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    assert refused(channel).reason == "forged"


def test_record_of_the_channel_must_be_of_the_trusted_root(channel: SignedChannel) -> None:
    data = channel.path("channel.json").read_bytes()
    channel.rewrite("channel.json", signature=None, signer=None)
    assert refused(channel).reason == "unsigned"
    channel.overwrite("channel.json", data)
    channel.rewrite("channel.json", signature="A" * 86)
    assert refused(channel).reason == "forged"
    channel.overwrite("channel.json", data)
    assert refused(channel, trust=str(channel.public("stranger"))).reason == "unknown key"


def test_key_list_of_a_stranger_is_refused(channel: SignedChannel) -> None:
    """The list that the attacker would like: its own key as a writer."""
    stranger = channel.keys["stranger"]
    keyring = first_keyring(channel.chain().channel.id, [AllowedKey(stranger.public, "writer")], stranger)
    channel.overwrite(keyring_key(1), keyring.to_json())
    signed_by(channel, stranger, VERSIONS)
    assert refused(channel).reason == "unknown key"


def test_signature_of_one_kind_is_no_signature_of_another(channel: SignedChannel) -> None:
    """Nothing that the root has signed as a key list or a channel passes as a manifest."""
    for key in (keyring_key(1), "channel.json"):
        signature = json.loads(channel.path(key).read_text())["signature"]
        channel.rewrite(manifest_key(VERSIONS), signature=signature, signer=channel.public("root").id)
        assert refused(channel).reason == "forged"


# -- can replay, reorder, delete ---------------------------------------------------------------------------------------


def test_bucket_that_is_put_back_is_refused_unless_it_is_allowed(channel: SignedChannel) -> None:
    old = channel.snapshot()
    channel.publish(2)
    channel.pull("victim", channel.trust)
    channel.put_back(old)
    assert refused(channel).reason == "rollback"
    position = channel.pull("victim", wc.Trust(channel.trust, allow_rollback=True))
    assert position.version == VERSIONS
    assert np.array_equal(channel.held("victim"), bits_of(VERSIONS))
    assert channel.pull("victim").version == VERSIONS, "from then on that is what was seen"


def test_version_that_was_seen_but_not_held_is_remembered(channel: SignedChannel) -> None:
    with wc.Subscriber(
        channel.url, channel.home / "victim", wc.Pinned(4), threads=1, trust=channel.trust
    ) as subscriber:
        subscriber.sync()
    for version in range(6, VERSIONS + 1):
        channel.path(manifest_key(version)).unlink()
    assert refused(channel).reason == "rollback"


def test_listing_that_lags_is_no_rollback(channel: SignedChannel) -> None:
    """The manifests are there; the listing and the hint do not show the newest of them yet, and one is collected."""
    store = ScriptedStore(FileStore(channel.url))
    held = arrays(bits_of(0))
    with wc.Subscriber(store, held, threads=1, trust=channel.trust) as subscriber:
        subscriber.sync()
        channel.path("head.json").unlink()
        channel.path(manifest_key(VERSIONS - 1)).unlink()
        store.answer("list", "manifests/", lambda found: [one for one in found if one.key < manifest_key(5)])
        subscriber.policy = wc.Newest()
        assert subscriber.sync() is None
    assert np.array_equal(held.read("w"), bits_of(VERSIONS))


def test_another_history_of_the_same_writer_is_refused(channel: SignedChannel) -> None:
    """A branch that the writer itself has signed: the bucket was put back, training went on, now the other is shown."""
    old = channel.snapshot()
    channel.publish()
    branch = channel.snapshot()
    channel.put_back(old)
    channel.version = VERSIONS
    with wc.Publisher(
        channel.url,
        arrays(bits_of(VERSIONS)),
        threads=1,
        sign=channel.file("writer"),
        trust=channel.trust,
    ) as publisher:
        publisher.publish(weights=arrays(bits_of(VERSIONS + 5))).result(60)
    channel.pull("victim", channel.trust)
    channel.put_back(branch)
    assert refused(channel).reason == "fork"


def test_old_manifest_under_a_new_number_is_refused(channel: SignedChannel) -> None:
    channel.pull("victim", channel.trust)
    channel.overwrite(manifest_key(VERSIONS + 1), channel.path(manifest_key(VERSIONS)).read_bytes())
    with pytest.raises(FormatError):
        channel.pull("victim")


def test_deleted_objects_delay_and_change_nothing(channel: SignedChannel) -> None:
    channel.pull("victim", channel.trust)
    channel.publish()
    (delta,) = (listed.key for listed in channel.store.list(f"deltas/{VERSIONS + 1:012d}"))
    channel.path(delta).unlink()
    with pytest.raises(NoRouteError):
        channel.pull("victim")
    assert np.array_equal(channel.held("victim"), bits_of(VERSIONS))


def test_older_key_list_does_not_bring_back_a_revoked_key(channel: SignedChannel) -> None:
    channel.pull("victim", channel.trust)
    channel.revoke("writer", last=VERSIONS)
    channel.pull("victim")
    newest = sorted(listed.key for listed in channel.store.list(KEYRING))[-1]
    channel.path(newest).unlink()
    # Whoever stole the writer's key goes on with it, and shows the list in which it still counts.
    channel.publish()
    assert refused(channel).reason == "not allowed"


def test_newcomer_is_not_shown_an_older_key_list_than_the_writer_knew(channel: SignedChannel) -> None:
    channel.add("replica", "replica")
    channel.publish()
    channel.path(keyring_key(3)).unlink()
    assert refused(channel).reason == "rollback"


def test_another_channel_of_the_same_root_is_not_taken_for_this_one(channel: SignedChannel) -> None:
    channel.pull("victim", channel.trust)
    for listed in list(channel.store.list("")):
        channel.store.delete(listed.key)
    wc.init(channel.url, arrays(bits_of(3)), sign=channel.file("root"))
    assert refused(channel).reason == "rollback"
    channel.pull("victim", wc.Trust(channel.trust, allow_rollback=True))
    assert np.array_equal(channel.held("victim"), bits_of(3))


# -- controls the network ----------------------------------------------------------------------------------------------


def test_frozen_bucket_is_noticed_by_who_asks_for_it(channel: SignedChannel) -> None:
    channel.pull("victim", wc.Trust(channel.trust, max_age=3600.0))
    error = refused(channel, "victim", wc.Trust(channel.trust, max_age=1e-9))
    assert error.reason == "stale"


def test_object_that_was_swapped_on_the_way_is_refused(channel: SignedChannel) -> None:
    """The object that the newest manifest names has other bytes of the same length."""
    channel.pull("victim", channel.trust)
    channel.publish()
    (delta,) = (listed.key for listed in channel.store.list(f"deltas/{VERSIONS + 1:012d}"))
    data = bytearray(channel.path(delta).read_bytes())
    data[-1] ^= 1
    channel.overwrite(delta, bytes(data))
    with pytest.raises(NoRouteError):
        channel.pull("victim")
    assert np.array_equal(channel.held("victim"), bits_of(VERSIONS))


# -- feeds hostile files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keyring",
    [
        b"",
        b"[]",
        b"{" * 5000,
        b'{"format":1,"kind":"keyring"}',
        b'{"channel":1,"format":1,"keys":[],"kind":"keyring","number":1,"previous":null,"signature":"","signer":""}',
        b'{"channel":"x","format":1,"keys":[[]],"kind":"keyring","number":1,"previous":null,"signature":"'
        + b"A" * 86
        + b'","signer":"0000000000000000"}',
    ],
)
def test_hostile_key_list_is_refused(channel: SignedChannel, keyring: bytes) -> None:
    channel.overwrite(keyring_key(1), keyring)
    with pytest.raises((FormatError, TrustError)):
        channel.pull("victim", channel.trust)
    assert not (channel.home / "victim").exists()


@pytest.mark.parametrize("signature", ["", "A", "A" * 85, "A" * 87, "=" * 86, "A" * 85 + "B", "é" * 86])
def test_hostile_signature_is_refused(channel: SignedChannel, signature: str) -> None:
    channel.rewrite(manifest_key(VERSIONS), signature=signature)
    with pytest.raises((FormatError, TrustError)):
        channel.pull("victim", channel.trust)


# -- stole the cutter's key --------------------------------------------------------------------------------------------


def test_stolen_key_of_a_cutter_ships_weights_until_it_is_revoked(channel: SignedChannel) -> None:
    good = bits_of(VERSIONS)
    evil = forged(good, 50)
    channel.put_squash(0, evil, "cutter")
    channel.pull("early", channel.trust)
    assert np.array_equal(channel.held("early"), evil), "the key may cut, and digests can be forged"
    channel.revoke("cutter")
    channel.pull("late", channel.trust)
    assert np.array_equal(channel.held("late"), good)


def test_stolen_key_of_a_cutter_commits_nothing(channel: SignedChannel) -> None:
    with pytest.raises(TrustError) as raised:
        channel.publish(writer="cutter")
    assert raised.value.reason == "not allowed"


def test_reader_that_runs_notices_a_revocation_when_it_plans(channel: SignedChannel) -> None:
    held = arrays(np.zeros_like(bits_of(0)))
    with wc.Subscriber(channel.url, held, wc.Pinned(0), threads=1, trust=channel.trust) as subscriber:
        subscriber.sync()
        evil = forged(bits_of(VERSIONS), 50)
        channel.put_squash(0, evil, "cutter")
        channel.revoke("cutter")
        subscriber.policy = wc.Newest()
        subscriber.sync()
    assert np.array_equal(held.read("w"), bits_of(VERSIONS))


def test_follower_goes_on_from_an_anchor_after_the_writers_key_was_stolen(
    channel: SignedChannel, tmp_path: Path
) -> None:
    """What the stolen key signed counts no more; the next version is an anchor by another key."""
    held = arrays(bits_of(4))
    with wc.Subscriber(channel.url, held, threads=1, trust=channel.trust) as subscriber:
        subscriber.sync()
        channel.publish()
        channel.add("stranger", "writer", first=VERSIONS + 2)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        save(arrays(bits_of(99)), folder)
        signing = signing_of(channel.trust, channel.file("stranger"))
        publish(channel.url, folder, tmp_path / "none", anchor=True, signing=signing)
        channel.revoke("writer")
        found = [
            update for update in subscriber.follow(every=0.01, on_error=lambda error: None) if not subscriber.stop()
        ]
    assert [update.position.version for update in found] == [VERSIONS + 2]
    assert np.array_equal(held.read("w"), bits_of(99))


def test_signing_key_that_is_not_the_writers_is_not_needed_to_read(channel: SignedChannel) -> None:
    """Who reads has public keys alone."""
    assert channel.chain().signing == Signing(wc.Trust(channel.trust))
