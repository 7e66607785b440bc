"""The events of a version on both sides, and sinks that fail or are slow."""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from channels import blank, channel_of, small_model, train
from scripted_store import ScriptedStore
from sharded import train as train_ranks

import weightcast as wc
from weightcast.errors import UsageError
from weightcast.events.event import PHASES, ROLES, Event
from weightcast.events.phases import Span
from weightcast.publish.pipeline import Encoded, Resolved, merged, update_of
from weightcast.store.memory import MemoryStore

TRAINER = ["detect", "resolve", "encode", "upload", "commit"]
REPLICA = ["find", "fetch", "decode", "verify", "stage", "apply"]


def phases(events: list[Event]) -> list[str]:
    return [event.phase for event in events]


def published(store: wc.Store, versions: int) -> list[Event]:
    events: list[Event] = []
    model = small_model()
    wc.init(store, model)
    with wc.Publisher(store, model, writer="gpu-0", threads=1, on_event=events.append) as publisher:
        for step in range(1, versions + 1):
            train(model, step)
            publisher.publish(step=10 * step).result(60)
    return events


def test_trainer_and_replica_tell_every_phase_of_a_version_under_one_digest() -> None:
    store, told = MemoryStore(), []
    sent = published(store, 1)
    with wc.Subscriber(store, small_model(), threads=1, replica="r-1", on_event=told.append) as subscriber:
        update = subscriber.sync()
        manifest = subscriber.chain.manifest(1)
    assert phases(sent) == TRAINER
    assert phases(told) == REPLICA
    assert update is not None
    assert {event.phase: event.seconds for event in told} == update.seconds
    everybody = {(event.channel, event.version, event.digest) for event in sent + told}
    assert everybody == {(manifest.channel, 1, manifest.position.digest)}
    assert {(event.role, event.name, event.step) for event in sent} == {("trainer", "gpu-0", 10)}
    assert {(event.role, event.name, event.step) for event in told} == {("replica", "r-1", None)}
    nbytes = {event.phase: event.nbytes for event in sent + told if event.nbytes}
    assert nbytes == {"encode": manifest.nbytes, "upload": manifest.nbytes, "fetch": update.nbytes}
    assert all(event.seconds >= 0 for event in sent + told)
    assert sent[0].began <= sent[-1].began <= told[0].began <= told[-1].began
    assert {event.phase for event in sent + told} <= set(PHASES)
    assert {event.role for event in sent + told} <= set(ROLES)


def test_merged_version_has_the_phases_of_all_that_it_carries() -> None:
    """How many are merged depends on the threads; that each scan is told once does not."""
    store, events = ScriptedStore(), []
    model = small_model()
    wc.init(store, model)
    with wc.Publisher(store, model, threads=1, on_event=events.append) as publisher:
        held = store.hang("put", "deltas/")
        for step in range(1, 4):
            train(model, step)
            last = publisher.publish(step=step)
            assert held.reached.wait(60)
        held.end()
        head = last.result(60).position.version
    assert phases([event for event in events if event.version == 1]) == TRAINER
    counts = {phase: phases(events).count(phase) for phase in TRAINER}
    assert counts == {"detect": 3, "resolve": 3, "encode": head, "upload": head, "commit": head}
    first, later = (
        Resolved(patch, None, (), (Span(name, 1.0, 1.0),)) for patch, name in zip(patches(), "ab", strict=True)
    )
    assert [span.phase for span in update_of(merged(first, later)).spans] == ["a", "b"]
    unchanged = wc.diff(small_model(), small_model())
    idle = Resolved(unchanged, None, (), later.spans)  # what was encoded is kept then
    assert [span.phase for span in update_of(merged(Encoded(first, "gap", b""), idle)).spans] == ["a", "b"]


def patches() -> list[wc.Patch]:
    """Two that follow each other."""
    states = [small_model() for _ in range(3)]
    for i, weights in enumerate(states):
        for step in range(i):
            train(weights, step)
    return [wc.diff(one, other) for one, other in pairwise(states)]


def test_upload_that_fails_is_told_once_it_is_committed() -> None:
    store, events = ScriptedStore(), []
    model = small_model()
    wc.init(store, model)
    with wc.Publisher(store, model, threads=1, retry_after=0.01, on_event=events.append) as publisher:
        store.fail("put", "deltas/", times=2)
        train(model, 1)
        publisher.publish(step=1).result(60)
    assert phases(events) == TRAINER


def test_publish_without_a_change_and_idle_rounds_tell_nothing() -> None:
    store, events = MemoryStore(), []
    model = small_model()
    wc.init(store, model)
    with (
        wc.Publisher(store, model, threads=1, on_event=events.append) as publisher,
        wc.Subscriber(store, wc.Arrays.copy_of(model), threads=1, on_event=events.append) as subscriber,
    ):
        publisher.publish(step=1).result(60)
        assert subscriber.sync() is None
    assert events == []


def test_ranks_tell_their_own_phases_and_one_of_them_the_commit() -> None:
    lock, events = threading.Lock(), []

    def sink(event: Event) -> None:
        with lock:
            events.append(event)

    train_ranks(MemoryStore(), 3, range(1, 2), on_event=sink)
    assert len({event.digest for event in events}) == 1
    counts = {phase: phases(events).count(phase) for phase in TRAINER}
    assert counts == {"detect": 3, "resolve": 3, "encode": 3, "upload": 3, "commit": 1}


