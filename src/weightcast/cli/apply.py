"""`weightcast apply PATCH TARGET [-o OUT]`, `weightcast apply --resume TARGET`"""

from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import computing, report, writing_to
from weightcast.cli.options import Force, Threads
from weightcast.cli.outputs import check_output, replaced
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
) -> None:
    """Bring TARGET from the patch's base to its result, in place or as a copy.

    A wrong base is refused before a byte is touched. A kill during an apply in place does no harm: run it again.
    """
    if len(paths) != (1 if resuming else 2) or (resuming and output):
        hint = "Write `apply PATCH TARGET`, or `apply --resume TARGET`."
        raise UsageError("apply takes PATCH and TARGET, or --resume and TARGET", hint=hint)
    if force and output is None:
        raise UsageError("--force is for -o, which is not given", hint="Leave it out: an apply in place needs none.")
    target = paths[-1]
    with computing(threads) as (workers, progress), writing_to(output or target):
        if resuming:
            done = resume(target, workers, progress)
        elif output is not None:
            check_output(output, force, paths)
            done = replaced(output, lambda out: apply_to_copy(paths[0], target, out, workers, progress))
        else:
            done = apply_in_place(paths[0], target, workers, progress)
    changed = done is not None and done.changed
    report({"target": str(output or target), "digest": done and done.digest, "changed": changed})
