"""The golden channel that is signed, through two checkers that share no code. A release never changes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simple_trust import Checker

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.trust import Signing, Trust
from weightcast.store import open_store
from weightcast.upkeep.verify import verify, verify_deep

GOLDEN = Path(__file__).parents[1] / "vectors" / "channel-signed-v1"
BUCKET = GOLDEN / "bucket"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def test_checker_of_the_spec_alone_finds_the_golden_signatures_right() -> None:
    checker = Checker(BUCKET, EXPECTED["root"])
    checker.manifests()
    checker.anchors()
    checker.squashes()
    assert checker.counts == {"channel": 1, "keyring": 5, "manifest": 7, "anchor": 2, "squash": 1}


@pytest.mark.parametrize("version", range(7))
def test_every_signed_version_can_be_pulled(version: int, tmp_path: Path) -> None:
    with wc.Subscriber(BUCKET, tmp_path / "mirror", wc.Pinned(version), trust=EXPECTED["root"]) as subscriber:
        subscriber.sync()
        assert subscriber.position == wc.Position(version, EXPECTED["positions"][version])


def test_golden_signed_channel_verifies(tmp_path: Path) -> None:
    chain = Chain.open(open_store(BUCKET), Signing(Trust(EXPECTED["root"])))
    assert list(verify(chain)) == []
    assert set(dict(verify_deep(chain, tmp_path / "walk")).values()) == {None}
    assert [beat.replica for beat, _ in heartbeats(chain)] == ["golden"]
