"""Events as spans of OpenTelemetry: one trace for each version, across all processes that had to do with it."""

from __future__ import annotations

import hashlib

from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TracerProvider,
    get_tracer,
    set_span_in_context,
)

from weightcast.events.event import Event


def trace_ids(channel: str, version: int, digest: str) -> tuple[int, int]:
    """The id of a version's trace, and that of the span that all its phases have as parent.

    They are the first 16 bytes of a SHA-256, and the next 8: over the channel's id, the version and its position
    digest, which stand in the version's manifest. So everybody who knows the manifest knows them.
    """
    seed = hashlib.sha256(f"weightcast trace 1\n{channel}\n{version}\n{digest}".encode()).digest()
    return int.from_bytes(seed[:16]) or 1, int.from_bytes(seed[16:24]) or 1


class Traces:
    """A sink that makes a span of each event. Needs `opentelemetry-api`: ``pip install 'weightcast[otel]'``.

    All spans of a version are in one trace, whoever made them: trainer, replicas, agents and engines, without a word
    between them (`trace_ids`). Their common parent is recorded by nobody. Where they go is up to the program's
    `TracerProvider`; without one that is installed, nowhere.

    >>> publisher = wc.Publisher(url, model, on_event=Traces())                         # doctest: +SKIP
    """

    def __init__(self, provider: TracerProvider | None = None):
        """Spans are made by ``provider``, by default by the program's."""
        self._tracer = get_tracer("weightcast", tracer_provider=provider)

    def __call__(self, event: Event) -> None:
        trace, parent = trace_ids(event.channel, event.version, event.digest)
        above = SpanContext(trace, parent, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        attributes: dict[str, str | int] = {
            "weightcast.phase": event.phase,
            "weightcast.role": event.role,
            "weightcast.channel": event.channel,
            "weightcast.version": event.version,
            "weightcast.digest": event.digest,
            "weightcast.bytes": event.nbytes,
        }
        if event.name is not None:
            attributes["weightcast.name"] = event.name
        if event.step is not None:
            attributes["weightcast.step"] = event.step
        span = self._tracer.start_span(
            f"weightcast {event.phase}",
            set_span_in_context(NonRecordingSpan(above)),
            attributes=attributes,
            start_time=round(1e9 * event.began),
        )
        span.end(round(1e9 * (event.began + event.seconds)))
