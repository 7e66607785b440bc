"""The publisher's states and events, driven without threads: merging, retries, failures, closing, what receipts say."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_driver import (
    LOST,
    RANKS,
    Driver,
    Event,
    digest,
    patch,
    update,
)

from weightcast.channel.keys import Position
from weightcast.errors import BaseError, StoreError, UnreachableError, UsageError
from weightcast.publish.pipeline import (
    AHEAD,
    Encoded,
    Resolved,
    Scanned,
    Uploaded,
    changes,
    codec_for,
    merged,
    update_of,
)
from weightcast.publish.receipt import Receipt

# -- any order of events -----------------------------------------------------------------------------------------------


def publish_something(driver: Driver) -> None:
    if driver.pipeline.has_room and not driver.pipeline.is_over:
        driver.publish(len(driver.published) + 1)


def publish_the_head_again(driver: Driver) -> None:
    if driver.pipeline.has_room and not driver.pipeline.is_over:
        driver.publish(int(driver.pipeline.head.position.digest, 16))


def resolve(driver: Driver) -> None:
    if driver.can_resolve:
        driver.resolve()


def end_merge(driver: Driver) -> None:
    if driver.in_merge is not None:
        driver.end_merge()


def send(driver: Driver) -> None:
    """Begin to, or get one stage on."""
    if driver.in_send is not None:
        driver.advance()
    elif driver.can_send:
        driver.begin_send()


def store_fails(driver: Driver) -> None:
    if isinstance(driver.in_send, (Encoded, Uploaded)):
        driver.fail()


def answer_is_lost(driver: Driver) -> None:
    if isinstance(driver.in_send, Uploaded):
        driver.advance(lost=True)


def rest_is_over(driver: Driver) -> None:
    driver.end_rest()


def flush_looks(driver: Driver) -> None:
    if driver.pipeline.ended is None:
        assert driver.pipeline.is_flushed(driver.pipeline.failures) == driver.pipeline.is_idle


def sending_fails_for_good(driver: Driver) -> None:
    if driver.in_send is not None:
        driver.pipeline.sending_failed(MemoryError())
        driver.in_send = None


def merging_fails_for_good(driver: Driver) -> None:
    if driver.in_merge is not None:
        driver.pipeline.end(MemoryError())
        driver.in_merge = None


def close(driver: Driver) -> None:
    driver.pipeline.close(LOST)


GOING_ON = [publish_something, publish_the_head_again, *[resolve] * 2, *[end_merge] * 2, *[send] * 4]
GOING_ON += [store_fails, answer_is_lost, rest_is_over, flush_looks]
ENDS = [sending_fails_for_good, merging_fails_for_good, close]


@given(st.lists(st.sampled_from(GOING_ON), max_size=60), st.sampled_from([0, 9]))
@settings(max_examples=500)
def test_events_in_any_order_commit_everything_in_order(events: list[Event], owed: int) -> None:
    driver = Driver(owed)
    for event in events:
        event(driver)
        driver.check()
    driver.work()
    driver.check()
    assert driver.pipeline.is_idle
    if driver.published:
        assert int(driver.pipeline.head.position.digest, 16) == driver.published[-1][0]
    driver.close()
    assert driver.pipeline.ended is None


@given(st.lists(st.sampled_from(GOING_ON * 2 + ENDS), max_size=60), st.sampled_from(ENDS))
@settings(max_examples=500)
def test_no_receipt_is_left_unresolved_at_any_end(events: list[Event], end: Event) -> None:
    driver = Driver()
    for event in (*events, end):
        event(driver)
        driver.check()
        if driver.pipeline.ended is not None:
            under_way = () if driver.in_send is None else update_of(driver.in_send).receipts
            assert all(receipt.done() or receipt in under_way for _, receipt in driver.published)
    driver.close()
    driver.check()
    assert all(receipt.done() for _, receipt in driver.published)


MOVES = ("publish", "resolve", "send", "fail", "retry", "back")


def test_every_short_sequence_commits_everything_in_order() -> None:
    for moves in product(MOVES, repeat=5):
        driver = Driver()
        for number, move in enumerate(moves, 1):
            if move in ("publish", "back") and driver.pipeline.has_room:
                driver.publish(number if move == "publish" else 0)
            elif move == "resolve" and driver.can_resolve:
                driver.resolve()
                driver.end_merge()
            elif move == "send" and driver.can_send:
                driver.begin_send()
                while driver.in_send is not None:
                    driver.advance()
            elif move == "fail" and driver.can_send:
                driver.begin_send()
                if driver.in_send is not None:
                    driver.fail()
            elif move == "retry":
                driver.end_rest()
        driver.work()
        driver.check()
        assert driver.pipeline.is_idle
        values = [0, *(value for value, _ in driver.published)]
        assert int(driver.pipeline.head.position.digest, 16) == values[-1], moves
        driver.close()
        assert driver.pipeline.ended is None


# -- merge -------------------------------------------------------------------------------------------------------------


def test_updates_resolved_during_a_send_become_one_version() -> None:
    driver = Driver()
    driver.publish(1)
    driver.resolve()
    driver.end_merge()
    driver.begin_send()
    for value in (2, 3, 4):
        driver.publish(value)
        driver.resolve()
        driver.end_merge()
    assert not driver.can_send, "one update at a time"
    driver.work()
    assert driver.versions() == [1, 2, 2, 2]
    assert driver.channel[2].step == 3, "the last step that was given"


def test_owed_difference_waits_for_the_first_publish() -> None:
    driver = Driver(owed=7)
    driver.work()
    assert len(driver.channel) == 1, "nothing is committed unasked"
    assert driver.pipeline.is_idle
    driver.publish(7)
    driver.work()
    assert driver.versions() == [1]
    assert driver.channel[1].position.digest == digest(7)


def test_closing_with_only_an_owed_difference_loses_nothing() -> None:
    driver = Driver(owed=7)
    driver.close()
    assert driver.pipeline.ended is None


def test_undone_change_commits_nothing() -> None:
    driver = Driver()
    driver.publish(1)
    driver.publish(0)
    for _ in range(2):
        driver.resolve()
        driver.end_merge()
    driver.work()
    assert driver.versions() == [0, 0]
    assert [receipt.is_new for _, receipt in driver.published] == [False, False]


def test_merge_with_an_empty_update_keeps_ranks_and_bytes() -> None:
    first, second = Receipt(step=4), Receipt()
    whole = merged(update(0, 1, first), update(1, 1, second))
    assert isinstance(whole, Resolved)
    assert (whole.prepared, whole.step, whole.receipts) == (RANKS, 4, (first, second))
    whole = merged(update(0, 0, first), update(0, 1, second))
    assert isinstance(whole, Resolved)
    assert (whole.prepared, whole.step, whole.receipts) == (RANKS, 4, (first, second))
    assert (whole.patch.base, whole.patch.result) == (digest(0), digest(1))
    encoded = merged(Encoded(whole, "banded", b"bytes"), update(1, 1))
    assert isinstance(encoded, Encoded)
    assert encoded.data == b"bytes"


@pytest.mark.parametrize("value", [1, 2], ids=["nothing changed since", "changed since"])
@pytest.mark.parametrize(("first", "later", "kept"), [("a", None, "a"), (None, "b", "b"), ("a", "b", "b")])
def test_merge_keeps_the_last_label_given(first: str | None, later: str | None, kept: str, value: int) -> None:
    whole = merged(update(0, 1, Receipt(label=first)), update(1, value, Receipt(label=later)))
    assert update_of(whole).label == kept


def test_codec_falls_back_to_what_can_carry_the_patch() -> None:
    assert codec_for(update(0, 1), "banded") == "banded"
    assert codec_for(update_of(merged(update(0, 1), update(1, 2))), "banded") == "gap"
    assert codec_for(update_of(merged(update(0, 1), update(1, 2))), "plain") == "plain"
    assert codec_for(Resolved(patch(0, 1, known=False), RANKS), "banded") == "plain"
    assert codec_for(Resolved(patch(0, 1, known=False), RANKS), "gap") == "plain"


def test_patch_that_does_not_begin_at_the_head_is_refused() -> None:
    with pytest.raises(BaseError):
        changes(update(5, 6), Position(3, digest(4)))


# -- failures of the store ---------------------------------------------------------------------------------------------


def sending(driver: Driver, value: int, stage: type) -> None:
    """Publish a value and bring it to a stage."""
    driver.publish(value)
    driver.resolve()
    driver.end_merge()
    driver.begin_send()
    while not isinstance(driver.in_send, stage):
        driver.advance()


def test_failed_upload_is_merged_with_later_publishes() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.fail()
    driver.publish(2)
    driver.work()
    assert driver.versions() == [1, 1]
    assert driver.channel[1].position.digest == digest(2)


def test_failed_upload_alone_is_sent_again_as_the_same_bytes() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.fail()
    driver.end_rest()
    (again,) = driver.pipeline.begin_send()
    assert isinstance(again, Encoded)


def test_commit_that_was_tried_stays_as_it_is() -> None:
    driver = Driver()
    sending(driver, 1, Uploaded)
    driver.advance(lost=True)
    for value in (2, 3):
        driver.publish(value)
        driver.resolve()
        driver.end_merge()
    driver.work()
    assert driver.versions() == [1, 2, 2]


def test_retry_waits_for_scans_that_are_there_but_not_for_later_ones() -> None:
    """Otherwise a trainer that publishes without a pause would delay it indefinitely."""
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.fail()
    assert not driver.pipeline.can_send, "it rests"
    driver.publish(2)
    driver.publish(3)
    driver.end_rest()
    assert not driver.pipeline.can_send
    for more in (True, False):
        driver.resolve()
        driver.end_merge()
        assert driver.pipeline.can_send is not more
        driver.publish(9)
    driver.begin_send()
    assert driver.in_send is not None
    assert len(update_of(driver.in_send).receipts) == 3


def test_only_the_first_failure_in_a_row_is_reported() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    assert driver.fail()
    driver.end_rest()
    driver.begin_send()
    assert not driver.fail()
    driver.work()
    sending(driver, 2, Encoded)
    assert driver.fail()


# -- flush -------------------------------------------------------------------------------------------------------------


def test_flush_raises_a_failure_that_comes_after_it_began_and_hurries_the_retry() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.fail()
    began = driver.pipeline.failures
    assert not driver.pipeline.is_hurried
    assert not driver.pipeline.is_flushed(began), "the failure before it does not count"
    assert driver.pipeline.is_hurried
    driver.end_rest()
    driver.begin_send()
    assert not driver.pipeline.is_hurried
    driver.fail()
    with pytest.raises(UnreachableError):
        driver.pipeline.is_flushed(began)
    driver.work()
    assert driver.pipeline.is_flushed(began), "it was kept for another try"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_failure_of_a_merge_reaches_every_receipt_but_that_of_a_running_commit() -> None:
    driver = Driver()
    sending(driver, 1, Uploaded)
    driver.publish(2)
    driver.resolve()
    driver.end_merge()
    driver.publish(3)
    driver.resolve()
    driver.pipeline.end(MemoryError())
    driver.in_merge = None
    assert driver.versions() == [type(None), MemoryError, MemoryError]
    driver.advance()
    assert driver.versions() == [1, MemoryError, MemoryError]
    assert driver.pipeline.begin_send() == ()


def test_upload_that_fails_after_the_end_gets_the_reason() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.pipeline.end(MemoryError())
    driver.fail()
    assert driver.versions() == [MemoryError]


def test_ended_pipeline_raises_its_error_and_records_that_it_was_raised() -> None:
    driver = Driver()
    sending(driver, 1, Uploaded)
    driver.pipeline.sending_failed(MemoryError())
    driver.in_send = None
    assert not driver.pipeline.was_raised
    with pytest.raises(MemoryError):
        driver.pipeline.is_flushed(0)
    assert driver.pipeline.was_raised
    with pytest.raises(MemoryError):
        driver.pipeline.add(Scanned(2, Receipt()))  # type: ignore[arg-type]


def test_closing_sends_what_waits_while_the_store_works() -> None:
    driver = Driver()
    driver.publish(1)
    driver.resolve()
    driver.end_merge()
    driver.pipeline.close(LOST)
    with pytest.raises(UsageError, match="the publisher is closed"):
        driver.pipeline.refuse_over()
    driver.begin_send()
    while driver.in_send is not None:
        driver.advance()
    driver.begin_send()
    assert driver.versions() == [1]
    assert driver.pipeline.ended is None


def test_closing_after_the_store_is_back_sends_what_waits() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.fail()
    driver.work()
    driver.publish(2)
    driver.resolve()
    driver.end_merge()
    driver.close()
    assert driver.versions() == [1, 2]


def test_closing_after_a_failure_gives_up_what_is_left_and_says_so() -> None:
    driver = Driver()
    sending(driver, 1, Encoded)
    driver.fail()
    driver.publish(2)
    driver.close()
    assert driver.versions() == [StoreError, StoreError]
    assert driver.pipeline.ended is LOST
    assert driver.pipeline.was_raised, "the receipts have it"


def test_few_scans_wait_to_be_resolved() -> None:
    driver = Driver()
    for value in range(AHEAD):
        assert driver.pipeline.has_room
        driver.publish(value)
    assert not driver.pipeline.has_room
    driver.resolve()
    assert not driver.pipeline.has_room, "its changes are still held"
    driver.end_merge()
    assert driver.pipeline.has_room
