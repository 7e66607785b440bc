"""The key that a mirror trusts, in the mirror: from the first use on nothing else is accepted there (SPEC 15.3).

A mirror's own position counts as seen, too. So while versions come one after the other this file may be a few behind.
"""

from __future__ import annotations

from weightcast.channel.guard import Guard
from weightcast.channel.signing import PublicKey
from weightcast.channel.trust import Seen, Trust, seen_from_json, seen_to_json
from weightcast.disk.durable import replacing
from weightcast.errors import CheckpointError, FormatError, TrustError, UsageError
from weightcast.follow.mirror_folder import MirrorFolder

WRITE_EVERY = 8
"""Versions between two writes while versions come one after the other."""


def read_trust(place: MirrorFolder) -> tuple[PublicKey, Seen] | None:
    """The recorded key and what was seen; None if no key is recorded. A damaged record is an error, never no record."""
    try:
        data = place.trust.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return seen_from_json(data)
    except FormatError as error:
        hint = "Delete the folder and pull again with --trust."
        raise CheckpointError(
            f"{error.problem}: it is not known what to trust", file=str(place.trust), hint=hint
        ) from error


def trust_in(place: MirrorFolder, given: Trust | None) -> tuple[Trust | None, Seen | None]:
    """What to trust for a mirror: what it has recorded, and what is given now, which must not contradict it."""
    recorded = read_trust(place)
    if recorded is None:
        if given is not None and place.has_version:
            problem = "this mirror was filled without a trusted key, so nothing vouches for what it holds"
            hint = "Name an empty folder, or delete this one and pull again."
            raise TrustError(problem, reason="not covered", file=str(place.path), hint=hint)
        return given, None
    root, seen = recorded
    if given is not None and given.root != root:
        hint = f"It trusts {root}. Leave the key out, or name another folder."
        raise UsageError("this mirror trusts another key", file=str(place.path), hint=hint)
    return given or Trust(str(root)), seen


class TrustRecord:
    """Keeps the record of a mirror up to date."""

    def __init__(self, place: MirrorFolder):
        self._place = place
        self._written: Seen | None = None

    def write(self, guard: Guard, every: int = 1) -> None:
        """Write down what was seen, durably, if it is new; versions alone only ``every`` so many."""
        seen, before = guard.seen, self._written
        if seen == before:
            return
        is_same = before is not None and (seen.channel, seen.keyring) == (before.channel, before.keyring)
        if before is not None and is_same and 0 <= seen.version - before.version < every:
            return
        with replacing(self._place.trust) as file:
            file.write(seen_to_json(guard.root, seen))
        self._written = seen
