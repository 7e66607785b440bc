"""A copy has its source's bytes, whatever happens to either on the way. (Kills and failing calls: tests/faults.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from channels import channel_of, pull, small_model, train
from fake_clock import FakeClock
from scripted_store import Request, ScriptedStore
from waiting import until

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, DELTAS, MANIFESTS, SQUASHES, manifest_key
from weightcast.channel.pins import pin
from weightcast.channel.retention import Retention
from weightcast.channel.tags import read_tag, set_tag
from weightcast.errors import ChannelError, ConflictError, FormatError, MissingError, UnreachableError
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import collect
from weightcast.upkeep.copy import Copied, Copier
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify

LATER = 31.0
"""Seconds after which both buckets are listed again."""


class Regions:
    """A channel, its copy, and the copier between them."""

    def __init__(self, folder: Path):
        self.home, self.copy = ScriptedStore(MemoryStore("home")), ScriptedStore(MemoryStore("copy"))
        self.folder, self.clock = folder, FakeClock()
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.states = channel_of(self.home, 4)
        self.copier = self.opened()

    def opened(self) -> Copier:
        return Copier(self.home, self.copy, self.scratch, clock=self.clock)

    def publish(self, count: int = 1) -> None:
        model = wc.Arrays.copy_of(self.states[-1])
        with wc.Publisher(self.home, model, threads=1) as publisher:
            for _ in range(count):
                train(model, 100 + len(self.states))
                publisher.publish().result(30)
                self.states.append(wc.Arrays.copy_of(model))

    def sync(self) -> list[Copied]:
        """Until nothing is new, both buckets having been listed."""
        self.clock.time += LATER
        return list(iter(self.copier.sync, None))

    def delta(self, version: int) -> str:
        return Chain.open(self.home).manifest(version).objects[0].key

    def cut_anchor(self, version: int) -> None:
        with wc.Subscriber(self.home, self.folder / f"mirror-{version}", wc.Pinned(version), threads=1) as subscriber:
            subscriber.sync()
            cut_anchor(Chain.open(self.home), subscriber.mirror)

    def versions(self) -> list[int]:
        return list(Chain.open(self.copy).versions())

    def kept(self, store: ScriptedStore) -> dict[str, bytes]:
        """All that never changes."""
        kinds = ("channel.json", MANIFESTS, DELTAS, SQUASHES, ANCHORS)
        return {key: store.store.get(key) for kind in kinds for key in store.keys(kind)}

    def holds_all(self) -> bool:
        whole = self.kept(self.copy) == self.kept(self.home) and not list(verify(Chain.open(self.copy)))
        there = wc.Arrays.copy_of(small_model(9))
        pull(self.copy, there)
        return whole and wc.fingerprint(there) == wc.fingerprint(self.states[-1])


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    made = Regions(tmp_path)
    with closing(made.copier):
        yield made


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_copy_has_the_bytes_of_its_source(regions: Regions) -> None:
    (copied,) = regions.sync()
    assert (copied.versions, copied.anchors, copied.problems) == (5, 1, [])
    assert regions.holds_all()
    assert list(regions.scratch.iterdir()) == []


def test_idle_round_is_one_request_and_a_new_version_a_few(regions: Regions) -> None:
    regions.sync()
    regions.home.calls.clear()
    regions.copy.calls.clear()
    assert regions.copier.sync() is None
    assert (len(regions.home.calls), len(regions.copy.calls)) == (1, 0)
    regions.publish()
    regions.home.calls.clear()
    copied = regions.copier.sync()
    assert copied is not None
    assert copied.versions == 1
    assert regions.home.asked("get") == [manifest_key(5), regions.delta(5)]
    assert [verb for verb, _ in regions.copy.calls] == ["put", "create", "put"]
    assert regions.holds_all()


def test_versions_do_not_wait_for_an_anchor_that_is_on_its_way(regions: Regions) -> None:
    regions.sync()
    regions.cut_anchor(4)
    regions.clock.time += LATER
    with regions.copy.hang("put", ANCHORS) as held:
        assert regions.copier.sync(wait=False) is None
        assert held.reached.wait(60)
        regions.publish(2)
        assert [regions.copier.sync(wait=False) for _ in range(2)][-1] is not None
        assert regions.versions() == list(range(7))
        regions.clock.time += LATER
        assert regions.copier.sync(wait=False) is None, "it is listed again, and on its way still"
    until(lambda: (copied := regions.copier.sync(wait=False)) is not None and copied.anchors == 1)
    assert regions.sync() == []
    assert regions.holds_all()
    assert list(regions.scratch.iterdir()) == []


def test_anchor_that_could_not_be_brought_beside_is_brought_after_the_next_listing(regions: Regions) -> None:
    regions.sync()
    regions.cut_anchor(4)
    regions.clock.time += LATER
    rule = regions.copy.fail("put", ANCHORS)
    assert regions.copier.sync(wait=False) is None
    with pytest.raises(UnreachableError):
        until(lambda: regions.copier.sync(wait=False))
    rule.end()
    regions.publish()
    assert regions.copier.sync(wait=False) is not None, "versions go on"
    regions.clock.time += LATER
    until(lambda: (copied := regions.copier.sync(wait=False)) is not None and copied.anchors == 1)
    assert regions.holds_all()


def test_copier_that_is_closed_leaves_an_anchor_to_the_next_one(regions: Regions) -> None:
    regions.sync()
    regions.cut_anchor(4)
    with regions.home.hang("get", ANCHORS) as held, closing(regions.opened()) as copier:
        assert copier.sync(wait=False) is None
        assert held.reached.wait(60)
        held.end()
    assert list(regions.scratch.iterdir()) == []
    (copied,) = regions.sync()
    assert copied.anchors == 1
    assert regions.holds_all()


def test_next_copier_goes_on_where_the_last_one_was(regions: Regions) -> None:
    regions.sync()
    regions.publish(2)
    regions.home.calls.clear()
    with closing(regions.opened()) as copier:
        copied = copier.sync()
    assert copied is not None
    assert copied.versions == 2
    assert sorted(regions.home.asked("get", DELTAS)) == sorted([regions.delta(5), regions.delta(6)])
    assert regions.holds_all()


def test_squashes_and_anchors_cut_later_follow(regions: Regions) -> None:
    regions.sync()
    assert list(squash(Chain.open(regions.home), regions.folder / "squash", levels=(2,)))
    regions.cut_anchor(3)
    assert regions.copier.sync() is None, "nothing is listed so soon"
    (copied,) = regions.sync()
    assert (copied.versions, copied.squashes, copied.anchors) == (0, 2, 1)
    assert regions.holds_all()


def test_what_the_copys_own_gc_deleted_is_not_brought_again(regions: Regions) -> None:
    list(squash(Chain.open(regions.home), regions.folder / "squash", levels=(2,)))
    regions.cut_anchor(4)
    regions.sync()
    for _ in range(2):
        collect(Chain.open(regions.copy), Retention(0, 0, 0))
    left = regions.kept(regions.copy)
    assert regions.versions() == [4]
    assert regions.sync() == []
    assert regions.kept(regions.copy) == left
    regions.publish()
    regions.sync()
    assert regions.versions() == [4, 5]


def test_tags_follow_and_pins_do_not(regions: Regions) -> None:
    home = Chain.open(regions.home)
    set_tag(home, "best", home.manifest(2).position)
    pin(home, 1)
    assert regions.sync()[0].tags == 1
    set_tag(home, "best", home.manifest(3).position, force=True)
    assert regions.sync()[0].tags == 1
    assert read_tag(Chain.open(regions.copy), "best").position.version == 3
    assert regions.sync() == []
    assert regions.copy.keys("pins/") == set()


def test_channel_whose_store_cannot_create_if_absent_is_copied_and_read_near(tmp_path: Path) -> None:
    """Its manifests have their writers' names, and the next version is looked for by a listing."""
    home, near = ScriptedStore(MemoryStore("home")), ScriptedStore(MemoryStore("near"))
    home.overwrite()
    states = channel_of(home, 3)
    assert Chain.open(home).channel.fence == "list"
    with closing(Copier(home, near, tmp_path)) as copier:
        copier.sync()
        held = small_model(9)
        with wc.Subscriber(home, held, near=[near], threads=1) as subscriber:
            subscriber.sync()
            model = wc.Arrays.copy_of(states[-1])
            with wc.Publisher(home, model, threads=1) as publisher:
                train(model, 50)
                publisher.publish().result(30)
            home.calls.clear()
            assert subscriber.sync() is None, "the copy has it not yet"
            copied = copier.sync()
            assert copied is not None
            assert copied.versions == 1
            home.calls.clear()
            assert subscriber.sync() is not None
            assert home.count("get list", (MANIFESTS, DELTAS)) == 0
    assert wc.fingerprint(held) == wc.fingerprint(model)
    with wc.Publisher(home, model, threads=1) as publisher:
        train(model, 51)
        publisher.publish().result(30)
    with wc.Subscriber(home, tmp_path / "mirror", threads=1) as subscriber:
        subscriber.sync()
    with wc.Subscriber(home, tmp_path / "mirror", near=[near], threads=1) as subscriber:
        assert [subscriber.sync() for _ in range(40)] == [None] * 40
        assert subscriber.position is not None
        assert subscriber.position.version == 5, "the copy is at 4"


