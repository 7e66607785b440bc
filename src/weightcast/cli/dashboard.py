"""`weightcast dashboard URL`"""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from weightcast.channel.trust import Trust
from weightcast.cli.console import caution, say, tell
from weightcast.cli.listening import address_of
from weightcast.cli.options import TrustedKey, Url
from weightcast.cli.trusting import open_trusted, trust_of
from weightcast.engine.address import is_loopback
from weightcast.errors import UsageError
from weightcast.view.dashboard import Dashboard
from weightcast.view.event_tail import EventTail
from weightcast.view.observer import Observer

_PORT = 8742
"""Taken by default if it is free, so that an address can be kept."""

ReadEvents = Annotated[
    Path | None,
    typer.Option(
        "--events", metavar="FILE", help="Show the phases in this file, which --events of other verbs writes."
    ),
]


def dashboard(
    url: Url,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help=f"Where to serve the page; 127.0.0.1:{_PORT} or any free port by default."
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.1, max=86400, metavar="SECONDS", help="Seconds between two looks.")
    ] = 2.0,
    events: ReadEvents = None,
    trust: TrustedKey = None,
) -> None:
    """Serve a live page about a channel: versions, what changed, replicas, phases and errors.

    It only reads, and needs nothing but the bucket. Whoever reaches the address can see the page; by default that is
    this machine. It goes on until SIGINT or SIGTERM.
    """
    observer = observer_of(url, trust_of(trust), events)
    with closing(observer), closing(_serve(observer, listen)) as server:
        if not is_loopback(server.host):
            caution(f"everybody who reaches {server.host} port {server.port} can see the page")
        tell({"event": "listening", "url": server.url})
        say(server.url)
        stopped = threading.Event()
        with suppress(KeyboardInterrupt):
            while True:
                more = observer.look()
                stopped.wait(0.01 if more else every)


def observer_of(url: str, trust: Trust | None, events: Path | None) -> Observer:
    """An observer of the channel at an address; an error if there is none."""
    tail = EventTail(events) if events is not None else None
    return Observer(lambda: open_trusted(url, trust), open_trusted(url, trust), tail)


def _serve(observer: Observer, listen: str | None) -> Dashboard:
    if listen is not None:
        return Dashboard(observer.journal, *address_of(listen))
    try:
        return Dashboard(observer.journal, "127.0.0.1", _PORT)
    except UsageError:
        return Dashboard(observer.journal, "127.0.0.1", 0)
