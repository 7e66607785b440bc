"""Spans of OpenTelemetry: one trace for a version, whoever made them, in whatever process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import weightcast as wc
from weightcast.events.traces import Traces, trace_ids

EVENT = wc.Event("fetch", "agent", "rack-7", "c" * 32, 41, "d" * 64, 1000.25, 0.5, nbytes=77)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


def test_span_has_the_times_and_the_facts_of_its_event(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    Traces(provider)(EVENT)
    Traces(provider)(replace(EVENT, phase="commit", name=None, step=410))
    first, second = exporter.get_finished_spans()
    assert (first.name, first.start_time, first.end_time) == ("weightcast fetch", 1_000_250_000_000, 1_000_750_000_000)
    assert dict(first.attributes or {}) == {
        "weightcast.phase": "fetch",
        "weightcast.role": "agent",
        "weightcast.name": "rack-7",
        "weightcast.channel": "c" * 32,
        "weightcast.version": 41,
        "weightcast.digest": "d" * 64,
        "weightcast.bytes": 77,
    }
    assert (second.attributes or {})["weightcast.step"] == 410
    assert "weightcast.name" not in (second.attributes or {})
    assert first.instrumentation_scope is not None
    assert first.instrumentation_scope.name == "weightcast"


def test_trace_depends_on_channel_version_and_digest_alone(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    others = [replace(EVENT, channel="e" * 32), replace(EVENT, version=42), replace(EVENT, digest="f" * 64)]
    same = replace(EVENT, role="trainer", phase="detect", name="gpu-0", began=1.0)
    for event in (EVENT, same, *others):
        Traces(provider)(event)
    traces = [span.context.trace_id for span in exporter.get_finished_spans()]
    assert traces[0] == traces[1] == trace_ids("c" * 32, 41, "d" * 64)[0]
    assert len(set(traces)) == 4
    assert {span.parent and span.parent.span_id for span in exporter.get_finished_spans()[:2]} == {
        trace_ids("c" * 32, 41, "d" * 64)[1]
    }


def test_ids_are_what_the_guide_says() -> None:
    """So that a program in another language may link to a version's trace."""
    assert [f"{one:x}" for one in trace_ids("0" * 32, 1, "a" * 64)] == [
        "5b84351e2ecc7ab0a07b640fdee22e18",
        "5cf2aeb41db78b13",
    ]


def test_span_of_the_program_around_it_is_not_its_parent(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer("the program", tracer_provider=provider)
    with tracer.start_as_current_span("a training step"):
        Traces(provider)(EVENT)
    inner, outer = exporter.get_finished_spans()
    assert outer.name == "a training step"
    assert inner.context.trace_id != outer.context.trace_id


def test_without_a_provider_nothing_happens() -> None:
    Traces()(EVENT)


PROCESS = """
import json, sys
import numpy as np
import weightcast as wc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weightcast.events.traces import Traces

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
url, what = sys.argv[1:]
weights = wc.Arrays({"w": np.zeros(1000, np.float32)})
if what == "trainer":
    with wc.Publisher(url, weights, on_event=Traces(provider)) as publisher:
        for step in (1, 2):
            weights.read("w")[step] = 7
            publisher.publish(step=step).result()
else:
    for version in (1, 2):
        with wc.Subscriber(url, weights, wc.Pinned(version), replica="r", on_event=Traces(provider)) as subscriber:
            subscriber.sync()
spans = [
    {"name": span.name, "trace": span.context.trace_id, "parent": span.parent.span_id, "start": span.start_time,
     "end": span.end_time, **span.attributes}
    for span in exporter.get_finished_spans()
]
print(json.dumps(spans))
"""


def spans_of(url: Path, what: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", PROCESS, url, what], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_trainer_and_replica_in_two_processes_make_one_trace_of_a_version(tmp_path: Path) -> None:
    sent, taken = spans_of(tmp_path, "trainer"), spans_of(tmp_path, "replica")
    with wc.Subscriber(tmp_path, wc.Arrays({"w": np.zeros(1000, np.float32)})) as subscriber:
        manifests = [subscriber.chain.manifest(version) for version in (1, 2)]
    assert len({span["trace"] for span in sent + taken}) == 2
    for manifest in manifests:
        position = manifest.position
        ids = trace_ids(manifest.channel, position.version, position.digest)
        spans = [span for span in sent + taken if span["weightcast.version"] == position.version]
        assert {(span["trace"], span["parent"]) for span in spans} == {ids}
        names = [span["name"].removeprefix("weightcast ") for span in spans]
        assert names == [
            *("detect", "resolve", "encode", "upload", "commit"),
            *("find", "fetch", "decode", "verify", "stage", "apply"),
        ]
        assert [span["weightcast.role"] for span in spans] == ["trainer"] * 5 + ["replica"] * 6
        starts = [span["start"] for span in spans]
        assert starts == sorted(starts), "from detection to live"
        assert all(span["start"] <= span["end"] for span in spans)
