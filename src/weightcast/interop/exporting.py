"""Export: versions of a channel become steps of another system's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.policy import Pinned
from weightcast.channel.records import Manifest
from weightcast.disk.durable import Report, silent
from weightcast.errors import ChannelError, UsageError
from weightcast.follow.subscriber import Subscriber
from weightcast.format.workers import ONE, Workers
from weightcast.interop.committed import committed
from weightcast.interop.history import HistorySink
from weightcast.interop.layouts import LayoutName
from weightcast.interop.slime_format import Checksum, Encoding
from weightcast.interop.slime_sink import SlimeSink
from weightcast.interop.step import Sink
from weightcast.interop.trl_sink import TrlSink, refuse_unfit


@dataclass(frozen=True)
class Exported:
    """A version that was written as a step."""

    step: int
    name: str
    manifest: Manifest


def chosen(chain: Chain, layout: LayoutName, step: int | None = None) -> list[tuple[int, Manifest]]:
    """The versions to export, each with the number that its step gets; with ``step`` only that one.

    A history has the steps of training. TRL and slime count their updates, so their numbers are the steps only where
    these are consecutive, and else the versions.
    """
    manifests = committed(chain)
    if step is not None:
        found = [manifest for manifest in manifests if manifest.step == step]
        if not found:
            hint = f"`weightcast log {chain.store.url}` lists those there are."
            raise UsageError(f"there is no version of step {step}", file=chain.store.url, hint=hint)
        return [(step, found[-1])]
    if not manifests:
        raise ChannelError("the channel has no version yet", file=chain.store.url, hint="Import or publish some.")
    steps = [manifest.step for manifest in manifests]
    numbers = _as_numbers(steps)
    consecutive = numbers is not None and all(after == before + 1 for before, after in pairwise(numbers))
    if numbers is None and layout == "history" and any(number is not None for number in steps):
        hint = "Export the steps one by one, with --step."
        raise UsageError("the versions' steps do not rise, or some have none", file=chain.store.url, hint=hint)
    if numbers is None or (layout != "history" and not consecutive):
        numbers = [manifest.position.version for manifest in manifests]
    return list(zip(numbers, manifests, strict=True))


def _as_numbers(steps: Sequence[int | None]) -> list[int] | None:
    """The steps, if every version has one and they rise."""
    numbers = [step for step in steps if step is not None]
    rising = all(before < after for before, after in pairwise(numbers))
    return numbers if rising and len(numbers) == len(steps) else None


def export_versions(
    chain: Chain,
    versions: Sequence[tuple[int, Manifest]],
    folder: Path,
    room: Path,
    layout: LayoutName = "history",
    *,
    encoding: Encoding = "xor",
    checksum: Checksum = "xxh3-128",
    workers: Workers = ONE,
    report: Report = silent,
) -> Iterator[Exported]:
    """Write versions, in rising order, into a new or empty folder; yields each as it is there.

    ``room`` is an empty folder for two copies of the weights. Each step appears whole or not at all.
    """
    if layout == "trl":
        refuse_unfit(chain.channel.table)
    before = room / "before"
    before.mkdir()
    sink: Sink
    if layout == "history":
        sink = HistorySink(folder)
    else:
        sink = TrlSink(folder, before) if layout == "trl" else SlimeSink(folder, before, encoding, checksum)
    _make_empty(folder)
    first = Pinned(versions[0][1].position.version)
    with Subscriber(
        chain.store, room / "mirror", first, threads=workers.threads, report=report, trust=chain.signing.trust
    ) as subscriber:
        for number, manifest in versions:
            subscriber.policy = Pinned(manifest.position.version)
            subscriber.sync()
            subscriber.fold()
            if subscriber.position != manifest.position:
                problem = f"version {manifest.position.version} was replaced while it was exported"
                raise ChannelError(problem, file=chain.store.url, hint="Export again, into another folder.")
            yield Exported(number, sink.write(number, subscriber.mirror), manifest)


def _make_empty(folder: Path) -> None:
    """Make the folder; `UsageError` unless it is empty, or its parent is missing."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError("the folder is not empty", file=str(folder), hint="Name a new one.")
    if not folder.absolute().parent.is_dir():
        raise UsageError("the folder above it does not exist", file=str(folder), hint="Create it first.")
    folder.mkdir(exist_ok=True)
