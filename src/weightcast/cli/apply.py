"""`weightcast apply PATCH TARGET [-o OUT]`, `weightcast apply --resume TARGET`"""

from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import AsJson, Threads, working, writing_to
from weightcast.cli.outputs import Force, check_output, replaced
from weightcast.cli.words import report as print_report
from weightcast.disk.apply import apply_in_place, apply_to_copy, resume
from weightcast.errors import UsageError


def apply(
    paths: Annotated[list[Path], typer.Argument(metavar="PATCH TARGET", help="The patch, then the weights.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Leave TARGET alone and write the result here.")
    ] = None,
    force: Force = False,
    resuming: Annotated[
        bool, typer.Option("--resume", help="Only complete an interrupted apply; takes TARGET alone.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Bring TARGET from the patch's base to its result, in place or as a copy.

    A wrong base is refused before a byte is touched. A kill during an apply in place does no harm: run it again.
    """
    with working(threads, as_json) as (workers, report):
        if len(paths) != (1 if resuming else 2) or (resuming and output):
            raise UsageError("apply takes PATCH and TARGET, or --resume and TARGET")
        if force and output is None:
            raise UsageError("--force is for -o, which this command does not have")
        target = paths[-1]
        with writing_to(output or target):
            if resuming:
                done = resume(target, workers, report)
            elif output is not None:
                check_output(output, force, paths)
                done = replaced(output, lambda out: apply_to_copy(paths[0], target, out, workers, report))
            else:
                done = apply_in_place(paths[0], target, workers, report)
        changed = done is not None and done.changed
        values = {"target": str(output or target), "digest": done and done.digest, "changed": changed}
        print_report(values, as_json)
