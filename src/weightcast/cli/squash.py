"""`weightcast squash URL`"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.cli.console import (
    AsJson,
    Threads,
    Url,
    fields_of,
    head_of,
    open_chain,
    say,
    tell,
    warn,
    working,
    writing_to,
)
from weightcast.cli.pull import SHORT, sync_as_far_as_possible
from weightcast.cli.wording import size
from weightcast.disk.durable import Report, scratch
from weightcast.errors import WeightcastError
from weightcast.follow.subscriber import Subscriber
from weightcast.format.workers import Workers
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.upkeep import squash as squashes


def squash(
    url: Url,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the weights here between runs instead of fetching them each time."),
    ] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Also upload the newest version whole, for new replicas to begin with.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Merge runs of versions into one patch each, so that replicas that lag far have less to fetch.

    If the newest version cannot be reached, --anchor uploads the newest one that can, and the exit code is 13.
    """
    with working(threads, as_json) as (workers, report):
        chain = open_chain(url, report)
        head_of(chain)
        cut: list[dict[str, Any]] = []
        with _scratch(folder) as scratch:
            for edge in squashes.squash(chain, scratch, workers=workers, report=report):
                cut.append({"base": edge.base, "result": edge.result, "bytes": edge.nbytes})
                if not as_json:
                    say(f"{edge.base} → {edge.result}  {size(edge.nbytes)}")
            anchored, reason = _cut_anchor(chain, scratch, workers, report) if anchor else (None, None)
        if as_json:
            tell({"squashes": cut, "anchor": anchored, "short": None if reason is None else fields_of(reason)})
        else:
            if not cut:
                say("no squash is due")
            if anchored is not None:
                say(f"⚓ version {anchored}")
            if reason is not None:
                warn(f"the anchor is version {anchored}, not the newest: {reason}")
        if reason is not None:
            raise typer.Exit(SHORT)


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """The folder that is kept, or one that is not."""
    if folder is not None:
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield folder
    else:
        with scratch() as made:
            yield made


def _cut_anchor(chain: Chain, scratch: Path, workers: Workers, report: Report) -> tuple[int, WeightcastError | None]:
    """Cut an anchor at the head, if there is none yet; its version, and why that is not the head's, if so."""
    head = head_of(chain).position.version
    if any(edge.result == head for edge in chain.anchor_edges()):
        return head, None
    with Subscriber(chain.store, scratch / "head", threads=workers.threads, report=report) as subscriber:
        _, reason = sync_as_far_as_possible(subscriber)
        return cut_anchor(chain, subscriber.mirror, report).version, reason
