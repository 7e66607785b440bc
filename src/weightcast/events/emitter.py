"""Sending events to sinks: a sink that fails stops nothing, and is not silent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from weightcast.errors import UsageError
from weightcast.events.event import Event, Sink
from weightcast.events.phases import Span

_log = logging.getLogger("weightcast")

OnEvent = Sink | Sequence[Sink]
"""A sink, or several."""


class Emitter:
    """Makes events of spans, and sends them to sinks."""

    def __init__(self, on_event: OnEvent, role: str, name: str | None):
        sinks = (on_event,) if callable(on_event) else on_event
        if not isinstance(sinks, Sequence) or not all(map(callable, sinks)):
            hint = "Pass a function of one event, or a list of such functions."
            raise UsageError(f"{on_event!r} cannot take events", hint=hint)
        self._sinks, self._role, self._name = tuple(sinks), role, name
        self._warned: set[int] = set()

    def emit(
        self,
        channel: str,
        version: int,
        digest: str,
        spans: Iterable[Span],
        step: int | None = None,
        *,
        role: str | None = None,
    ) -> None:
        """Send the phases of a version, as ours or as those of another role."""
        if not self._sinks:
            return
        for one in spans:
            self._send(
                Event(
                    one.phase,
                    role or self._role,
                    self._name,
                    channel,
                    version,
                    digest,
                    one.began,
                    one.seconds,
                    one.nbytes,
                    step,
                )
            )

    def relay(self, role: str, *, without: Sequence[str] = ()) -> OnEvent:
        """For what works for us: its events under our name and this role, ``without`` some phases."""
        if not self._sinks:
            return ()

        def send(event: Event) -> None:
            if event.phase not in without:
                self._send(replace(event, role=role, name=self._name))

        return send

    def _send(self, event: Event) -> None:
        for i, sink in enumerate(self._sinks):
            try:
                sink(event)
            except BaseException as error:  # whatever it is, training and serving go on
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    raise  # of a signal; on another thread it would end that thread, and nobody would hear of it
                if i not in self._warned:
                    self._warned.add(i)
                    named, kind = getattr(sink, "__qualname__", type(sink).__name__), type(error).__name__
                    _log.warning("%s lost an event, which is not said again: %s: %s", named, kind, error)
