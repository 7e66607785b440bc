"""`weightcast log URL [RANGE]`"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.pins import pins
from weightcast.channel.records import Manifest
from weightcast.channel.tags import tags_by_position
from weightcast.cli.channels import head_of, open_chain, range_named
from weightcast.cli.console import caution, say, tell
from weightcast.cli.options import Url
from weightcast.cli.text import Column, Table
from weightcast.cli.wording import count, is_ahead, moment, moment_named, ratio, size, span
from weightcast.errors import FormatError, MissingError, UsageError
from weightcast.format.spec import TensorTable

_AT_ONCE = 16
"""Manifests that are fetched at the same time."""

_NEWEST = 20
"""Versions that are shown by default."""


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
    tags: tuple[str, ...]

    @property
    def is_marked(self) -> bool:
        label = self.manifest.label if self.manifest else None
        return bool(self.anchor is not None or self.pinned or self.tags or label)


def log(
    url: Url,
    wanted: Annotated[
        str | None,
        typer.Argument(metavar="RANGE", help="A version, or A..B, A.. or ..B with both ends; numbers, tags or `head`."),
    ] = None,
    number: Annotated[
        int | None, typer.Option("-n", min=1, metavar="N", help=f"At most N versions; {_NEWEST} without a RANGE.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All versions.")] = False,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Published since: an age (12h, 7d) or a date in UTC.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Of this training step, or of A..B, A.. or ..B.")
    ] = None,
    marked: Annotated[
        bool, typer.Option("--marked", help="Only anchors, pins, and versions with a tag or a label.")
    ] = False,
    long: Annotated[bool, typer.Option("--long", help="Show digests and times instead of ages.")] = False,
) -> None:
    """List versions, the newest first.

    ⚓ is an anchor, where a replica can begin. ⇤8 is a squash of 8 versions that ends here. (best) is a tag.
    """
    now = time.time()
    picked = _filter(step, moment_named(since, now) if since is not None else None, marked)
    chain = open_chain(url)
    head, model = head_of(chain), chain.channel.table
    first, last = range_named(chain, wanted, head.position.version) if wanted else (0, head.position.version)
    most = number or (None if everything or wanted else _NEWEST)
    entries = _entries(chain, head, _newest_first(chain, head.position.version, first, last, most), picked, most)
    tell({"channel": chain.channel.id, "versions": [_fields(entry, model) for entry in entries]})
    say(_table(entries, model, now, long) if entries else f"no version matches; the newest is {head.position.version}")
    ahead = [entry.manifest.time for entry in entries if entry.manifest and is_ahead(now - entry.manifest.time)]
    if ahead:
        caution(f"{count(len(ahead), 'version')} from the future, by up to {span(max(ahead) - now)}: check the clocks")
    for entry in entries:
        if entry.problem is not None:
            caution(f"version {entry.version}: {entry.problem}")


Filter = Callable[[Entry], bool]


def _filter(step: str | None, since: float | None, marked: bool) -> Filter:
    first, last = _steps(step) if step is not None else (None, None)

    def picked(entry: Entry) -> bool:
        if marked and not entry.is_marked:
            return False
        manifest = entry.manifest
        if manifest is None:
            return step is None and since is None  # damaged: nothing is known of it
        if since is not None and manifest.time < since:
            return False
        if step is None:
            return True
        at = manifest.step
        return at is not None and (first is None or at >= first) and (last is None or at <= last)

    return picked


def _steps(text: str) -> tuple[int | None, int | None]:
    first, dots, last = text.partition("..")
    ends = [part for part in (first, last) if part]
    if not ends or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in ends):
        hint = "Write 500, 500..900, 500.. or ..900."
        raise UsageError(f"{text[:100]!r} is not a step or a range of steps", hint=hint)
    low = int(first) if first else None
    return low, (int(last) if last else None) if dots else low


def _newest_first(chain: Chain, head: int, first: int, last: int, most: int | None) -> Iterator[int]:
    """Versions from ``last`` down to ``first``, by listings that begin as late as they can."""
    upper, reach = min(last, head), most or head + 1
    while upper >= first:
        lower = max(first, upper - reach + 1)
        found = {version for version in chain.versions(lower - 1) if version <= upper}
        found |= {head} & {upper}  # a listing may lag
        yield from sorted(found, reverse=True)
        upper, reach = lower - 1, 4 * reach


def _entries(chain: Chain, head: Manifest, versions: Iterator[int], picked: Filter, most: int | None) -> list[Entry]:
    anchors = {anchor.position.version: 0 for anchor in chain.references()}
    anchors |= {edge.result: edge.nbytes for edge in chain.anchor_edges()}
    pinned, named = pins(chain), tags_by_position(chain)
    spans: dict[int, set[int]] = {}
    for edge in chain.squash_edges(0):
        if edge.base is not None:
            spans.setdefault(edge.result, set()).add(edge.result - edge.base)

    def one(version: int) -> Entry | None:
        manifest, problem = head if version == head.position.version else None, None
        try:
            manifest = manifest or chain.manifest(version)
        except MissingError:
            return None  # collected meanwhile
        except FormatError as error:
            problem = error.problem
        names = named.get(manifest.position, ()) if manifest else ()
        squashes = tuple(sorted(spans.get(version, ())))
        return Entry(version, manifest, problem, anchors.get(version), version in pinned, squashes, names)

    found: list[Entry] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while most is None or len(found) < most:
            some = list(islice(versions, 4 * _AT_ONCE))
            if not some:
                break
            found += [entry for entry in pool.map(one, some) if entry is not None and picked(entry)]
    return found[:most]


def _nbytes(entry: Entry, manifest: Manifest) -> int:
    """What the version took to publish; the size of an anchor's own record is not that of its files."""
    return manifest.nbytes if manifest.base is not None else entry.anchor or 0


