"""`weightcast plan URL --from N|FOLDER|nothing`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightcast.channel.chain import Chain
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


def plan(
    url: Url,
    start: Annotated[
        str,
        typer.Option("--from", metavar="VERSION|FOLDER", help=f"What is held: {NAMES}, a folder, or `nothing`."),
    ],
    to: Annotated[
        str | None, typer.Option("--to", metavar="VERSION", help=f"The goal: {NAMES}; the newest by default.")
    ] = None,
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
        hint = f"Plan from {head.position.version} or an older version, or from `nothing`."
        raise UsageError(f"there is no version {at} yet: the newest is {head.position.version}", file=url, hint=hint)
    # Patches lead forwards only: an older version is reached from nothing.
    base = at if at is not None and at <= goal else None
    edges = chain.edges(base, goal)
    route = cheapest_route(edges, base, goal)
    if route is None:
        origin = "nothing" if base is None else f"version {base}"
        hint = "What led there was deleted by gc, or is a checkpoint elsewhere: see `weightcast status`."
        raise ChannelError(f"no route leads from {origin} to version {goal}", file=chain.store.url, hint=hint)
    deltas = [edge for edge in edges if edge.kind == "delta"]
    anchors = sorted((edge for edge in edges if edge.base is None), key=lambda edge: edge.result)
    replay = cheapest_route((anchors[:1] if base is None else []) + deltas, base, goal)
    from_anchor = cheapest_route(anchors[-1:] + deltas, None, goal)
    full = chain.channel.table.nbytes
    tell(
        {
            "from": at,
            "to": goal,
            "route": [
                {"kind": edge.kind, "base": edge.base, "result": edge.result, "bytes": edge.nbytes, "key": edge.key}
                for edge in route
            ],
            **_cost(route),
            "model_bytes": full,
            "replay": None if replay is None else _cost(replay),
            "anchor_and_replay": None if from_anchor is None else _cost(from_anchor),
        }
    )
    if not route:
        say(f"nothing to fetch: version {goal} is there already")
        return
    say(_steps(route))
    say("")
    replayed = "every delta" if base is not None else "oldest anchor, every delta"
    say(_totals(full, {"this route": route, replayed: replay, "newest anchor, deltas": from_anchor}))


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


def _cost(route: Route) -> dict[str, int]:
    return {"bytes": route_bytes(route), "objects": len(route)}


def _steps(route: Route) -> Table:
    table = Table(Column("kind", left=True), "from", "", "to", "size")
    for edge in route:
        base = "nothing" if edge.base is None else str(edge.base)
        table.add(edge.kind, base, "→", str(edge.result), size(edge.nbytes))
    return table


def _totals(full: int, routes: dict[str, Route | None]) -> Table:
    """What routes cost, the later ones also as multiples of the first."""
    table = Table(Column(style="dim"), *[""] * 4, header=False)
    least = 0
    for name, route in routes.items():
        if route is None:
            table.add(name, "none")
        else:
            nbytes = route_bytes(route)
            times = f"{nbytes / least:.3g}×" if least else ""
            least = least or nbytes
            table.add(name, size(nbytes), count(len(route), "object"), ratio(full, nbytes), times)
    return table