# -- what must not be overwritten --------------------------------------------------------------------------------------


def test_destination_with_another_channel_is_refused_by_name(tmp_path: Path) -> None:
    home, other = MemoryStore("home"), ScriptedStore(MemoryStore("other"))
    channel_of(home, 1)
    channel_of(other, 1, seed=1)
    before = {listed.key: other.get(listed.key) for listed in other.list("")}
    with pytest.raises(ConflictError, match=r"another channel than memory://home is there \(file memory://other\)"):
        Copier(home, other, tmp_path)
    assert {listed.key: other.get(listed.key) for listed in other.list("")} == before


def test_copy_that_was_published_to_is_refused(regions: Regions) -> None:
    regions.sync()
    model = wc.Arrays.copy_of(regions.states[-1])
    train(model, 99)
    with wc.Publisher(regions.copy, model, threads=1) as publisher:
        publisher.publish().result(30)
    with pytest.raises(ConflictError, match="version 5 of the copy is not that of memory://home"):
        regions.opened()
    regions.publish()
    with pytest.raises(ConflictError, match="version 5 of the copy"):
        regions.opened()
    with pytest.raises(ConflictError, match="version 5 of the copy"):
        regions.sync()


def test_source_that_was_reset_ends_the_copy(regions: Regions) -> None:
    regions.sync()
    for listed in list(regions.home.list("")):
        regions.home.delete(listed.key)
    channel_of(regions.home, 6, seed=1)
    with pytest.raises(ChannelError, match="it was reset"):
        regions.copier.sync()
    with pytest.raises(ConflictError, match="another channel"):
        regions.opened()


