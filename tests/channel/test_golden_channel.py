"""The golden channel through two readers that share no code. A release never changes its files (SPEC 9.4)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cases import Bag
from simple_channel import Channel
from simple_reader import position, read_container, read_metadata, unpack
from simple_table import read_table

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


def test_version_of_several_objects_is_in_boxes() -> None:
    objects = Channel(BUCKET).manifest(7)["objects"]  # type: ignore[index]
    labels, codecs = [], []
    for key, _, _ in objects:
        metadata, entries = read_container((BUCKET / key).read_bytes())
        meta = read_metadata(metadata)
        digests = unpack(entries["weightcast.digests"].raw, 64)
        old = Channel(BUCKET).anchor(0)  # any version: of its tensors only the names and shapes are asked for
        codecs.append(meta["codec"])
        labels += [row.label for row in read_table(entries, meta["table"], digests, meta["codec"], old)]
    assert codecs == ["banded", "plain", "gap"]
    assert sorted(labels) == ["a.weight[0,0]", "a.weight[0,10]", "a.weight[0,5]", "b.weight"]


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
