"""`weightcast plan URL --from N|FOLDER|nothing`"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge
from weightcast.channel.keys import HEAD_WORD, NOTHING_WORD, is_tag
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route, cheapest_route, route_bytes
from weightcast.channel.tags import tag_names
from weightcast.cli.channels import head_of, is_number, open_chain, version_named
from weightcast.cli.console import computing, say, tell
from weightcast.cli.options import NAMES, Threads, Url
from weightcast.cli.text import Column, Table
from weightcast.cli.wording import count, ratio, size
from weightcast.errors import ChannelError, UsageError


@dataclass(frozen=True)
class Choice:
    """The cheapest route, and two that it is compared with; None for one that is not there."""

    route: Route
    replay: Route | None
    """Delta after delta, from the start or from the oldest anchor."""
    from_anchor: Route | None
    """The newest anchor, and the deltas after it."""


def plan(
    url: Url,
    start: Annotated[
        str,
        typer.Option("--from", metavar="VERSION|FOLDER", help=f"{NAMES}, a folder that holds a version, or `nothing`."),
    ],
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION", help=f"{NAMES}; the newest by default.")] = None,
    threads: Threads = None,
) -> None:
    """Show the cheapest route to a version, and what others would cost.

    A folder whose name is also that of a version is written as ./FOLDER.
    """
    chain = open_chain(url)
    head = head_of(chain)
    goal = version_named(chain, to) if to is not None else head.position.version
    at = _start(start, chain, head, threads)
    if at is not None and at > head.position.version:
        raise UsageError(f"there is no version {at} yet: the newest is {head.position.version}", file=url)
    # Patches lead forwards only: an older version is reached from nothing.
    base = at if at is not None and at <= goal else None
    choice = choose(chain.edges(base, goal), base, goal)
    if choice is None:
        origin = "nothing" if base is None else f"version {base}"
        hint = "What led there was deleted by gc, or is a checkpoint elsewhere: see `weightcast status`."
        raise ChannelError(f"no route leads from {origin} to version {goal}", file=chain.store.url, hint=hint)
    full = chain.channel.table.nbytes
    tell(_fields(choice, at, goal, full))
    _print(choice, at, goal, full)


def _start(text: str, chain: Chain, head: Manifest, threads: int | None) -> int | None:
    """The version that is named or that a folder holds; None for `nothing`."""
    if text == NOTHING_WORD:
        return None
    if is_number(text):
        return int(text)
    folder, is_path = Path(text), "/" in text or text.startswith(".")
    if not is_path and not folder.exists():
        return version_named(chain, text)
    if not is_path and (text.lower() == HEAD_WORD or (is_tag(text) and text in set(tag_names(chain)))):
        raise UsageError(f"{text!r} names both a version and a folder", hint=f"Write ./{text} for the folder.")
    return _version_of(folder, chain, head, threads)


def choose(edges: list[Edge], start: int | None, goal: int) -> Choice | None:
    """The cheapest route of these edges, beside the plainer ones."""
    route = cheapest_route(edges, start, goal)
    if route is None:
        return None
    deltas = [edge for edge in edges if edge.kind == "delta"]
    anchors = sorted((edge for edge in edges if edge.base is None), key=lambda edge: edge.result)
    oldest = anchors[:1] if start is None else []
    return Choice(
        route, cheapest_route(oldest + deltas, start, goal), cheapest_route(anchors[-1:] + deltas, None, goal)
    )


def _version_of(folder: Path, chain: Chain, head: Manifest, threads: int | None) -> int:
    from weightcast.disk.staged import fingerprint_of  # needs numpy, and a plan from a version does not
    from weightcast.follow.mirror_reader import reading_held

    with reading_held(folder, chain.channel.table, chain.channel.id) as found:
        if found.position is not None:
            return found.position.version
        with computing(threads) as (workers, progress):
            digest = fingerprint_of(found.weights, workers, progress).digest
    version = chain.find(digest, head)
    if version is None:
        hint = "Plan from `nothing`, or name another folder."
        raise UsageError("the folder holds no version of this channel", file=str(folder), hint=hint)
    return version


def _fields(choice: Choice, at: int | None, goal: int, full: int) -> dict[str, Any]:
    steps = [
        {"kind": edge.kind, "base": edge.base, "result": edge.result, "bytes": edge.nbytes, "key": edge.key}
        for edge in choice.route
    ]
    compared = {"replay": choice.replay, "anchor_and_replay": choice.from_anchor}
    costs = {name: _cost(route) if route is not None else None for name, route in compared.items()}
    return {"from": at, "to": goal, "route": steps, **_cost(choice.route), "model_bytes": full, **costs}


def _cost(route: Route) -> dict[str, int]:
    return {"bytes": route_bytes(route), "objects": len(route)}


def _print(choice: Choice, at: int | None, goal: int, full: int) -> None:
    if not choice.route:
        say(f"nothing to fetch: version {goal} is there already")
        return
    steps = Table(Column("kind", left=True), "from", "", "to", "size")
    for edge in choice.route:
        base = "nothing" if edge.base is None else str(edge.base)
        steps.add(edge.kind, base, "→", str(edge.result), size(edge.nbytes))
    say(steps)
    say("")
    replay = "every delta" if at is not None else "oldest anchor, every delta"
    totals = Table(Column(style="dim"), *[""] * 4, header=False)
    rows = {"this route": choice.route, replay: choice.replay, "newest anchor, deltas": choice.from_anchor}
    for name, route in rows.items():
        if route is None:
            totals.add(name, "none")
        else:
            nbytes = route_bytes(route)
            times = f"{nbytes / max(route_bytes(choice.route), 1):.3g}×" if route is not choice.route else ""
            totals.add(name, size(nbytes), count(len(route), "object"), ratio(full, nbytes), times)
    say(totals)
