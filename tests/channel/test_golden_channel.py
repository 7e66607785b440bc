"""The golden channel through two readers that share no code. Its files are never changed (SPEC 9.4)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cases import Bag
from simple_channel import Channel
from simple_reader import position

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.pins import pins
from weightcast.store import open_store
from weightcast.upkeep.verify import verify, verify_deep

GOLDEN = Path(__file__).parents[1] / "vectors" / "channel-v1"
BUCKET = GOLDEN / "bucket"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def test_reader_of_the_spec_alone_replays_every_version() -> None:
    channel = Channel(BUCKET)
    weights = channel.anchor(0)
    digests = [position(weights, channel.aliases)]
    for version in range(channel.head()):
        weights = channel.step(weights, version)
        digests.append(position(weights, channel.aliases))
    assert digests == EXPECTED


@pytest.mark.parametrize(("base", "result"), [(0, 4), (4, 8), (0, 8)])
def test_reader_of_the_spec_alone_takes_squashes(base: int, result: int) -> None:
    channel = Channel(BUCKET)
    weights = channel.anchor(0)
    for version in range(base):
        weights = channel.step(weights, version)
    assert position(channel.leap(weights, base, result), channel.aliases) == EXPECTED[result]


def test_reader_of_the_spec_alone_starts_at_a_later_anchor() -> None:
    channel = Channel(BUCKET)
    assert position(channel.anchor(5), channel.aliases) == EXPECTED[5]


@pytest.mark.parametrize("version", range(len(EXPECTED)))
def test_every_version_can_be_pulled(version: int, tmp_path: Path) -> None:
    with wc.Subscriber(BUCKET, tmp_path / "mirror", wc.Pinned(version)) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged) == wc.Position(version, EXPECTED[version])
        weights = subscriber.weights
        assert weights is not None
        assert wc.fingerprint(weights).digest == EXPECTED[version]


def test_golden_channel_verifies(tmp_path: Path) -> None:
    chain = Chain.open(open_store(BUCKET))
    assert list(verify(chain)) == []
    proven = dict(verify_deep(chain, tmp_path / "walk"))
    assert len(proven) == 10 + 3 + 2
    assert set(proven.values()) == {None}
    assert set(pins(chain)) == {3}


def test_writer_continues_the_golden_channel(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    shutil.copytree(BUCKET, bucket)
    table = Chain.open(open_store(bucket)).channel.table
    weights = Bag({spec: _zeros(spec) for spec in table}, dict(table.aliases))
    with wc.Publisher(bucket, weights) as publisher:
        manifest = publisher.publish().result(30)
    assert manifest.position.version == len(EXPECTED), "the way from the head to other weights"


def _zeros(spec: wc.TensorSpec) -> object:
    import numpy as np

    return np.zeros(spec.elements, spec.kind.word)
