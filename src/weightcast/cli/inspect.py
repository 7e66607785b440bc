"""`weightcast inspect PATCH`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.cli.console import report, say
from weightcast.cli.tensors import All, list_tensors
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource


def inspect(
    patch: Annotated[Path, typer.Argument(help="A patch file.")],
    everything: All = False,
) -> None:
    """Show what a patch contains. This needs no weights."""
    with FileSource(patch) as source:
        summary, tensors = describe(PatchReader(source))
    report(summary, tensors=tensors)
    if tensors:
        say("")
        list_tensors(tensors, everything)


def describe(reader: PatchReader) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The patch as a whole, and tensor by tensor."""
    changed = sum(row.changed for row in reader.rows)
    model = reader.header.model
    summary = {
        "base": reader.header.base,
        "result": reader.header.result,
        "codec": reader.header.codec,
        "bytes": reader.nbytes,
        "overhead_bytes": reader.overhead,
        "changed_tensors": len(reader.rows),
        "model_tensors": model.tensors,
        "changed": changed,
        "density": changed / max(model.elements, 1),
        "bits_per_change": 8 * reader.nbytes / changed if changed else None,
        "ratio_to_full": model.nbytes / reader.nbytes,
    }
    tensors = [
        {
            "name": row.spec.name,
            "dtype": row.spec.dtype,
            "shape": list(row.spec.shape),
            "changed": row.changed,
            "density": row.changed / row.spec.elements,
            "bytes": reader.stored(row),
            "bits_per_change": 8 * reader.stored(row) / row.changed,
        }
        for row in reader.rows
    ]
    return summary, tensors
