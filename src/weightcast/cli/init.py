"""`weightcast init URL CHECKPOINT`, or `weightcast init URL --from-hub REPO@REVISION`"""

import time
from pathlib import Path
from typing import Annotated

import typer

from weightcast.channel.records import Reference
from weightcast.cli.channels import open_bucket
from weightcast.cli.console import caution, computing, report
from weightcast.cli.options import Sign, Threads, Url
from weightcast.errors import UsageError
from weightcast.publish import open as begin
from weightcast.publish.open import left_out


def init(
    url: Url,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="CHECKPOINT", help="Version 0: a safetensors file or a checkpoint folder."),
    ] = None,
    from_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPO@REVISION",
            help="Version 0 is this model of the Hugging Face Hub. Replicas fetch it there; nothing is uploaded.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="REPO@REVISION",
            help="Do not upload CHECKPOINT: replicas fetch this public checkpoint, which has the same bits.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The training step of version 0.")] = None,
    threads: Threads = None,
    sign: Sign = None,
) -> None:
    """Begin a channel with a checkpoint as its version 0."""
    began = time.monotonic()
    with computing(threads) as (workers, progress):
        weights, elsewhere = _weights(checkpoint, from_hub, reference)
        store = open_bucket(url, progress)
        manifest = begin.init(
            store, weights, reference=elsewhere, step=step, workers=workers, report=progress, sign=sign
        )
        unsent = left_out(weights) if isinstance(weights, Path) and elsewhere is None else []
        report(
            {
                "channel": store.url,
                "id": manifest.channel,
                "version": manifest.position.version,
                "digest": manifest.position.digest,
                "elements": manifest.changed,
                "seconds": round(time.monotonic() - began, 3),
            },
            left_out=unsent,
        )
        caution_left_out(unsent)


def caution_left_out(names: list[str]) -> None:
    """Say which files replicas will not get, if any."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    if names:
        caution(f"not uploaded, since an anchor has only weights, configuration and tokenizer: {shown}")


def _weights(
    checkpoint: Path | None, from_hub: str | None, reference: str | None
) -> tuple[Path | Reference, Reference | None]:
    """What version 0 is, and where else replicas find it."""
    if checkpoint is not None and from_hub is None:
        return checkpoint, reference_named(reference) if reference is not None else None
    if checkpoint is None and from_hub is not None and reference is None:
        return reference_named(from_hub), None
    hint = "Name a folder, with --reference if replicas fetch it elsewhere, or --from-hub REPO@REVISION without one."
    raise UsageError("version 0 is either CHECKPOINT or a model of the Hub", hint=hint)


def reference_named(text: str) -> Reference:
    """``REPO@REVISION``, read; `UsageError` if it is not that."""
    repository, _, revision = text.rpartition("@")
    if not repository or not revision or not text.isprintable() or len(text) > 1000:
        hint = "Write a repository and a revision that never changes: Qwen/Qwen3-0.6B@c1899de2…"
        raise UsageError(f"{text[:200]!r} is not REPO@REVISION", hint=hint)
    return Reference(repository, revision)
