"""`weightcast compare URL A B`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.channel.route import cheapest_route, route_bytes
from weightcast.cli.channels import commit_named, open_chain
from weightcast.cli.console import computing, facts, say, tell
from weightcast.cli.options import NAMES, Scratch, Threads, Url
from weightcast.cli.outputs import scratch_folder
from weightcast.cli.tensors import All, list_tensors, most_changed
from weightcast.cli.wording import count, ratio, size
from weightcast.upkeep import compare as versions


def compare(
    url: Url,
    one: Annotated[str, typer.Argument(metavar="A", help=f"A version: {NAMES}.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another, earlier or later.")],
    everything: All = False,
    scratch: Scratch = None,
    threads: Threads = None,
) -> None:
    """Show which tensors differ between any two versions, and what going from A to B costs.

    Both versions are fetched and compared bit by bit, a few tensors at a time.
    """
    with computing(threads) as (workers, progress), scratch_folder(scratch) as folder:
        chain = open_chain(url)
        before, after = commit_named(chain, one), commit_named(chain, other)
        start, goal = before.position.version, after.position.version
        rows = [
            {
                "name": change.spec.name,
                "dtype": change.spec.dtype,
                "shape": list(change.spec.shape),
                "changed": change.changed,
                "density": change.changed / max(change.spec.elements, 1),
            }
            for change in (versions.compare(chain, start, goal, folder, workers, progress) if start != goal else ())
            if change.changed
        ]
    values = _summary(chain, before, after, rows)
    tell(values | {"tensors": most_changed(rows)})
    facts(_in_words(values))
    if rows:
        say("")
        list_tensors(rows, everything)


def _summary(chain: Chain, before: Manifest, after: Manifest, rows: list[dict[str, Any]]) -> dict[str, Any]:
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


def _in_words(values: dict[str, Any]) -> dict[str, str]:
    changed = f"{count(values['changed'], 'element')} ({values['density']:.3%})"
    if values["bytes"] is None:
        fetch = "nothing in the bucket leads there"
    else:
        saved = f", {ratio(values['model_bytes'], values['bytes'])} of the model" if values["bytes"] else ""
        fetch = f"{size(values['bytes'])} in {count(values['objects'], 'object')}{saved}"
    return {
        "from": _named(values["from"]),
        "to": _named(values["to"]),
        "changed": f"{changed} in {values['changed_tensors']:,} of {count(values['model_tensors'], 'tensor')}",
        "fetch": fetch,
    }


def _named(side: dict[str, Any]) -> str:
    step = f", step {side['step']}" if side["step"] is not None else ""
    label = f", {side['label']}" if side["label"] else ""
    return f"version {side['version']}{step}{label}"
