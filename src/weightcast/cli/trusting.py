"""What a verb trusts and signs with, by its options and by what the mirror has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.nearest import Nearest
from weightcast.channel.trust import Signing, Trust, signing_of
from weightcast.cli.channels import open_near
from weightcast.cli.wording import seconds
from weightcast.disk.durable import Report, silent
from weightcast.errors import UsageError
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_trust import read_trust, trust_in


def trust_of(
    key: str | None, mirror: Path | None = None, *, allow_rollback: bool = False, max_age: str | None = None
) -> Trust | None:
    """The key that is named, or else the one that the mirror has recorded; None for neither."""
    if key is None and mirror is not None:
        recorded = read_trust(MirrorFolder(mirror))
        key = str(recorded[0]) if recorded else None
    if key is not None:
        return Trust(key, allow_rollback, seconds(max_age) if max_age is not None else None)
    if allow_rollback or max_age is not None:
        hint = "Name the root's public key with --trust."
        raise UsageError("--allow-rollback and --max-age are for a channel that is signed", hint=hint)
    return None


def open_trusted(
    url: str,
    trust: Trust | None,
    mirror: Path | None = None,
    report: Report = silent,
    *,
    sign: str | None = None,
    begins: bool = False,
    near: Sequence[str] = (),
) -> Chain:
    """The channel at an address, for a reader that trusts this key, and has seen what its mirror says.

    ``report`` is for uploads, ``near`` are copies to read from.
    """
    seen = None
    if mirror is not None:
        trust, seen = trust_in(MirrorFolder(mirror), trust)
    signing = Signing(trust) if sign is None else signing_of(trust, sign, begins=begins)
    store = open_near(url, report, near)
    chain = Chain.open(store, signing, seen)
    if isinstance(store, Nearest) and chain.guard is not None:
        store.expect(chain.guard.seen.version)
    return chain


def refuse_default_mirror(trust: Trust | None, mirror: Path | None) -> None:
    """`UsageError` for a trusted key without a named mirror: the bucket's id names the default one."""
    if trust is not None and mirror is None:
        hint = "Name a folder with --mirror: it remembers the key, wherever the bucket leads."
        raise UsageError("a trusted key needs a mirror that you name", hint=hint)
