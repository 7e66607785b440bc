"""`weightcast export URL FOLDER`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import computing, say, tell
from weightcast.cli.options import Scratch, Threads, TrustedKey, Url
from weightcast.cli.outputs import scratch_folder
from weightcast.cli.trusting import open_trusted, trust_of
from weightcast.cli.wording import count
from weightcast.interop.exporting import Exported, chosen, export_versions
from weightcast.interop.layouts import LayoutName
from weightcast.interop.slime_format import Checksum, Encoding


def export(
    url: Url,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    layout: Annotated[LayoutName, typer.Option("--to", help="The layout to write.")] = "history",
    step: Annotated[
        int | None, typer.Option(min=0, metavar="STEP", help="Only this training step; all versions by default.")
    ] = None,
    encoding: Annotated[Encoding, typer.Option(help="Of slime's deltas: xor (smaller) or overwrite.")] = "xor",
    checksum: Annotated[Checksum, typer.Option(help="Of slime's deltas.")] = "xxh3-128",
    scratch: Scratch = None,
    threads: Threads = None,
    trust: TrustedKey = None,
) -> None:
    """Write versions as checkpoint folders, one per step, or as another system's anchors and deltas."""
    done: list[Exported] = []
    with computing(threads) as (workers, progress), scratch_folder(scratch) as room:
        chain = open_trusted(url, trust_of(trust))
        versions = chosen(chain, layout, step)
        for one in export_versions(
            chain,
            versions,
            folder,
            room,
            layout,
            encoding=encoding,
            checksum=checksum,
            workers=workers,
            report=progress,
        ):
            done.append(one)
            say(f"version {one.manifest.position.version:<5}  {one.name}")
    tell(
        {
            "folder": str(folder),
            "layout": layout,
            "versions": [
                {
                    "version": one.manifest.position.version,
                    "digest": one.manifest.position.digest,
                    "step": one.step,
                    "name": one.name,
                }
                for one in done
            ],
        }
    )
    say(f"{count(len(done), 'step')} in {folder}")
