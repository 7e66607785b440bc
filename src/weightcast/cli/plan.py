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
from weightcast.cli.console import AsJson, Threads, Url, head_of, open_chain, prepare_kernels, say, tell, working
from weightcast.cli.text import Table
from weightcast.cli.versions import NAMES, is_number, version_named
from weightcast.cli.wording import ratio, size
from weightcast.cli.words import count
from weightcast.disk.durable import Report
from weightcast.errors import ChannelError, UsageError
from weightcast.format.workers import Workers


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
    as_json: AsJson = False,
) -> None:
    """Show the cheapest route to a version, and what others would cost.

    A folder whose name is also a tag is written as ./FOLDER.
    """
    in_folder = "/" in start or start.startswith(".") or (Path(start).is_dir() and not is_tag(start))
    with working(threads, as_json, kernels=in_folder) as (workers, report):
        chain = open_chain(url)
        head = head_of(chain)
        goal = version_named(chain, to) if to is not None else head.position.version
        if in_folder:
            at: int | None = _version_of(Path(start), chain, head, workers, report)
        elif is_number(start):
            at = int(start)
        else:
            at = None if start == NOTHING_WORD else _version_or_folder(start, chain, head, workers, report)
        if at is not None and at > head.position.version:
            raise UsageError(f"there is no version {at} yet: the newest is {head.position.version}", file=url)
        choice = _choose(chain, at, goal)
        full = chain.channel.table.nbytes
        tell(_fields(choice, at, goal, full)) if as_json else _print(choice, at, goal, full)


def _choose(chain: Chain, at: int | None, goal: int) -> Choice:
    # Patches lead forwards only: an older version is reached from nothing.
    start = at if at is not None and at <= goal else None
    choice = choose(chain.edges(start, goal), start, goal)
    if choice is None:
        origin = "nothing" if start is None else f"version {start}"
        hint = "What led there was deleted by gc, or is a checkpoint elsewhere: see `weightcast status`."
        raise ChannelError(f"no route leads from {origin} to version {goal}", file=chain.store.url, hint=hint)
    return choice


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


def _version_or_folder(start: str, chain: Chain, head: Manifest, workers: Workers, report: Report) -> int:
    """The version that a tag names, or that the folder of this name holds; one of the two must be meant."""
    if not Path(start).exists():
        return version_named(chain, start)
    if start.lower() == HEAD_WORD or start in set(tag_names(chain)):
        raise UsageError(f"{start!r} names both a version and a folder", hint=f"Write ./{start} for the folder.")
    prepare_kernels()
    return _version_of(Path(start), chain, head, workers, report)


def _version_of(folder: Path, chain: Chain, head: Manifest, workers: Workers, report: Report) -> int:
    from weightcast.disk.staged import fingerprint_of  # needs numpy, and a plan from a version does not
    from weightcast.follow.mirror_reader import reading_held

    with reading_held(folder, chain.channel.table, chain.channel.id) as found:
        if found.position is not None:
            return found.position.version
        digest = fingerprint_of(found.weights, workers, report).digest
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
    steps = Table()
    for column in ("kind", "from", "", "to", "size"):
        steps.add_column(column, justify="left" if column == "kind" else "right")
    for edge in choice.route:
        base = "nothing" if edge.base is None else str(edge.base)
        steps.add_row(edge.kind, base, "→", str(edge.result), size(edge.nbytes))
    say(steps)
    say("")
    say(_totals(choice, at, full))


def _totals(choice: Choice, at: int | None, full: int) -> Table:
    replay = "every delta" if at is not None else "oldest anchor, every delta"
    table = Table(header=False)
    table.add_column(style="dim", justify="right")
    for _ in range(4):
        table.add_column(justify="right")
    rows = {"this route": choice.route, replay: choice.replay, "newest anchor, deltas": choice.from_anchor}
    for name, route in rows.items():
        if route is None:
            table.add_row(name, "none")
        else:
            nbytes = route_bytes(route)
            times = f"{nbytes / max(route_bytes(choice.route), 1):.3g}×" if route is not choice.route else ""
            table.add_row(name, size(nbytes), count(len(route), "object"), ratio(full, nbytes), times)
    return table
