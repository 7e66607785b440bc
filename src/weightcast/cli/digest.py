"""`weightcast digest PATH`"""

from pathlib import Path
from typing import Annotated

import typer

from weightcast.checkpoint import Checkpoint
from weightcast.cli.console import AsJson, Threads, facts, working
from weightcast.stage import standing_of


def digest(
    path: Annotated[Path, typer.Argument(help="A safetensors file or a Hugging Face checkpoint folder.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor's digest too.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Print where weights stand: two holders of one position hold the same bits."""
    with working(threads, as_json) as (workers, report):
        with Checkpoint(path) as weights:
            standing = standing_of(weights, workers, report)
        table = standing.table
        values = {
            "position": standing.position,
            "tensors": len(table),
            "elements": table.elements,
            "bytes": table.nbytes,
        }
        each = {spec.name: f"{value:016x}" for spec, value in zip(table, standing.digests, strict=True)}
        facts(values | {"digests": each} if tensors and as_json else values, as_json)
        if tensors and each and not as_json:
            facts(each, as_json=False)
