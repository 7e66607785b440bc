"""`weightcast compare URL A B`"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.cli.console import AsJson, Threads, Url, open_chain, say, tell, working, writing_to
from weightcast.cli.tensors import All, list_tensors, most_changed
from weightcast.cli.versions import NAMES, commit_named
from weightcast.cli.wording import ratio, size
from weightcast.cli.words import count
from weightcast.disk import durable
from weightcast.disk.durable import Report
from weightcast.errors import UsageError
from weightcast.format.workers import Workers


def compare(
    url: Url,
    one: Annotated[str, typer.Argument(metavar="A", help=f"A version: {NAMES}.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another, earlier or later.")],
    everything: All = False,
    scratch: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where two copies of the weights may be for a while; else the system's /tmp."),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show which tensors differ between any two versions, and what going from A to B costs.

    Both versions are fetched and compared bit by bit, a few tensors at a time.
    """
    with working(threads, as_json) as (workers, report):
        if scratch is not None and not scratch.is_dir():
            raise UsageError("there is no such folder", file=str(scratch), hint="Make it first.")
        chain = open_chain(url)
        before, after = commit_named(chain, one), commit_named(chain, other)
        rows = _rows(chain, before, after, scratch, workers, report)
        values = _summary(chain, before, after, rows)
        if as_json:
            tell(values | {"tensors": most_changed(rows)})
        else:
            _print(values, rows, everything)


def _rows(
    chain: Chain, before: Manifest, after: Manifest, scratch: Path | None, workers: Workers, report: Report
) -> list[dict[str, Any]]:
    """The tensors that differ."""
    if before.position.version == after.position.version:
        return []
    from weightcast.upkeep.compare import compare as compare_versions

    with (
        writing_to(scratch or Path(tempfile.gettempdir())),
        durable.scratch(scratch) as folder,
    ):
        versions = before.position.version, after.position.version
        return [
            {
                "name": change.spec.name,
                "dtype": change.spec.dtype,
                "shape": list(change.spec.shape),
                "changed": change.changed,
                "density": change.changed / max(change.spec.elements, 1),
            }
            for change in compare_versions(chain, *versions, folder, workers, report)
            if change.changed
        ]


def _summary(chain: Chain, before: Manifest, after: Manifest, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from weightcast.channel.route import cheapest_route, route_bytes

    start, goal = before.position.version, after.position.version
    # Patches lead forwards only: going back is going from nothing.
    base = start if start <= goal else None
    route = cheapest_route(chain.edges(base, goal), base, goal)
    changed, table = sum(row["changed"] for row in rows), chain.channel.table
    return {
        "from": _side(before),
        "to": _side(after),
        "changed_tensors": len(rows),
        "model_tensors": len(table),
        "changed": changed,
        "density": changed / max(table.elements, 1),
        "model_bytes": table.nbytes,
        "bytes": None if route is None else route_bytes(route),
        "objects": None if route is None else len(route),
    }


def _side(commit: Manifest) -> dict[str, Any]:
    position = commit.position
    return {"version": position.version, "digest": position.digest, "step": commit.step, "label": commit.label}


def _print(values: dict[str, Any], rows: list[dict[str, Any]], everything: bool) -> None:
    for name in ("from", "to"):
        side = values[name]
        step = f", step {side['step']}" if side["step"] is not None else ""
        label = f", {side['label']}" if side["label"] else ""
        say(f"{name:>7}  version {side['version']}{step}{label}")
    changed = f"{count(values['changed'], 'element')} ({values['density']:.3%})"
    say(f"changed  {changed} in {values['changed_tensors']:,} of {count(values['model_tensors'], 'tensor')}")
    if values["bytes"] is None:
        say("  fetch  nothing in the bucket leads there")
    else:
        saved = f", {ratio(values['model_bytes'], values['bytes'])} of the model" if values["bytes"] else ""
        say(f"  fetch  {size(values['bytes'])} in {count(values['objects'], 'object')}{saved}")
    if rows:
        say("")
        list_tensors(rows, everything)
