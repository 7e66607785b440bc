"""`weightcast digest PATH`"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import AsJson, Threads, facts, say, tell, working
from weightcast.cli.words import natural
from weightcast.cli.words import report as print_report
from weightcast.disk.checkpoint import MIRROR, Checkpoint
from weightcast.disk.durable import locked
from weightcast.disk.staged import fingerprint_of
from weightcast.follow.mirror_reader import mirror_status
from weightcast.format.digest import Fingerprint


def digest(
    path: Annotated[Path, typer.Argument(help="A safetensors file or a Hugging Face checkpoint folder.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Print every tensor's digest, too.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Print the digest of weights: equal digests mean equal bits, unless an attacker chose the bits.

    For a mirror, this reads the files that any tool would load, and names the version that its log leads to.
    """
    with working(threads, as_json) as (workers, report):
        with _at_rest(path), Checkpoint(path) as weights:
            fingerprint = fingerprint_of(weights, workers, report)
            mirrored = _mirrored(path, fingerprint)
        table = fingerprint.table
        values = {
            "digest": fingerprint.digest,
            "tensors": len(table),
            "elements": table.elements,
            "bytes": table.nbytes,
        } | mirrored
        each = {spec.name: f"{value:016x}" for spec, value in zip(table, fingerprint.digests, strict=True)}
        if as_json:
            tell(values | {"digests": each} if tensors else values)
            return
        print_report(values, as_json=False)
        if tensors and each:
            say("")
            facts({name: each[name] for name in sorted(each, key=natural)}, as_json=False)


def _at_rest(path: Path) -> AbstractContextManager[None]:
    """Nothing is folded into the files of a mirror while they are read."""
    lock = path / MIRROR / "lock"
    return locked(lock, shared=True) if lock.exists() else nullcontext()


def _mirrored(path: Path, fingerprint: Fingerprint) -> dict[str, int | None]:
    """For a mirror: the version that these files are, None if they were edited; the newer one that its log leads to."""
    mirror = mirror_status(path)
    if mirror is None:
        return {}
    version = mirror.files_at.version if mirror.files_at.digest == fingerprint.digest else None
    return {"version": version, "log_leads_to": mirror.log_at}
