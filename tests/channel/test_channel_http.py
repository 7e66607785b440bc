"""A public channel over http: read-only, without listings, from a plain file server."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import same_bits
from channels import blank, channel_of, head_of, pull, train
from servers import serving_folder

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.tags import delete_tag, read_tag, set_tag, tag_names, tags, tags_by_position
from weightcast.errors import UnsupportedError, UsageError
from weightcast.store import open_store
from weightcast.store.file import FileStore
from weightcast.upkeep.squash import squash


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def test_late_replica_follows_over_http(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    states = channel_of(bucket, 11)
    list(squash(Chain.open(bucket), tmp_path / "scratch"))
    with serving_folder(tmp_path / "bucket") as web:
        there = blank(states[0])
        assert pull(open_store(web.url), there) == head_of(bucket)
        assert same_bits(there, states[11])
        with wc.Subscriber(web.url, tmp_path / "mirror", replica="eu-1") as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            assert [patch.position.version for patch in staged.patches] == [8, 9, 10, 11]
            subscriber.apply(staged)
            with wc.Publisher(bucket, states[11]) as publisher:
                train(states[11], 99)
                publisher.publish(step=99)
            assert next(subscriber.follow(every=0.01)).position.version == 12


def test_versions_that_the_index_does_not_show_yet_are_found(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    states = channel_of(bucket, 2)
    write_index(Chain.open(bucket))
    with wc.Publisher(bucket, states[2]) as publisher:
        for step in range(5):
            train(states[2], 50 + step)
            publisher.publish().result(60)
    with serving_folder(tmp_path / "bucket") as web:
        there = wc.Arrays.copy_of(states[0])
        assert pull(open_store(web.url), there).version == 7
        assert same_bits(there, states[2])


def test_head_is_found_from_the_hint_without_an_index(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    states = channel_of(bucket, 4)
    bucket.delete("index.json")
    with serving_folder(tmp_path / "bucket") as web, wc.Subscriber(web.url, states[2], wc.Newest()) as subscriber:
        head = subscriber.chain.head()
        assert head is not None
        assert head.position.version == 4


def test_deleted_tag_that_an_old_index_names_is_not_believed(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    channel_of(bucket, 1)
    chain = Chain.open(bucket)
    set_tag(chain, "gone", chain.manifest(1).position)
    write_index(chain)
    delete_tag(chain, "gone")
    with serving_folder(tmp_path / "bucket") as web:
        served = Chain.open(open_store(web.url))
        assert list(tag_names(served)) == ["gone"]
        assert (tags(served), tags_by_position(served)) == (([], []), {})
        with pytest.raises(UsageError, match="there is no tag 'gone'"):
            read_tag(served, "gone")


def test_nothing_can_be_published_over_http(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    states = channel_of(bucket, 1)
    with (
        serving_folder(tmp_path / "bucket") as web,
        pytest.raises(UnsupportedError, match="nothing can be written over http"),
    ):
        wc.Publisher(web.url, states[1])