# -- damage and collection at the source -------------------------------------------------------------------------------


def test_damaged_delta_is_left_out_with_its_version_until_it_is_repaired(regions: Regions) -> None:
    with regions.home.answer("get", regions.delta(3), flipped):
        (copied,) = regions.sync()
        assert [type(problem) for problem in copied.problems] == [FormatError]
        assert regions.delta(3) in str(copied.problems[0])
        assert regions.versions() == [0, 1, 2]
        assert list(verify(Chain.open(regions.copy))) == []
        assert regions.copier.sync() is None, "it is not tried again at once"
    regions.clock.time += 100.0
    regions.sync()
    assert regions.holds_all()


def test_versions_after_a_damaged_one_come_once_an_anchor_leads_past_it(regions: Regions) -> None:
    damaged = regions.delta(3)
    regions.cut_anchor(4)
    regions.home.answer("get", damaged, flipped)
    (copied,) = regions.sync()
    assert [type(problem) for problem in copied.problems] == [FormatError]
    assert regions.versions() == [0, 1, 2, 4]
    regions.publish()
    regions.sync()
    assert regions.versions() == [0, 1, 2, 4, 5]
    there = small_model(9)
    assert pull(regions.copy, there).version == 5


def test_missing_object_that_a_manifest_names_is_damage(regions: Regions) -> None:
    regions.home.delete(regions.delta(4))
    (copied,) = regions.sync()
    assert [type(problem) for problem in copied.problems] == [MissingError]
    assert regions.versions() == [0, 1, 2, 3]


def test_what_is_collected_while_it_is_copied_is_skipped(regions: Regions) -> None:
    list(squash(Chain.open(regions.home), regions.folder / "squash", levels=(4,)))
    gone = [manifest_key(2), regions.delta(2), manifest_key(3), regions.delta(3), regions.delta(1)]

    def collect_now(request: Request) -> None:
        for key in gone:
            regions.home.delete(key)

    regions.home.delete(manifest_key(1))  # collected before: its object follows a grace period later
    regions.home.before("get", manifest_key(2), collect_now, times=1)
    (copied,) = regions.sync()
    assert copied.problems == []
    assert regions.versions() == [0, 4]
    assert pull(regions.copy, small_model(9)).version == 4


def test_anchor_is_whole_in_the_copy_or_has_no_record(regions: Regions) -> None:
    file = next(key for key in regions.home.keys(ANCHORS) if key.endswith("model.safetensors"))
    with regions.home.fail("get", file), pytest.raises(UnreachableError):
        regions.sync()
    assert not [key for key in regions.copy.keys(ANCHORS) if key.endswith("anchor.json")]
    assert regions.versions() == []
    regions.sync()
    assert regions.holds_all()
