"""`weightcast squash URL`"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.cli.console import AsJson, Threads, Url, head_of, open_chain, say, tell, working, writing_to
from weightcast.cli.wording import size
from weightcast.disk.durable import Report
from weightcast.follow.subscriber import Subscriber
from weightcast.format.workers import Workers
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.upkeep import squash as squashes


def squash(
    url: Url,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the weights here between runs; else they are fetched anew each time."),
    ] = None,
    anchor: Annotated[bool, typer.Option("--anchor", help="Upload the newest version whole, too.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Merge runs of versions into one patch each, so that replicas far behind have less to fetch."""
    with working(threads, as_json) as (workers, report):
        chain = open_chain(url, report)
        head_of(chain)
        cut: list[dict[str, Any]] = []
        with _scratch(folder) as scratch:
            for edge in squashes.squash(chain, scratch, workers=workers, report=report):
                cut.append({"base": edge.base, "result": edge.result, "bytes": edge.nbytes})
                if not as_json:
                    say(f"{edge.base} → {edge.result}  {size(edge.nbytes)}")
            anchored = _cut_anchor(chain, scratch, workers, report) if anchor else None
        if as_json:
            tell({"squashes": cut, "anchor": anchored})
            return
        if not cut:
            say("no squash is due")
        if anchored is not None:
            say(f"⚓ version {anchored}")


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """The folder that is kept, or one that is not."""
    if folder is not None:
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="weightcast-") as made:
            yield Path(made)


def _cut_anchor(chain: Chain, scratch: Path, workers: Workers, report: Report) -> int:
    """An anchor at the head, if there is none yet; the head's version."""
    head = head_of(chain).position.version
    if any(edge.result == head for edge in chain.anchor_edges()):
        return head
    with Subscriber(chain.store, scratch / "head", threads=workers.threads, report=report) as subscriber:
        subscriber.sync()
        return cut_anchor(chain, subscriber.mirror, report).version
