"""`weightcast squash URL`"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.cli.channels import head_of
from weightcast.cli.console import SHORT, caution, computing, fields_of, say, tell, writing_to
from weightcast.cli.options import Sign, Threads, TrustedKey, Url
from weightcast.cli.outputs import scratch_folder
from weightcast.cli.pull import sync_as_far_as_possible
from weightcast.cli.trusting import open_trusted, trust_of
from weightcast.cli.wording import size
from weightcast.disk.durable import Report
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
    sign: Sign = None,
    trust: TrustedKey = None,
) -> None:
    """Merge runs of versions into one patch each, so that replicas that lag far have less to fetch.

    If the newest version cannot be reached, --anchor uploads the newest one that can, and the exit code is 13.
    """
    cut: list[dict[str, Any]] = []
    with computing(threads) as (workers, progress):
        chain = open_trusted(url, trust_of(trust), report=progress, sign=sign)
        head_of(chain)
        with _weights_folder(folder) as weights:
            for edge in squashes.squash(chain, weights, workers=workers, report=progress):
                cut.append({"base": edge.base, "result": edge.result, "bytes": edge.nbytes})
                say(f"{edge.base} → {edge.result}  {size(edge.nbytes)}")
            anchored, reason = _cut_anchor(chain, weights, workers, progress) if anchor else (None, None)
    tell({"squashes": cut, "anchor": anchored, "short": None if reason is None else fields_of(reason)})
    if not cut:
        say("no squash is due")
    if anchored is not None:
        say(f"⚓ version {anchored}")
    if reason is not None:
        caution(f"the anchor is version {anchored}, not the newest: {reason}")
        raise typer.Exit(SHORT)


@contextmanager
def _weights_folder(kept: Path | None) -> Iterator[Path]:
    """The folder that is kept, or a temporary one."""
    if kept is None:
        with scratch_folder(None) as made:
            yield made
        return
    with writing_to(kept):
        kept.mkdir(parents=True, exist_ok=True)
    yield kept


def _cut_anchor(chain: Chain, weights: Path, workers: Workers, report: Report) -> tuple[int, WeightcastError | None]:
    """Cut an anchor at the head, if there is none yet; its version, and why that is not the head's, if so."""
    head = head_of(chain).position.version
    if any(edge.result == head for edge in chain.anchor_edges()):
        return head, None
    with Subscriber(
        chain.store, weights / "head", threads=workers.threads, report=report, trust=chain.signing.trust
    ) as subscriber:
        _, reason = sync_as_far_as_possible(subscriber)
        return cut_anchor(chain, subscriber.mirror, report).version, reason
