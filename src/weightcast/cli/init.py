"""`weightcast init URL CHECKPOINT`"""

import time
from pathlib import Path
from typing import Annotated

import typer

from weightcast import begin
from weightcast.cli.console import AsJson, Threads, Url, facts, working
from weightcast.errors import UsageError
from weightcast.manifest import Reference
from weightcast.store import open_store


def init(
    url: Url,
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Version 0: a safetensors file or a checkpoint folder.")
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="REPO@REVISION", help="Upload no weights: replicas get this public checkpoint themselves."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The training step of version 0.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Begin a channel with a checkpoint as its version 0."""
    with working(threads, as_json) as (workers, report):
        began = time.monotonic()
        elsewhere = reference_named(reference) if reference is not None else None
        store = open_store(url)
        manifest = begin.init(store, checkpoint, reference=elsewhere, step=step, workers=workers, report=report)
        values = {
            "channel": store.url,
            "id": manifest.channel,
            "version": manifest.position.version,
            "digest": manifest.position.digest,
            "elements": manifest.changed,
            "seconds": round(time.monotonic() - began, 3),
        }
        facts(values, as_json)


def reference_named(text: str) -> Reference:
    """``REPO@REVISION``, read; `UsageError` if it is not that."""
    repository, _, revision = text.rpartition("@")
    if not repository or not revision or not text.isprintable() or len(text) > 1000:
        hint = "It is a repository and a revision that never changes: Qwen/Qwen3-0.6B@c1899de2…"
        raise UsageError(f"{text!r} is no reference", hint=hint)
    return Reference(repository, revision)
