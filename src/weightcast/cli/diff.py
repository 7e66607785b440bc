"""`weightcast diff OLD NEW -o PATCH`"""

from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import computing, report, writing_to
from weightcast.cli.options import Codec, Force, Threads
from weightcast.cli.outputs import check_output
from weightcast.disk.apply import write_patch
from weightcast.disk.checkpoint import Checkpoint


def diff(
    old: Annotated[Path, typer.Argument(help="Weights before: a safetensors file or a checkpoint folder.")],
    new: Annotated[Path, typer.Argument(help="Weights after.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the patch.")],
    codec: Codec = "banded",
    force: Force = False,
    threads: Threads = None,
) -> None:
    """Write the patch that leads from OLD to NEW, with a few tensors in memory at a time."""
    with computing(threads) as (workers, progress), Checkpoint(old) as before, Checkpoint(new) as after:
        check_output(output, force, before.files + after.files)
        with writing_to(output):
            written = write_patch(before, after, output, codec, workers, progress)
    report(
        {
            "patch": str(output),
            "codec": codec,
            "base": written.base,
            "result": written.result,
            "changed": written.changed,
            "density": written.changed / max(written.model.elements, 1),
            "bytes": written.nbytes,
            "bits_per_change": 8 * written.nbytes / written.changed if written.changed else None,
            "ratio_to_full": written.model.nbytes / written.nbytes,
        }
    )
