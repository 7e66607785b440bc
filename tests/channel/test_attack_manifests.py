"""Signed manifests through those who check their bytes: what was checked once is not checked less the next time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.keys import manifest_key
from weightcast.channel.records import Manifest, dump_record, load_record
from weightcast.channel.signed import signed
from weightcast.errors import TrustError


@pytest.fixture
def channel(tmp_path: Path) -> SignedChannel:
    return SignedChannel(tmp_path, 1)


def test_signature_at_another_place_in_a_manifest_is_refused(channel: SignedChannel) -> None:
    """Else anybody could give a version another SHA-256, and the version after it would not fit."""
    path = channel.path(manifest_key(1))
    data = path.read_bytes()
    manifest = load_record(Manifest, data)
    field = f'"signature":"{manifest.signature}",'.encode()
    path.write_bytes(b"{" + field + data.replace(field, b"").removeprefix(b"{"))
    assert load_record(Manifest, path.read_bytes()) == manifest
    with pytest.raises(TrustError) as raised:
        channel.chain().manifest(1)
    assert raised.value.reason == "forged"


def test_version_that_was_checked_is_refused_once_its_key_is_revoked(channel: SignedChannel) -> None:
    chain = channel.chain()
    assert chain.guard is not None
    chain.manifest(1)
    channel.revoke("writer")
    chain.guard.refresh()
    with pytest.raises(TrustError) as raised:
        chain.manifest(1)
    assert raised.value.reason == "unknown key"


def test_writer_does_not_continue_another_version_than_it_committed(channel: SignedChannel) -> None:
    weights = arrays(bits_of(1))
    with wc.Publisher(channel.url, weights, threads=1, sign=channel.file("writer"), trust=channel.trust) as publisher:
        weights.write("w", bits_of(2))
        publisher.publish().result(60)
        path = channel.path(manifest_key(2))
        another = replace(load_record(Manifest, path.read_bytes()), label="another")
        path.write_bytes(dump_record(signed(another, another.channel, channel.keys["writer"])))
        weights.write("w", bits_of(3))
        with pytest.raises(TrustError) as raised:
            publisher.publish().result(60)
    assert raised.value.reason == "fork"


def test_key_list_of_an_attacker_beside_the_manifests_stops_no_writer(channel: SignedChannel) -> None:
    """Names in the listing are hints: what counts is an entry that the root has signed and that follows."""
    channel.overwrite("manifests/keyring-999999999999.json", b"{}")
    channel.publish()
    assert channel.pull("mirror", channel.trust).version == 2
