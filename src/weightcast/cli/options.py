"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

NAMES = "a number, a tag or `head`"
"""How people name a version."""

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="The channel: a folder, s3://bucket/folder, gs://…, az://…, hf://buckets/… or https://…."
    ),
]
Version = Annotated[str, typer.Argument(metavar="VERSION", help=f"The version: {NAMES}.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to use; all cores by default.")]
Codec = Annotated[
    Literal["plain", "gap", "banded"],
    typer.Option(help="banded (smallest), gap (faster to read), plain (for any safetensors reader)."),
]
Every = Annotated[float, typer.Option(min=0.01, metavar="SECONDS", help="Seconds between checks for a new version.")]
Scratch = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where temporary copies of the weights go; the system's /tmp by default."),
]
