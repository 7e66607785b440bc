"""`weightcast digest PATH`"""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import computing, facts, report, say
from weightcast.cli.options import Threads
from weightcast.cli.wording import natural
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.staged import fingerprint_of
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_reader import mirror_status
from weightcast.format.digest import Fingerprint


def digest(
    path: Annotated[Path, typer.Argument(help="A safetensors file or a Hugging Face checkpoint folder.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Also print the digest of every tensor.")] = False,
    threads: Threads = None,
) -> None:
    """Print the digest of weights: equal digests mean equal bits, unless an attacker chose the bits.

    For a mirror, this reads the files that any tool would load, and names the version that its log leads to.
    """
    mirror = MirrorFolder(path)
    # Nothing is folded into the files of a mirror while they are read.
    at_rest = mirror.shared() if mirror.inner.is_dir() else nullcontext()
    with computing(threads) as (workers, progress), at_rest, Checkpoint(path) as weights:
        fingerprint = fingerprint_of(weights, workers, progress)
        mirrored = _mirrored(path, fingerprint)
    table = fingerprint.table
    values = {"digest": fingerprint.digest, "tensors": len(table), "elements": table.elements, "bytes": table.nbytes}
    each = {spec.name: f"{value:016x}" for spec, value in zip(table, fingerprint.digests, strict=True)}
    report(values | mirrored, **({"digests": each} if tensors else {}))
    if tensors and each:
        say("")
        facts({name: each[name] for name in sorted(each, key=natural)})


def _mirrored(path: Path, fingerprint: Fingerprint) -> dict[str, int | None]:
    """For a mirror: the version that these files are, None if they were edited; the newer one that its log leads to."""
    mirror = mirror_status(path)
    if mirror is None:
        return {}
    version = mirror.files_at.version if mirror.files_at.digest == fingerprint.digest else None
    return {"version": version, "log_leads_to": mirror.log_at}
