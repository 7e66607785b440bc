"""`weightcast analyze URL`, `weightcast analyze OLD NEW`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.analysis.anatomy import Anatomy, anatomy_of
from weightcast.analysis.cadence import Fleet, cadences
from weightcast.analysis.channel_steps import last_versions, read_steps
from weightcast.analysis.sizes import SQUASHED
from weightcast.analysis.steps import Pair
from weightcast.cli.anatomy import show
from weightcast.cli.anatomy_facts import cadence_facts, facts_of
from weightcast.cli.channels import open_chain
from weightcast.cli.console import computing, say, tell, writing_to
from weightcast.cli.options import Force, Scratch, Threads
from weightcast.cli.outputs import check_folder, check_output, scratch_folder
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import Report, replacing
from weightcast.errors import UsageError
from weightcast.format.diff import refuse_other_table
from weightcast.format.workers import Workers

_MOST = 256
"""Versions at most: each takes its patch on disk, and of one tensor in memory."""

_LAST, _FLEET = 16, Fleet()


def analyze(
    source: Annotated[str, typer.Argument(metavar="URL|OLD", help="The channel; or, with NEW, weights before.")],
    new: Annotated[
        Path | None, typer.Argument(metavar="NEW", help="Weights after: a safetensors file or a checkpoint folder.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PAGE", help="Also write a page of plots, one HTML file.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, show_default=str(_LAST), help="How many of the newest versions to look at."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=0, show_default=str(_FLEET.replicas), help="For the estimate: replicas that follow the channel."
        ),
    ] = None,
    joins: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default=str(_FLEET.joins),
            help="For the estimate: how often each joins anew, and comes back, in 100 versions.",
        ),
    ] = None,
    force: Force = False,
    scratch: Scratch = None,
    threads: Threads = None,
) -> None:
    """Show why so few weights change from version to version, where, and what that costs.

    Flips are counted exactly, by the exponent of the weight, and compared with what rounding predicts. Patches are
    encoded to measure them; what cutting squashes and anchors costs is an estimate from these sizes.
    """
    if output is not None:
        check_folder(output)
        check_output(output, force, [Path(source), *([new] if new else [])])
    if new is not None and not (last is replicas is joins is None):
        hint = "Leave it out, or name a channel."
        raise UsageError("--last, --replicas and --joins are for channels, not for two checkpoints", hint=hint)
    with computing(threads) as (workers, progress):
        if new is None:
            fleet = Fleet(_FLEET.replicas if replicas is None else replicas, _FLEET.joins if joins is None else joins)
            with scratch_folder(scratch) as folder:
                values, found = _of_channel(source, last or _LAST, fleet, folder, workers, progress)
        else:
            values, found = _of_checkpoints(Path(source), new, workers, progress)
    tell(values)
    show(values, found)
    if output is not None:
        from weightcast.view.anatomy import anatomy_page  # a page is seldom asked for

        with writing_to(output), replacing(output) as file:
            file.write(anatomy_page(values).encode())
        say("")
        say(f"written: {output}")


def _of_channel(
    url: str, last: int, fleet: Fleet, scratch: Path, workers: Workers, progress: Report
) -> tuple[dict[str, Any], Anatomy]:
    chain = open_chain(url)
    with read_steps(chain, last_versions(chain, last), scratch, workers, progress) as read:
        found = anatomy_of(read.steps, workers, progress)
    ways = cadences(found.sizes.codecs[SQUASHED], found.sizes.windows, found.table.nbytes, fleet)
    about = {
        "source": {"url": chain.store.url, "first": read.first, "last": read.manifests[-1].position.version},
        "published": [
            {
                "version": commit.position.version,
                "step": commit.step,
                "codec": commit.codec,
                "bytes": None if commit.base is None else commit.nbytes,
            }
            for commit in read.manifests
        ],
    }
    return about | facts_of(found) | {"cadence": cadence_facts(ways, fleet)}, found


def _of_checkpoints(old: Path, new: Path, workers: Workers, progress: Report) -> tuple[dict[str, Any], Anatomy]:
    with Checkpoint(old) as before, Checkpoint(new) as after:
        refuse_other_table(before.table, after.table)
        found = anatomy_of(Pair(before, after), workers, progress)
    return {"source": {"old": str(old), "new": str(new)}} | facts_of(found), found
