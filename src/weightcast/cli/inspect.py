"""`weightcast inspect PATCH`"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.cli.console import report, say
from weightcast.cli.tensors import All, list_tensors
from weightcast.format.joined import joined
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource


def inspect(
    patch: Annotated[Path, typer.Argument(help="A patch file.")],
    everything: All = False,
) -> None:
    """Show what a patch contains. This needs no weights."""
    with FileSource(patch) as source:
        summary, tensors = describe([PatchReader(source)])
    report(summary, tensors=tensors)
    if tensors:
        say("")
        list_tensors(tensors, everything)


def describe(readers: Sequence[PatchReader]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The patch as a whole, in one or several objects, and tensor by tensor."""
    patch = joined(readers)
    stored: Counter[str] = Counter()
    for reader in readers:
        for row in reader.rows:
            stored[row.spec.name] += reader.stored(row)
    changed = sum(row.changed for row in patch.rows)
    model, nbytes = patch.header.model, sum(reader.nbytes for reader in readers)
    summary = {
        "base": patch.header.base,
        "result": patch.header.result,
        "codec": "+".join(sorted({reader.header.codec for reader in readers})),
        "bytes": nbytes,
        "overhead_bytes": sum(reader.overhead for reader in readers),
        "changed_tensors": len(patch.rows),
        "model_tensors": model.tensors,
        "changed": changed,
        "density": changed / max(model.elements, 1),
        "bits_per_change": 8 * nbytes / changed if changed else None,
        "ratio_to_full": model.nbytes / nbytes,
    }
    tensors = [
        {
            "name": row.spec.name,
            "dtype": row.spec.dtype,
            "shape": list(row.spec.shape),
            "changed": row.changed,
            "density": row.changed / row.spec.elements,
            "bytes": stored[row.spec.name],
            "bits_per_change": 8 * stored[row.spec.name] / row.changed,
        }
        for row in patch.rows
    ]
    return summary, tensors