def _fields(entry: Entry, model: TensorTable) -> dict[str, Any]:
    manifest = entry.manifest
    marks = {
        "anchor": entry.anchor is not None,
        "pinned": entry.pinned,
        "squashes": list(entry.squashes),
        "tags": list(entry.tags),
    }
    if manifest is None:
        return {"version": entry.version, "problem": entry.problem, **marks}
    nbytes = _nbytes(entry, manifest)
    return {
        "version": entry.version,
        "digest": manifest.position.digest,
        "step": manifest.step,
        "time": manifest.time,
        "changed": manifest.changed,
        "density": manifest.changed / max(model.elements, 1),
        "bytes": nbytes,
        "ratio_to_full": model.nbytes / nbytes if nbytes else None,
        "codec": manifest.codec,
        "writer": manifest.writer,
        "label": manifest.label,
        **marks,
    }


def _table(entries: list[Entry], model: TensorTable, now: float, long: bool) -> Table:
    table = Table(
        Column("version", style="yellow"),
        "digest",
        "time (UTC)",
        "step",
        "age",
        Column("changed", rank=3),
        "size",
        Column("ratio", rank=4),
        Column("codec", left=True, rank=5),
        Column(left=True, style="cyan"),
        Column("label", left=True, rank=1, shortest=12),
        Column("writer", left=True, style="dim", rank=6, early=True),
    )
    for entry in entries:
        table.add(str(entry.version), *_cells(entry, model, now, long))
    return table


def _cells(entry: Entry, model: TensorTable, now: float, long: bool) -> list[str]:
    """All cells but the version; a damaged one has only marks."""
    marks = ["⚓"] * (entry.anchor is not None) + ["pinned"] * entry.pinned
    marks += [f"⇤{width}" for width in entry.squashes] + [f"({name})" for name in entry.tags]
    manifest = entry.manifest
    if manifest is None:
        return [""] * 8 + [" ".join(marks)]
    nbytes, is_patch, ahead = _nbytes(entry, manifest), manifest.base is not None, is_ahead(now - manifest.time)
    return [
        manifest.position.digest[:12] if long else "",
        moment(manifest.time).removesuffix(" UTC") if long else "",
        "" if manifest.step is None else str(manifest.step),
        "" if long else "future" if ahead else span(now - manifest.time),
        f"{manifest.changed / max(model.elements, 1):.3%}" if is_patch else "",
        size(nbytes) if nbytes else "",
        ratio(model.nbytes, nbytes) if is_patch else "",
        manifest.codec or "whole",
        " ".join(marks),
        manifest.label or "",
        manifest.writer,
    ]
