"""A reader of several buckets takes the nearest that has what it needs, falls back, comes back, and never goes back."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest
from channels import channel_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from regions import Regions, Source, flipped
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.keys import ANCHORS, DELTAS, MANIFESTS, manifest_key
from weightcast.errors import AccessError, MissingError, UnreachableError, UsageError, WeightcastError
from weightcast.follow.subscriber import Subscriber
from weightcast.store.memory import MemoryStore

SOURCE = Source()
LOOK = 31.0
"""Seconds after which the home is looked at."""


@pytest.fixture
def regions() -> Regions:
    return Regions(SOURCE)


def polled(subscriber: Subscriber, rounds: int = 1, seconds: float = 0.0) -> int | None:
    """Sync some rounds; the version held then."""
    for _ in range(rounds):
        subscriber.sync()
        assert isinstance(subscriber.position, wc.Position)
    return subscriber.position.version


def test_copy_is_read_and_the_home_written(regions: Regions) -> None:
    regions.publish(3)
    regions.bring()
    with regions.reader(replica="r") as subscriber:
        assert polled(subscriber) == 3
        assert regions.home.asked("get", (MANIFESTS, DELTAS, ANCHORS)) == []
        assert regions.home.keys("replicas/") == {"replicas/r.json"}
        assert regions.copy.keys("replicas/") == set()
        regions.forget()
        polled(subscriber, 20)
        assert (regions.home.count(), regions.copy.count()) == (0, 20)


def test_copy_that_lags_is_waited_for(regions: Regions) -> None:
    """Else every reader would fetch every version from the home, which has it sooner."""
    with regions.reader() as subscriber:
        polled(subscriber)
        regions.publish(2)
        assert polled(subscriber, 3) == 0
        regions.bring(1)
        assert polled(subscriber) == 1
        regions.bring(1)
        assert polled(subscriber) == 2
        assert regions.home.asked("get", DELTAS) == []


@pytest.mark.parametrize("error", [UnreachableError, AccessError, MissingError("no bucket", url="memory://copy")])
def test_home_is_read_while_the_copy_is_away_and_the_copy_once_it_is_back(
    regions: Regions, error: WeightcastError, caplog: pytest.LogCaptureFixture
) -> None:
    with regions.reader() as subscriber, caplog.at_level(logging.INFO, "weightcast"):
        polled(subscriber)
        with regions.copy.fail("", "", error):  # type: ignore[arg-type]
            regions.publish(2)
            assert polled(subscriber) == 2
            regions.clock.time += 100
            assert polled(subscriber) == 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        regions.bring()
        regions.clock.time += 100
        polled(subscriber)
        regions.publish()
        regions.bring()
        regions.forget()
        assert polled(subscriber) == 3
        assert regions.home.count("get", (MANIFESTS, DELTAS)) == 0
        assert caplog.messages[-1] == "reading from memory://copy again"


def test_copy_comes_back_once_it_has_what_was_read_elsewhere(regions: Regions) -> None:
    with regions.reader() as subscriber:
        polled(subscriber)
        with regions.copy.fail():
            regions.publish(3)
            assert polled(subscriber) == 3
            regions.clock.time += 10
            polled(subscriber)
        regions.bring(1)
        regions.clock.time += 100
        regions.publish()
        assert polled(subscriber) == 4, "the copy is at 1: the home is read"
        regions.bring(2)
        regions.clock.time += 100
        regions.forget()
        assert polled(subscriber, 40) == 4, "the copy is at 3, which it was waited for, and leads nowhere back"
        assert regions.copy.count() >= 40
        regions.bring(1)
        regions.publish()
        regions.bring()
        regions.forget()
        assert polled(subscriber, 2) == 5
        assert regions.home.count("get", (MANIFESTS, DELTAS)) == 0


def test_reader_that_starts_again_does_not_go_back_to_where_a_copy_is(regions: Regions, tmp_path: Path) -> None:
    regions.publish(2)
    with wc.Subscriber(regions.home, tmp_path / "mirror", threads=1) as subscriber:
        subscriber.sync()
    regions.bring(1)

    def again() -> int:
        with wc.Subscriber(
            regions.home, tmp_path / "mirror", near=[regions.copy], threads=1, clock=regions.clock
        ) as subscriber:
            return polled(subscriber, 40) or 0

    assert again() == 2
    with regions.home.fail(), pytest.raises(UnreachableError):
        again()
    assert again() == 2, "and the mirror was not touched"


def test_copies_are_enough_while_the_home_is_away(regions: Regions) -> None:
    with regions.reader() as subscriber:
        polled(subscriber)
        regions.publish(2)
        regions.bring()
        with regions.home.fail():
            regions.clock.time += LOOK
            assert polled(subscriber, 40) == 2
    with regions.home.fail(), regions.reader() as subscriber:
        assert polled(subscriber) == 2


def test_copy_that_is_no_longer_brought_forward_is_left(regions: Regions) -> None:
    with regions.reader() as subscriber:
        polled(subscriber)
        regions.publish(3)
        for _ in range(3):
            regions.clock.time += LOOK
            polled(subscriber)
        assert subscriber.position is not None
        assert subscriber.position.version == 3
        regions.bring()
        regions.clock.time += 100
        polled(subscriber)
        regions.publish()
        regions.bring()
        regions.forget()
        assert polled(subscriber) == 4
        assert regions.home.count("get", (MANIFESTS, DELTAS)) == 0


def test_object_that_a_copy_has_damaged_is_taken_from_the_home(regions: Regions) -> None:
    with regions.reader() as subscriber:
        polled(subscriber)
        regions.publish(2)
        regions.bring()
        (delta,) = regions.copy.keys(f"{DELTAS}{1:012d}")
        regions.copy.answer("get", delta, flipped)
        assert polled(subscriber) == 2
        assert regions.home.asked("get", DELTAS) == [delta]
        assert regions.version() == 2


def test_object_that_is_damaged_everywhere_is_given_up_as_before(regions: Regions) -> None:
    with regions.reader() as subscriber:
        polled(subscriber)
        regions.publish(2)
        regions.bring()
        for store in (regions.home, regions.copy):
            store.answer("get", next(iter(store.keys(f"{DELTAS}{2:012d}"))), flipped)
        update = subscriber.sync()
        assert update is not None
        assert update.position.version == 1
        assert "SHA-256" in str(update.short)


def test_manifest_that_a_copy_has_damaged_is_taken_from_the_home(regions: Regions) -> None:
    with regions.reader() as subscriber:
        polled(subscriber)
        regions.publish()
        regions.bring()
        regions.copy.answer("get", manifest_key(1), lambda data: data[:-2])
        assert polled(subscriber) == 1
        assert manifest_key(1) in regions.home.asked("get")


def test_copy_of_another_channel_is_refused_by_name(regions: Regions) -> None:
    other = MemoryStore("other")
    channel_of(other, 3, seed=1)
    with pytest.raises(UsageError, match=r"not a copy of memory://home \(file memory://other\)"):
        wc.Subscriber(regions.home, regions.weights, near=[other], threads=1)


def test_reset_at_the_home_is_followed_although_the_copy_has_the_old_channel(regions: Regions) -> None:
    regions.publish(2)
    regions.bring()
    with regions.reader() as subscriber:
        assert polled(subscriber) == 2
        for listed in list(regions.home.list("")):
            regions.home.delete(listed.key)
        states = channel_of(regions.home, 1, seed=1)
        regions.clock.time += LOOK
        subscriber.sync()
        for _ in range(40):
            subscriber.sync()
        assert wc.fingerprint(regions.weights) == wc.fingerprint(states[1])


def test_several_copies_are_read_in_their_order(regions: Regions) -> None:
    far = ScriptedStore(MemoryStore("far"))
    regions.publish()
    regions.bring()
    for version in (0, 1):
        SOURCE.put(version, far)
    with wc.Subscriber(
        regions.home, regions.weights, near=[regions.copy, far], threads=1, clock=regions.clock
    ) as subscriber:
        with regions.copy.fail():
            assert polled(subscriber) == 1
        assert regions.home.asked("get", (MANIFESTS, DELTAS, ANCHORS)) == []
        regions.clock.time += 10
        far.calls.clear()
        polled(subscriber)
        assert far.count() == 0


EVENTS = st.sampled_from(
    ["publish", "bring", "home away", "copy away", "home back", "copy back", "wait", "look", "start"]
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_whatever_happens_a_reader_holds_a_version_and_never_an_older_one(events: list[str]) -> None:
    regions, held = Regions(SOURCE), 0
    subscriber = regions.reader()
    subscriber.sync()
    for event in events:
        store = regions.home if event.startswith("home") else regions.copy
        if event == "publish" and regions.published < len(SOURCE.states) - 1:
            regions.publish()
        elif event == "bring":
            regions.bring(min(1, regions.published - regions.copied))
        elif event.endswith("away"):
            store.fail()
        elif event.endswith("back"):
            store.behave()
        elif event in ("wait", "look"):
            regions.clock.time += 2.0 if event == "wait" else LOOK
        elif event == "start":
            subscriber.close()
            regions.home.behave()
            subscriber = regions.reader()
        with suppress(UnreachableError):
            subscriber.sync()
        assert regions.version() >= held
        held = regions.version()
        assert held <= regions.published
    regions.home.behave()
    regions.copy.behave()
    regions.bring()
    for _ in range(4):
        regions.clock.time += 100
        subscriber.sync()
    assert regions.version() == regions.published
    subscriber.close()
