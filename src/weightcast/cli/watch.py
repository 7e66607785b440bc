"""`weightcast status URL --watch`: head, writer and replicas, as they change."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.lease import lease
from weightcast.cli.channels import head_of
from weightcast.cli.following import Outage, print_event
from weightcast.cli.settings import settings
from weightcast.cli.status import head_fields, head_line, phases_line, replica_fields, replica_table, writer_fields
from weightcast.cli.text import Text, printed
from weightcast.cli.wording import ago, count
from weightcast.errors import UsageError, VersionError, WeightcastError
from weightcast.store.backoff import CLOCK, Clock

_FATAL = (UsageError, VersionError)
"""Errors that trying again does not cure."""


def watch(chain: Chain, every: float, clock: Clock = CLOCK) -> None:
    """Show the channel until a signal comes: in a terminal as a view that is redrawn, else a line for each change."""
    head_of(chain)
    with suppress(KeyboardInterrupt):
        if sys.stdout.isatty() and not settings.as_json:
            _redraw(chain, every, clock)
        else:
            _print_changes(chain, every, clock)


def _look(chain: Chain) -> dict[str, Any]:
    """What is shown: a few small requests, and one for each replica."""
    head, now = head_of(chain), time.time()
    return {
        "head": head_fields(head, now),
        "writer": writer_fields(lease(chain), now),
        "replicas": [replica_fields(beat, heard, head, now) for beat, heard in heartbeats(chain)],
    }


# -- in a terminal -----------------------------------------------------------------------------------------------------


def _redraw(chain: Chain, every: float, clock: Clock) -> None:
    from rich.live import Live
    from rich.text import Text as Drawn

    never, seen, trouble = threading.Event(), None, None
    with Live(auto_refresh=False) as live:
        while True:
            try:
                seen, trouble = _look(chain), None
            except _FATAL:
                raise
            except WeightcastError as error:
                trouble = error
            lines = _lines(chain.store.url, seen, trouble)
            # Nothing in them acts on the terminal; what rich reads in them are our own styles.
            live.update(Drawn.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            clock.wait(never, every)


def _lines(url: str, seen: dict[str, Any] | None, trouble: WeightcastError | None) -> list[str]:
    rows = [Text.assemble(("channel  ", "dim"), url)]
    if seen is not None:
        writer = seen["writer"]
        rows.append(Text.assemble(("   head  ", "dim"), (head_line(seen["head"]), "bold")))
        began = f"{writer['name']}, began {ago(writer['age'])}" if writer else "none yet"
        rows.append(Text.assemble((" writer  ", "dim"), began))
    if trouble is not None:
        rows.append(Text(f"  error  {trouble}", "red"))
    lines = [printed(row) for row in rows]
    if seen is not None and seen["replicas"]:
        lines += ["", printed(replica_table(seen["replicas"]))]
    elif seen is not None:
        lines += ["", printed(Text("no replica has reported", "dim"))]
    return lines


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def _print_changes(chain: Chain, every: float, clock: Clock) -> None:
    never, outage = threading.Event(), Outage(_FATAL, clock)
    before: dict[str, Any] = {}
    while True:
        try:
            seen = _look(chain)
        except WeightcastError as error:
            outage.failed(error)
        else:
            before = _print_news(before, seen)
        outage.round_ended()
        clock.wait(never, every)


def _print_news(before: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Print what is new since ``before``; returns what is known now."""
    head, writer = seen["head"], seen["writer"]
    now = {"head": head["digest"], "writer": writer and (writer["name"], writer["pid"])}
    now |= {f"replica {row['name']}": _without_ages(row) for row in seen["replicas"]}
    if now["head"] != before.get("head"):
        print_event("head", f"head     {head_line(head)}", **head)
    if writer and now["writer"] != before.get("writer"):
        print_event("writer", f"writer   {writer['name']}, began {ago(writer['age'])}", **writer)
    for row in seen["replicas"]:
        if now[f"replica {row['name']}"] != before.get(f"replica {row['name']}"):
            print_event("replica", f"replica  {_replica_line(row)}", **row)
    for gone in sorted(before.keys() - now.keys()):
        name = gone.removeprefix("replica ")
        print_event("gone", f"replica  {name} reports no more", name=name)
    return now


def _without_ages(row: dict[str, Any]) -> dict[str, Any]:
    """What only a replica's own report changes."""
    return {key: value for key, value in row.items() if key not in ("age", "lag")}


def _replica_line(row: dict[str, Any]) -> str:
    paused = "" if row["pause"] is None else f"paused {1000 * row['pause']:.0f} ms"
    behind = f"{count(row['lag'], 'version')} behind" if row["lag"] else "at the head"
    parts = f"version {row['version']}, {behind}", paused, phases_line(row["seconds"]), row["error"] or ""
    return f"{row['name']}  " + "  ".join(part for part in parts if part)
