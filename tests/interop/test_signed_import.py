"""Importing into a channel that is signed, of which the mirror has seen more than the bucket shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from signed_channel import SignedChannel, arrays, bits_of

from weightcast.channel.trust import signing_of
from weightcast.disk.checkpoint import save
from weightcast.errors import TrustError
from weightcast.interop.importing import import_steps
from weightcast.interop.layouts import opened


def test_channel_that_lost_versions_which_the_mirror_has_seen_is_not_begun_again(tmp_path: Path) -> None:
    channel = SignedChannel(tmp_path, versions=2)
    channel.pull("mirror", channel.trust)
    for listed in [*channel.store.list("manifests/"), *channel.store.list("head.json")]:
        channel.store.delete(listed.key)
    step, room = tmp_path / "history" / "checkpoint-10", tmp_path / "room"
    step.mkdir(parents=True)
    room.mkdir()
    save(arrays(bits_of(5)), step)
    signing = signing_of(channel.trust, channel.file("writer"))
    with pytest.raises(TrustError, match=r"2 was seen before.*weightcast pull"):
        list(import_steps(channel.store, opened(step.parent), room, tmp_path / "mirror", signing=signing))
    assert list(channel.store.list("manifests/")) == []