def test_stream_and_several_sinks(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    first, second = [], []
    model = torch.nn.Linear(4, 4)
    with wc.StreamPublisher(tmp_path, threads=1, on_event=[first.append, second.append]) as publisher:
        publisher.send(model.state_dict().items()).result(60)
        model.bias.data += 1
        publisher.send(model.state_dict().items(), step=7).result(60)
    assert phases(first) == TRAINER
    assert first == second


# -- sinks that misbehave ----------------------------------------------------------------------------------------------


def test_sink_that_raises_is_said_once_and_stops_neither_training_nor_other_sinks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, events = MemoryStore(), []
    model = small_model()
    wc.init(store, model)

    def broken(event: Event) -> None:
        raise RuntimeError("the collector is away")

    with caplog.at_level(logging.WARNING, "weightcast"):
        with wc.Publisher(store, model, threads=1, on_event=[broken, events.append]) as publisher:
            for step in (1, 2):
                train(model, step)
                publisher.publish(step=step).result(60)
        with wc.Subscriber(store, blank(model), threads=1, on_event=broken) as subscriber:
            update = subscriber.sync()
    assert update is not None
    assert update.position.version == 2
    assert phases(events) == 2 * TRAINER
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2  # one by the publisher, one by the subscriber
    assert all("broken lost an event" in text and "RuntimeError: the collector is away" in text for text in warned)


def test_sink_that_exits_does_not_end_the_publishers_thread(caplog: pytest.LogCaptureFixture) -> None:
    store, model = MemoryStore(), small_model()
    wc.init(store, model)
    with wc.Publisher(store, model, threads=1, on_event=lambda event: sys.exit("enough")) as publisher:
        for step in (1, 2):
            train(model, step)
            assert publisher.publish(step=step).result(60).position.version == step
    assert "lost an event" in caplog.text
    assert "SystemExit: enough" in caplog.text


def test_slow_sink_delays_neither_publish_nor_receipt() -> None:
    store, let_go = MemoryStore(), threading.Event()
    model = small_model()
    wc.init(store, model)
    with wc.Publisher(store, model, threads=1, on_event=lambda event: let_go.wait(60)) as publisher:
        train(model, 1)
        assert publisher.publish(step=1).result(60).position.version == 1  # the sink is still inside its first call
        train(model, 2)
        waits = publisher.publish(step=2)
        assert not waits.done()
        let_go.set()
        assert waits.result(60).position.version == 2


def test_interrupt_in_a_sink_is_not_swallowed() -> None:
    store = MemoryStore()
    channel_of(store, 1)

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with (
        wc.Subscriber(store, blank(small_model()), threads=1, on_event=interrupted) as subscriber,
        pytest.raises(KeyboardInterrupt),
    ):
        subscriber.sync()


@pytest.mark.parametrize("given", [7, "events.jsonl", [print, 7]])
def test_what_cannot_take_events_is_refused_when_it_is_given(given: object, tmp_path: Path) -> None:
    store, model = MemoryStore(), small_model()
    channel_of(store, 0)
    with pytest.raises(UsageError, match="cannot take events"):
        wc.Subscriber(store, blank(model), on_event=given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot take events"):
        wc.StreamPublisher(store, on_event=given)  # type: ignore[arg-type]


# -- lines of JSON -----------------------------------------------------------------------------------------------------


def test_lines_have_the_fields_of_the_event(tmp_path: Path) -> None:
    sink, told = wc.JsonLines(tmp_path / "events.jsonl"), []
    with sink:
        model, store = small_model(), MemoryStore()
        wc.init(store, model)
        with wc.Publisher(store, model, threads=1, on_event=[sink, told.append]) as publisher:
            train(model, 1)
            publisher.publish(step=1)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines == [event.as_json() for event in told]
    assert lines[3]["phase"] == "upload"
    assert {line["format"] for line in lines} == {1}
    assert lines[0].keys() == {"format", "bytes"} | {field.name for field in fields(Event)} - {"nbytes"}


def test_lines_are_appended_by_several_threads_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"earlier": true}\n')
    event = Event("apply", "replica", "r" * 300, "0" * 32, 1, "0" * 64, 1.0, 0.5)
    with wc.JsonLines(path) as sink:
        threads = [threading.Thread(target=lambda: [sink(event) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    first, *rest = path.read_text().splitlines()
    assert first == '{"earlier": true}'
    assert [json.loads(line) for line in rest] == [event.as_json()] * 800


def test_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="events cannot be written there"):
        wc.JsonLines(tmp_path / "no" / "folder")


def test_event_after_the_file_is_closed_is_lost_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    channel_of(store, 1)
    sink = wc.JsonLines(tmp_path / "events.jsonl")
    sink.close()
    with wc.Subscriber(store, blank(small_model()), threads=1, on_event=sink) as subscriber:
        assert subscriber.sync() is not None
    assert "JsonLines lost an event" in caplog.text


def test_bits_are_the_same_with_and_without_a_sink() -> None:
    told, quiet = MemoryStore(), MemoryStore()
    published(told, 2)
    channel_of(quiet, 0)
    model = small_model()
    with wc.Publisher(quiet, model, threads=1) as publisher:
        for step in (1, 2):
            train(model, step)
            publisher.publish(step=step)
    here = [blank(small_model()) for _ in range(2)]
    for store, weights in zip((told, quiet), here, strict=True):
        with wc.Subscriber(store, weights, threads=1) as subscriber:
            subscriber.sync()
    assert all(np.array_equal(here[0].read(spec.name), here[1].read(spec.name)) for spec in here[0].table)
