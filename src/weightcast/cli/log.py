"""`weightcast log URL`"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.pins import pins
from weightcast.channel.records import Manifest
from weightcast.cli.console import AsJson, Url, head_of, open_chain, say, tell, working
from weightcast.cli.text import Table, Text
from weightcast.cli.wording import one_line, ratio, size, span
from weightcast.errors import FormatError, MissingError

_AT_ONCE = 16
"""Manifests that are fetched at the same time."""


@dataclass(frozen=True)
class Entry:
    """A version, and what is known of it besides its manifest."""

    version: int
    manifest: Manifest | None
    problem: str | None
    """Why there is no manifest."""
    anchor: int | None
    """Bytes of the anchor at this version; 0 for one that is somewhere else."""
    pinned: bool
    squashes: tuple[int, ...]
    """How many versions each squash that ends here spans."""


def log(
    url: Url,
    count: Annotated[int, typer.Option("-n", min=1, help="How many versions to show.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Show all of them.")] = False,
    as_json: AsJson = False,
) -> None:
    """List versions, the newest first.

    ⚓ is an anchor, where a replica can begin. ⇤8 is a squash that spans 8 versions and ends here.
    """
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        head = head_of(chain)
        versions = _newest(chain, head.position.version, None if everything else count)
        entries = _entries(chain, head, versions)
        if as_json:
            tell({"channel": chain.channel.id, "versions": [_fields(chain, entry) for entry in entries]})
        else:
            say(_table(chain, entries, time.time()))


def _newest(chain: Chain, head: int, count: int | None) -> list[int]:
    """The newest ``count`` versions, the newest first, by a listing that begins as late as it can."""
    reach = head + 1 if count is None else count
    while True:
        first = max(0, head - reach + 1)
        # A listing may lag behind the head.
        found = sorted({head, *(version for version in chain.versions(first - 1) if version <= head)}, reverse=True)
        if first == 0 or count is None or len(found) >= count:
            return found[:count]
        reach *= 4


def _entries(chain: Chain, head: Manifest, versions: list[int]) -> list[Entry]:
    anchors = {edge.result: edge.nbytes for edge in chain.anchor_edges()}
    anchors |= {anchor.position.version: 0 for anchor in chain.references() if anchor.position.version not in anchors}
    pinned = pins(chain)
    spans: dict[int, list[int]] = {}
    for edge in chain.squash_edges(0):
        if edge.base is not None:
            spans.setdefault(edge.result, []).append(edge.result - edge.base)

    def one(version: int) -> Entry | None:
        manifest, problem = head if version == head.position.version else None, None
        try:
            manifest = manifest or chain.manifest(version)
        except MissingError:
            return None  # collected meanwhile
        except FormatError as error:
            problem = error.problem
        marks = anchors.get(version), version in pinned, tuple(sorted(set(spans.get(version, ()))))
        return Entry(version, manifest, problem, *marks)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [entry for entry in pool.map(one, versions) if entry is not None]


def _nbytes(entry: Entry, manifest: Manifest) -> int:
    """What the version took to publish; an anchor's own record says nothing of its weight."""
    return manifest.object.size if manifest.base is not None else entry.anchor or 0


def _fields(chain: Chain, entry: Entry) -> dict[str, Any]:
    marks = {"anchor": entry.anchor is not None, "pinned": entry.pinned, "squashes": list(entry.squashes)}
    manifest, table = entry.manifest, chain.channel.table
    if manifest is None:
        return {"version": entry.version, "problem": entry.problem, **marks}
    nbytes = _nbytes(entry, manifest)
    return {
        "version": entry.version,
        "digest": manifest.position.digest,
        "step": manifest.step,
        "time": manifest.time,
        "changed": manifest.changed,
        "density": manifest.changed / max(table.elements, 1),
        "bytes": nbytes,
        "ratio_to_full": table.nbytes / nbytes if nbytes else None,
        "codec": manifest.codec,
        "writer": manifest.writer,
        **marks,
    }


def _table(chain: Chain, entries: list[Entry], now: float) -> Table:
    table = Table()
    for column in ("version", "step", "age", "changed", "bytes", "to full", "codec"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    table.add_column("")
    table.add_column("writer", shrink=True)
    for entry in entries:
        version = Text(str(entry.version), "yellow")
        if entry.manifest is None:
            table.add_row(version, *[""] * 6, _marks(entry), Text(one_line(entry.problem or ""), "red"))
        else:
            table.add_row(version, *_cells(chain, entry, entry.manifest, now))
    return table


def _cells(chain: Chain, entry: Entry, manifest: Manifest, now: float) -> list[str | Text]:
    full, nbytes = chain.channel.table, _nbytes(entry, manifest)
    return [
        str(manifest.step) if manifest.step is not None else "",
        span(now - manifest.time),
        f"{manifest.changed / max(full.elements, 1):.3%}" if manifest.base is not None else "",
        size(nbytes) if nbytes else "",
        ratio(full.nbytes, nbytes) if manifest.base is not None else "",
        manifest.codec or "whole",
        _marks(entry),
        Text(one_line(manifest.writer), "dim"),
    ]


def _marks(entry: Entry) -> Text:
    marks = ["⚓"] * (entry.anchor is not None) + ["pinned"] * entry.pinned
    return Text(" ".join(marks + [f"⇤{width}" for width in entry.squashes]), "cyan")
