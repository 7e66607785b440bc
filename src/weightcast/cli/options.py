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
Near = Annotated[
    list[str] | None,
    typer.Option(
        "--near", metavar="URL", help="Read from this copy of the channel while it answers; several in this order."
    ),
]
Version = Annotated[str, typer.Argument(metavar="VERSION", help=f"The version: {NAMES}.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to use; all cores by default.")]
Codec = Annotated[
    Literal["plain", "gap", "banded"],
    typer.Option(help="banded (smallest), gap (faster to read), plain (for any safetensors reader)."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]
Every = Annotated[
    float, typer.Option(min=0.01, max=86400, metavar="SECONDS", help="Seconds between checks for a new version.")
]
Events = Annotated[
    Path | None,
    typer.Option("--events", metavar="FILE", help="Append what each phase of a version took, as lines of JSON."),
]
HeadMirror = Annotated[
    Path | None,
    typer.Option(
        "--mirror", metavar="FOLDER", help="Where the newest version is kept to compare with; in your cache by default."
    ),
]
Scratch = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where temporary copies of the weights go; the system's /tmp by default."),
]
TrustedKey = Annotated[
    str | None,
    typer.Option(
        "--trust",
        metavar="KEY",
        help="Accept only what this root key vouches for: ed25519:… or a file. A mirror remembers it.",
    ),
]
AllowRollback = Annotated[
    bool, typer.Option("--allow-rollback", help="--trust: accept a channel that was put back to an older version.")
]
MaxAge = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="--trust: refuse a channel whose newest version is older than this, as 1h."),
]
Sign = Annotated[
    str | None,
    typer.Option("--sign", metavar="FILE", help="Sign with this private key: a file, or env:NAME for a variable."),
]
