"""`weightcast copy URL URL [--follow]`"""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from functools import partial
from typing import Annotated, Any

import typer

from weightcast.cli.channels import open_bucket
from weightcast.cli.console import caution, code_of, computing, fields_of, say, tell
from weightcast.cli.following import Outage, print_end, print_event, print_warning
from weightcast.cli.options import Every, Scratch, Url
from weightcast.cli.outputs import scratch_folder
from weightcast.cli.wording import count, size, span
from weightcast.errors import ChannelError, UsageError, VersionError
from weightcast.follow.loop import rounds
from weightcast.upkeep.copy import Copied, Copier

_FATAL = (UsageError, VersionError, ChannelError)
"""Errors that trying again does not cure: the source was reset, or the copy is of something else."""


def copy(
    url: Url,
    destination: Annotated[
        str, typer.Argument(metavar="URL", help="The copy: nothing yet, or an earlier copy of that channel.")
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue until SIGINT or SIGTERM; a second one exits at once.")
    ] = False,
    every: Every = 1.0,
    scratch: Scratch = None,
) -> None:
    """Bring a channel to another bucket, byte for byte, once or continuously.

    Only what the copy lacks is moved, and every object is checked on the way. Whoever reads the copy meanwhile finds a
    whole channel that ends at some version of its source. Tags are copied; pins and heartbeats are not, since each
    bucket has its own replicas and its own `weightcast gc`.
    """
    with computing(None, kernels=False) as (_, progress), scratch_folder(scratch) as place:
        source, there = open_bucket(url), open_bucket(destination, progress)
        with closing(Copier(source, there, place, report=progress)) as copier:
            if not follow:
                _copy(copier)
                return
            at = copier.position
            held = f"which is at version {at.version}" if at else "which has no version yet"
            fields = {"channel": source.url, "copy": there.url, "version": at.version if at else None}
            print_event("begin", f"copying {source.url} to {there.url}, {held}", **fields)
            with suppress(KeyboardInterrupt):
                _follow(copier, every)
            print_end(copier.position.version if copier.position else None)


def _copy(copier: Copier) -> None:
    """Copy all there is; the exit code says what was damaged at the source, if anything was."""
    began, total = time.monotonic(), Copied(copier.position)
    while (copied := copier.sync()) is not None:
        total = total.plus(copied)
    seconds = time.monotonic() - began
    problems = [fields_of(problem) for problem in total.problems]
    tell({**_fields(total), "seconds": round(seconds, 3), "problems": problems})
    version = total.position.version if total.position else None
    where = "the copy has no version yet" if version is None else f"the copy is at version {version}"
    say(f"{_line(total)} in {span(seconds)}; {where}" if total.is_news else where)
    for problem in total.problems:
        caution(f"left out: {problem}")
    if total.problems:
        raise typer.Exit(code_of(total.problems[0]))


def _follow(copier: Copier, every: float) -> None:
    """Print what is copied until a signal comes, and each thing that is damaged at the source once."""
    outage, said = Outage(_FATAL), set[str]()
    for copied in rounds(
        partial(copier.sync, wait=False), every=every, stopped=threading.Event(), on_error=outage.failed
    ):
        outage.round_ended()
        if copied is None:
            continue
        if copied.is_news:
            version = copied.position.version if copied.position else None
            print_event("copied", f"version {version}: {_line(copied)}", **_fields(copied))
        for problem in copied.problems:
            if str(problem) not in said:
                print_warning(problem)
            said.add(str(problem))


def _fields(copied: Copied) -> dict[str, Any]:
    return {
        "version": copied.position.version if copied.position else None,
        "versions": copied.versions,
        "squashes": copied.squashes,
        "anchors": copied.anchors,
        "tags": copied.tags,
        "bytes": copied.nbytes,
    }


def _line(copied: Copied) -> str:
    parts = [count(copied.versions, "version")] * bool(copied.versions)
    parts += [count(copied.squashes, "squash")] * bool(copied.squashes)
    parts += [count(copied.anchors, "anchor")] * bool(copied.anchors)
    parts += [count(copied.tags, "tag")] * bool(copied.tags)
    return f"{', '.join(parts)}, {size(copied.nbytes)}"
