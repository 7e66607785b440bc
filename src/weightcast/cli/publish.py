"""`weightcast publish URL CHECKPOINT`"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from weightcast.channel.keys import MAX_LABEL, check_label
from weightcast.cli.channels import head_of
from weightcast.cli.console import computing, say, tell
from weightcast.cli.event_file import event_sinks
from weightcast.cli.init import caution_left_out
from weightcast.cli.options import Codec, Events, HeadMirror, Sign, Threads, TrustedKey, Url
from weightcast.cli.trusting import open_trusted, refuse_default_mirror, trust_of
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
    codec: Codec = "banded",
    mirror: HeadMirror = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Upload it whole, to repair a channel whose newest version is lost.")
    ] = False,
    events: Events = None,
    threads: Threads = None,
    sign: Sign = None,
    trust: TrustedKey = None,
) -> None:
    """Publish a checkpoint as the channel's next version.

    If it has the bits of the newest version, nothing is published.
    """
    began = time.monotonic()  # before kernels are loaded or compiled: the user waits for that, too
    check_label(label)
    with ExitStack() as opened, computing(threads) as (workers, progress):
        sinks = event_sinks(events, opened)
        trusted = trust_of(trust, mirror)
        refuse_default_mirror(trusted, mirror)
        chain = open_trusted(url, trusted, mirror, progress, sign=sign)
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
            report=progress,
            on_event=sinks,
            signing=chain.signing,
        )
    spent = time.monotonic() - began
    manifest, table = published.manifest, chain.channel.table
    version, density = manifest.position.version, manifest.changed / max(table.elements, 1)
    nbytes = manifest.nbytes if manifest.base is not None else chain.anchor(manifest.key).nbytes
    tell(
        {
            "version": version,
            "digest": manifest.position.digest,
            "new": published.new,
            "step": manifest.step,
            "label": manifest.label,
            "changed": manifest.changed,
            "density": density,
            "bytes": nbytes,
            "ratio_to_full": table.nbytes / nbytes,
            "seconds": round(spent, 3),
        }
    )
    if published.new:
        parts = f"{density:.3%} changed", size(nbytes), ratio(table.nbytes, nbytes), span(spent)
        say(f"version {version}  {'  '.join(parts)}")
    else:
        say(f"version {version} has these weights already")
    if mirror is None and is_new and keeper.exists():
        say(f"made a mirror of {size(table.nbytes)} in {keeper}, to compare the next version with")
    if anchor:
        caution_left_out(left_out(checkpoint))
