"""Sizes are those of the objects that would be published, byte for byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from anatomies import DIRECT, MASTERS, publish, runs
from anatomy import recorded, steps_of
from cases import Bag
from hypothesis import given, settings

import weightcast as wc
from weightcast.analysis.anatomy import anatomy_of
from weightcast.channel.chain import Chain
from weightcast.format.codec import CODECS
from weightcast.format.diff import diff
from weightcast.format.patchfile import encode
from weightcast.store import open_store


@given(runs())
@settings(max_examples=40)
def test_every_size_is_that_of_the_encoded_patch(states: list[Bag]) -> None:
    found = anatomy_of(steps_of(states)).sizes
    for codec in CODECS:
        pairs = itertools.pairwise(states)
        assert list(found.codecs[codec]) == [len(encode(diff(old, new), codec, old)) for old, new in pairs]
    for each, sizes in found.windows.items():
        starts = range(0, len(states) - each, each)
        ends = [(states[at], states[at + each]) for at in starts]
        assert list(sizes) == [len(encode(diff(old, new), "banded", old)) for old, new in ends]


@pytest.mark.parametrize("trace", [MASTERS, DIRECT], ids=["masters", "direct"])
def test_sizes_are_those_of_the_published_deltas(trace: Path, tmp_path: Path) -> None:
    states: list[wc.Arrays] = recorded(trace)
    publish(tmp_path / "channel", states)
    chain = Chain.open(open_store(tmp_path / "channel"))
    published = [chain.manifest(version).nbytes for version in range(1, len(states))]
    assert list(anatomy_of(steps_of(states)).sizes.codecs["banded"]) == published
