"""`weightcast publish URL CHECKPOINT`"""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.keys import MAX_LABEL, check_label
from weightcast.cli.console import AsJson, Threads, Url, head_of, open_chain, say, tell, working
from weightcast.cli.init import warn_left_out
from weightcast.cli.wording import ratio, size, span
from weightcast.follow.mirror_folder import default_mirror
from weightcast.publish import from_checkpoint as folders
from weightcast.publish.open import left_out


def publish(
    url: Url,
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The next version: a safetensors file or a checkpoint folder.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="The training step of these weights.")] = None,
    label: Annotated[
        str | None,
        typer.Option("-m", "--label", metavar="TEXT", help=f"One line for people, up to {MAX_LABEL} characters."),
    ] = None,
    codec: Annotated[
        Literal["plain", "gap", "banded"],
        typer.Option(help="banded (smallest), gap (faster to read), plain (for any safetensors reader)."),
    ] = "banded",
    mirror: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the newest version is kept to compare with; else in your cache."),
    ] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Upload it whole, to repair a channel whose newest version is lost.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint as the channel's next version.

    If it has the bits of the newest version, nothing is published.
    """
    began = time.monotonic()  # loading or compiling kernels counts: whoever waits for it waits for that, too
    with working(threads, as_json) as (workers, report):
        check_label(label)
        chain = open_chain(url, report)
        head_of(chain)
        keeper = mirror or default_mirror(chain.channel.id)
        is_new = not keeper.exists()
        published = folders.publish(
            chain.store,
            checkpoint,
            keeper,
            step=step,
            label=label,
            codec=codec,
            anchor=anchor,
            workers=workers,
            report=report,
        )
        _print(chain, published, time.monotonic() - began, as_json)
        if mirror is None and is_new and keeper.exists() and not as_json:
            full = size(chain.channel.table.nbytes)
            say(f"made a mirror of {full} in {keeper}, to compare the next version with")
        if anchor and not as_json and (unsent := left_out(checkpoint)):
            warn_left_out(unsent)


def _print(chain: Chain, published: folders.Published, seconds: float, as_json: bool) -> None:
    manifest, table = published.manifest, chain.channel.table
    version, density = manifest.position.version, manifest.changed / max(table.elements, 1)
    nbytes = manifest.object.size if manifest.base is not None else chain.anchor(manifest.object.key).nbytes
    if as_json:
        values = {
            "version": version,
            "digest": manifest.position.digest,
            "new": published.new,
            "step": manifest.step,
            "label": manifest.label,
            "changed": manifest.changed,
            "density": density,
            "bytes": nbytes,
            "ratio_to_full": table.nbytes / nbytes,
            "seconds": round(seconds, 3),
        }
        tell(values)
    elif published.new:
        parts = f"{density:.3%} changed", size(nbytes), ratio(table.nbytes, nbytes), span(seconds)
        say(f"version {version}  {'  '.join(parts)}")
    else:
        say(f"version {version} has these weights already")
