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
from weightcast.cli.columns import Column, fitted
from weightcast.cli.console import AsJson, Url, head_of, open_chain, say, tell, warn, working
from weightcast.cli.text import Table, Text
from weightcast.cli.versions import range_named
from weightcast.cli.wording import moment, ratio, size, span
from weightcast.cli.words import count, is_ahead, moment_named
from weightcast.errors import FormatError, MissingError, UsageError

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
    as_json: AsJson = False,
) -> None:
    """List versions, the newest first.

    ⚓ is an anchor, where a replica can begin. ⇤8 is a squash of 8 versions that ends here. (best) is a tag.
    """
    with working(1, as_json, kernels=False):
        now = time.time()
        picked = _filter(step, moment_named(since, now) if since is not None else None, marked)
        chain = open_chain(url)
        head = head_of(chain)
        first, last = range_named(chain, wanted, head.position.version) if wanted else (0, head.position.version)
        most = number or (None if everything or wanted else _NEWEST)
        entries = _entries(chain, head, _newest_first(chain, head.position.version, first, last, most), picked, most)
        if as_json:
            tell({"channel": chain.channel.id, "versions": [_fields(chain, entry) for entry in entries]})
        else:
            _print(chain, entries, now, long)


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
        raise UsageError(
            f"{text[:100]!r} is not a step or a range of steps", hint="Write 500, 500..900, 500.. or ..900."
        )
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
    anchors = {edge.result: edge.nbytes for edge in chain.anchor_edges()}
    anchors |= {anchor.position.version: 0 for anchor in chain.references() if anchor.position.version not in anchors}
    pinned, named = pins(chain), tags_by_position(chain)
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
        squashes = tuple(sorted(set(spans.get(version, ()))))
        names = named.get(manifest.position, ()) if manifest else ()
        marks = anchors.get(version), version in pinned, squashes, names
        return Entry(version, manifest, problem, *marks)

    found: list[Entry] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while most is None or len(found) < most:
            some = list(islice(versions, 4 * _AT_ONCE))
            if not some:
                break
            found += [entry for entry in pool.map(one, some) if entry is not None and picked(entry)]
    return found[:most]


def _nbytes(entry: Entry, manifest: Manifest) -> int:
    """What the version took to publish; an anchor's own record says nothing of its weight."""
    return manifest.object.size if manifest.base is not None else entry.anchor or 0


def _fields(chain: Chain, entry: Entry) -> dict[str, Any]:
    marks = {"anchor": entry.anchor is not None, "pinned": entry.pinned, "squashes": list(entry.squashes)}
    marks |= {"tags": list(entry.tags)}
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
        "label": manifest.label,
        **marks,
    }


# -- for people --------------------------------------------------------------------------------------------------------


def _print(chain: Chain, entries: list[Entry], now: float, long: bool) -> None:
    if not entries:
        say("no version matches")
        return
    say(_table(chain, entries, now, long))
    ahead = [entry.manifest.time for entry in entries if entry.manifest and is_ahead(now - entry.manifest.time)]
    if ahead:
        warn(f"{count(len(ahead), 'version')} from the future, by up to {span(max(ahead) - now)}: check the clocks")
    for entry in entries:
        if entry.problem is not None:
            warn(f"version {entry.version}: {entry.problem}")


def _table(chain: Chain, entries: list[Entry], now: float, long: bool) -> Table:
    full = chain.channel.table

    def cells(of: Callable[[Entry, Manifest], str]) -> list[Text]:
        return [Text(of(entry, entry.manifest) if entry.manifest else "") for entry in entries]

    def share(_: Entry, manifest: Manifest) -> str:
        return f"{manifest.changed / max(full.elements, 1):.3%}" if manifest.base is not None else ""

    def to_full(entry: Entry, manifest: Manifest) -> str:
        return ratio(full.nbytes, _nbytes(entry, manifest)) if manifest.base is not None else ""

    def age(_: Entry, manifest: Manifest) -> str:
        return "future" if is_ahead(now - manifest.time) else span(now - manifest.time)

    def nbytes(entry: Entry, manifest: Manifest) -> str:
        return size(_nbytes(entry, manifest)) if _nbytes(entry, manifest) else ""

    when = [
        Column("digest", cells(lambda _, manifest: manifest.position.digest[:12])),
        Column("time (UTC)", cells(lambda _, manifest: moment(manifest.time).removesuffix(" UTC"))),
    ]
    writers = [Text(entry.manifest.writer if entry.manifest else "", "dim") for entry in entries]
    columns = [
        Column("version", [Text(str(entry.version), "yellow") for entry in entries]),
        *(when if long else []),
        Column("step", cells(lambda _, manifest: "" if manifest.step is None else str(manifest.step))),
        *([] if long else [Column("age", cells(age))]),
        Column("changed", cells(share), rank=3),
        Column("size", cells(nbytes)),
        Column("ratio", cells(to_full), rank=4),
        Column("codec", cells(lambda _, manifest: manifest.codec or "whole"), rank=5, left=True),
        Column("", [_marks(entry) for entry in entries], left=True),
        Column("label", cells(lambda _, manifest: manifest.label or ""), rank=1, left=True, shortest=12),
        Column("writer", writers, rank=6, left=True, early=True),
    ]
    return fitted(columns)


def _marks(entry: Entry) -> Text:
    marks = ["⚓"] * (entry.anchor is not None) + ["pinned"] * entry.pinned
    marks += [f"⇤{width}" for width in entry.squashes]
    return Text(" ".join(marks + [f"({name})" for name in entry.tags]), "cyan")
