"""`weightcast apply PATCH TARGET [-o OUT]`, `weightcast apply --resume TARGET`"""

from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import AsJson, Threads, facts, working, writing_to
from weightcast.disk.apply import apply_in_place, apply_to_copy, resume
from weightcast.errors import UsageError


def apply(
    paths: Annotated[list[Path], typer.Argument(metavar="PATCH TARGET", help="The patch, then the weights.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Leave TARGET alone; write here.")] = None,
    resuming: Annotated[
        bool, typer.Option("--resume", help="Only complete an interrupted apply; takes TARGET alone.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Bring TARGET from the patch's base to its result, in place or as a copy.

    A wrong base is refused before a byte is touched. In place survives a kill at any moment: run it again.
    """
    with working(threads, as_json) as (workers, report):
        if len(paths) != (1 if resuming else 2) or (resuming and output):
            raise UsageError("apply takes PATCH and TARGET, or --resume and TARGET")
        target = paths[-1]
        with writing_to(output or target):
            if resuming:
                done = resume(target, workers, report)
            elif output:
                done = apply_to_copy(paths[0], target, output, workers, report)
            else:
                done = apply_in_place(paths[0], target, workers, report)
        changed = done is not None and done.changed
        facts({"target": str(output or target), "position": done and done.digest, "changed": changed}, as_json)
