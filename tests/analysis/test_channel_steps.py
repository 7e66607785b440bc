"""Steps read from a channel are its versions, bit by bit, whatever its objects are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from anatomies import publish
from cases import same_bits, write_folder

import weightcast as wc
from weightcast.analysis.channel_steps import last_versions, read_steps
from weightcast.channel.chain import Chain
from weightcast.channel.retention import Retention
from weightcast.errors import ChannelError
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.from_checkpoint import publish as publish_checkpoint
from weightcast.store import open_store
from weightcast.upkeep.collect import collect
from weightcast.upkeep.squash import squash


def training(steps: int, seed: int = 0) -> list[wc.Arrays]:
    """Float weights that change a little, one to and fro; an index that changes whole, a tensor that never does."""
    rng = np.random.default_rng(seed)
    w, index, still = rng.standard_normal((40, 30)).astype(np.float32), np.zeros(50, np.int64), np.ones(7, np.float32)
    states = []
    for step in range(steps + 1):
        w[0, 0] = step % 2
        states.append(wc.Arrays({"w": w.copy(), "index": index.copy(), "still": still.copy()}))
        w[rng.integers(0, 40, 20), rng.integers(0, 30, 20)] += 1
        index += 1
    return states


def chain_at(url: Path) -> Chain:
    return Chain.open(open_store(url))


def assert_states(chain: Chain, versions: range, expected: list[wc.Arrays], scratch: Path) -> None:
    scratch.mkdir()
    with read_steps(chain, versions, scratch) as read:
        assert read.first == versions[0] - 1
        assert [commit.position.version for commit in read.manifests] == list(versions)
        for spec in read.steps.table:
            history = read.steps.history(spec)
            found = list(history.states())
            assert len(found) == len(expected)
            for bits, state in zip(found, expected, strict=True):
                assert np.array_equal(bits, state.read(spec.name))
            first, last = spec.elements // 3, spec.elements - 1
            rows = [state.read(spec.name)[first:last] for state in expected]
            assert np.array_equal(history.span(first, last), np.array(rows))


@pytest.mark.parametrize("codec", ["plain", "gap", "banded"])
def test_last_versions_are_read_exactly(codec: str, tmp_path: Path) -> None:
    states = training(5)
    publish(tmp_path / "channel", states, codec)
    chain = chain_at(tmp_path / "channel")
    assert last_versions(chain, 3) == range(3, 6)
    assert last_versions(chain, 100) == range(1, 6)
    assert_states(chain, range(3, 6), states[2:], tmp_path / "some")
    assert_states(chain, range(1, 6), states, tmp_path / "all")


def test_version_that_is_an_anchor_is_a_step_like_others(tmp_path: Path) -> None:
    states = training(4)
    url = tmp_path / "channel"
    publish(url, states[:3])
    for version in (3, 4):
        write_folder(tmp_path / str(version), states[version])
        publish_checkpoint(url, tmp_path / str(version), tmp_path / "home", anchor=version == 3)
    chain = chain_at(url)
    assert chain.manifest(3).base is None
    assert last_versions(chain, 100) == range(1, 5)
    assert_states(chain, range(1, 5), states, tmp_path / "scratch")


def test_version_whose_delta_is_lost_is_read_by_another_route(tmp_path: Path) -> None:
    """From an anchor and a squash over the version before it."""
    states = training(6)
    url = tmp_path / "channel"
    publish(url, states)
    chain = chain_at(url)
    (tmp_path / "weights").mkdir()
    assert [edge.result for edge in squash(chain, tmp_path / "weights", levels=(4,))] == [4]
    (url / chain.manifest(4).key).unlink()
    assert last_versions(chain, 100) == range(1, 7)
    assert_states(chain, range(1, 7), states, tmp_path / "scratch")


def test_versions_that_were_collected_are_left_out(tmp_path: Path) -> None:
    states = training(9)
    url = tmp_path / "channel"
    publish(url, states)
    chain = chain_at(url)
    with wc.Subscriber(chain.store, tmp_path / "mirror", wc.Pinned(6)) as subscriber:
        subscriber.sync()
        cut_anchor(chain, subscriber.mirror)
    collect(chain, Retention(window=0.0, grace=0.0, patience=0.0, keep_last=3))
    versions = last_versions(chain, 100)
    assert versions == range(min(set(chain.versions())) + 1, 10)
    assert_states(chain, versions, states[versions[0] - 1 :], tmp_path / "scratch")


def test_channel_of_one_version_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "channel", training(0))
    with pytest.raises(ChannelError, match="no two successive versions"):
        last_versions(chain_at(tmp_path / "channel"), 8)


def test_training_changes_what_it_should() -> None:
    assert not any(same_bits(old, new) for old, new in pairwise(training(3)))
