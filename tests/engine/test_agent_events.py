"""The events of an agent: its own, its mirror's and its engine's, as far as one version is concerned."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("opentelemetry.sdk")

from local_engine import Local, Training, attached  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from weightcast.engine.messages import Outcome, UpdateEngine  # noqa: E402
from weightcast.events.event import PHASES, ROLES, Event  # noqa: E402
from weightcast.events.traces import Traces, trace_ids  # noqa: E402


class Told:
    """A sink that may be called by any thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def phases(self, version: int, role: str) -> list[str]:
        return [event.phase for event in self.events if (event.version, event.role) == (version, role)]


@pytest.mark.parametrize("ranks", [1, 2], ids=["workers decode", "decoded in part beside them"])
def test_version_has_the_phases_of_agent_engine_and_mirror(training: Training, tmp_path: Path, ranks: int) -> None:
    told, engine = Told(), Local(training.weights, ranks=ranks)
    with attached(training, engine, tmp_path, replica="rack-7", on_event=told, prove=True) as agent:
        agent.step()
        training.step(1)
        update = agent.step()
        assert update is not None
        agent.catch_up()
    assert told.phases(1, "agent") == ["find", "fetch", "verify", "stage"]
    assert told.phases(1, "engine") == ["pause", "apply", "prove", "resume"]
    assert told.phases(1, "mirror") == ["find", "fetch", "decode", "verify", "stage", "apply"]
    found = [event for event in told.events if event.version == 1]
    assert {(event.name, event.digest) for event in found} == {("rack-7", update.position.digest)}
    paused = [event for event in found if event.role == "engine"]
    assert sum(event.seconds for event in paused) == pytest.approx(update.pause)
    for one, two in pairwise(paused):  # one after the other
        assert one.began + one.seconds == pytest.approx(two.began, rel=0, abs=1e-5)
    (staged,) = (event for event in found if (event.role, event.phase) == ("agent", "stage"))
    assert staged.nbytes == update.nbytes > 0
    assert staged.began <= paused[0].began
    assert {event.phase for event in told.events} <= set(PHASES)
    assert {event.role for event in told.events} <= set(ROLES)


def test_trainer_agent_mirror_and_engine_make_one_trace_of_a_version(tmp_path: Path) -> None:
    """From what the trainer found to the end of the engine's pause; nothing but the manifest went between them."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider)
    training = Training(tmp_path, on_event=traces)
    with attached(training, Local(training.weights), tmp_path, on_event=traces) as agent:
        agent.step()
        training.step(1)
        update = agent.step()
        agent.catch_up()
        channel = agent.subscriber.chain.channel.id
    training.close()
    assert update is not None
    ids = trace_ids(channel, 1, update.position.digest)
    spans = [span for span in exporter.get_finished_spans() if (span.attributes or {})["weightcast.version"] == 1]
    assert {(span.context.trace_id, span.parent and span.parent.span_id) for span in spans if span.context} == {ids}
    roles = [
        (span.attributes or {})["weightcast.role"] for span in sorted(spans, key=lambda span: span.start_time or 0)
    ]
    assert set(roles) == {"trainer", "agent", "engine", "mirror"}
    first = {role: roles.index(role) for role in ("trainer", "agent", "engine")}
    assert first["trainer"] < first["agent"] < first["engine"]


class Talkative(Local):
    """Its answers have phases that no engine has."""

    def update(self, update: UpdateEngine) -> Outcome:
        outcome = super().update(update)
        more = {f"\x1b[31m{number}": 2**62 for number in range(100)}
        return replace(outcome, microseconds={**outcome.microseconds, **more})


def test_phases_that_an_engine_makes_up_are_ignored(training: Training, tmp_path: Path) -> None:
    """They would be labels of metrics, and a heartbeat with them would be refused by all who read it."""
    told = Told()
    with attached(training, Talkative(training.weights), tmp_path, replica="rack-7", on_event=told) as agent:
        agent.step()
        training.step(1)
        update = agent.step()
        agent.catch_up()
        assert agent.last is update
        assert update is not None
        assert update.pause < 3600
        assert set(update.seconds) <= set(PHASES)
    assert {event.phase for event in told.events} <= set(PHASES)


def test_agent_whose_sink_fails_updates_the_engine(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise OSError("no room")

    with attached(training, Local(training.weights), tmp_path, on_event=broken) as agent:
        agent.step()
        training.step(1)
        update = agent.step()
        agent.catch_up()
    assert update is not None
    assert update.position.version == 1
    assert caplog.text.count("broken lost an event") == 1, "also what its followers send goes through the agent"
