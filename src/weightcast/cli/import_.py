"""`weightcast import URL FOLDER`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightcast.channel.trust import signing_of
from weightcast.cli.channels import open_bucket
from weightcast.cli.console import caution, computing, say, tell
from weightcast.cli.init import caution_left_out
from weightcast.cli.options import Codec, HeadMirror, Scratch, Sign, Threads, TrustedKey, Url
from weightcast.cli.outputs import scratch_folder
from weightcast.cli.trusting import refuse_default_mirror, trust_of
from weightcast.cli.wording import count, size
from weightcast.interop.importing import Imported, import_steps
from weightcast.interop.layouts import LayoutName, layout_of, opened
from weightcast.interop.step import not_taken


def import_(
    url: Url,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder with the steps.")],
    layout: Annotated[
        LayoutName | None, typer.Option("--from", help="The folder's layout; by default, what its names show.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="What the run began with: for slime its version 0, for TRL configuration and tokenizer.",
        ),
    ] = None,
    codec: Codec = "banded",
    mirror: HeadMirror = None,
    scratch: Scratch = None,
    threads: Threads = None,
    sign: Sign = None,
    trust: TrustedKey = None,
) -> None:
    """Bring a history of checkpoints, or another system's deltas, into a channel: each step becomes a version.

    Run it again when there are more steps, or after an interruption: what is there is compared, what is missing added.
    """
    done: list[Imported] = []
    with computing(threads) as (workers, progress), scratch_folder(scratch) as made:
        room = made / "replayed"
        room.mkdir()
        source = opened(folder, layout, base)
        store, trusted = open_bucket(url, progress), trust_of(trust, mirror)
        refuse_default_mirror(trusted, mirror)
        signing = signing_of(trusted, sign)
        for one in import_steps(
            store, source, room, mirror, codec=codec, workers=workers, report=progress, signing=signing
        ):
            done.append(one)
            if one.new and one.manifest is not None:
                version = f"version {one.manifest.position.version}"
                say(f"{version:<13}  step {one.step:<8}  {size(one.nbytes):>7}  {one.name}")
    name = layout or layout_of(folder)
    new = [one for one in done if one.new]
    other = {str(one.step): list(one.other_files) for one in done if one.other_files}
    unsent = not_taken(folder / done[0].name) if name == "history" else []
    tell(
        {
            "channel": store.url,
            "layout": name,
            "steps": len(done),
            "new": len(new),
            "bytes": sum(one.nbytes for one in new),
            "versions": {str(one.step): one.manifest and one.manifest.position.version for one in done},
            "left_out": unsent,
            "other_files": other,
        }
    )
    before = f", {len(done) - len(new)} of them there already" if len(new) < len(done) else ""
    say(f"{count(len(done), 'step')}{before}; {size(sum(one.nbytes for one in new))} uploaded")
    caution_left_out(unsent)
    if other:
        names = ", ".join(sorted({name for names in other.values() for name in names}))
        caution(f"{count(len(other), 'step')} had other small files than the first, whose are kept: {names}")
