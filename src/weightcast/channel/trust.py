"""What a reader trusts, and what it has seen: trust is local, and the bucket never decides it (SPEC 15.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weightcast.channel.key_file import read_private, read_public
from weightcast.channel.keyring import Keyring, load_keyring
from weightcast.channel.records import from_json, to_json
from weightcast.channel.signing import PrivateKey, PublicKey
from weightcast.errors import FormatError, TrustError, UsageError


@dataclass(frozen=True)
class Trust:
    """The key whose word counts, and how far back or behind a reader may be led.

    >>> trust = wc.Trust("ed25519:" + "0" * 64, max_age=3600)
    >>> trust.allow_rollback
    False
    """

    key: str
    """The root's public key, `ed25519:` and 64 hexadecimal digits, or the path of a file that holds it."""
    allow_rollback: bool = False
    """Accept a channel whose newest version is older than one that was seen, or another channel of the same key."""
    max_age: float | None = None
    """Seconds since the newest version was committed, by the writer's clock, after which a follower stops."""

    def __post_init__(self) -> None:
        _ = self.root
        if self.max_age is not None and not self.max_age > 0:
            raise UsageError("max_age is a positive number of seconds", hint="Leave it out to accept any age.")

    @cached_property
    def root(self) -> PublicKey:
        """Internal: the key itself, read once."""
        return read_public(self.key)


@dataclass(frozen=True)
class Signing:
    """What a process trusts, and the key it signs with; neither by default."""

    trust: Trust | None = None
    signer: PrivateKey | None = None

    @property
    def is_root(self) -> bool:
        """Whether the signer is the trusted root itself."""
        return self.trust is not None and self.signer is not None and self.signer.public == self.trust.root


NO_SIGNING = Signing()


def as_trust(trust: Trust | PublicKey | str | None) -> Trust | None:
    """Trust in a key, however it is given."""
    return trust if trust is None or isinstance(trust, Trust) else Trust(str(trust))


def signing_of(trust: Trust | str | None, sign: str | Path | PrivateKey | None, *, begins: bool = False) -> Signing:
    """What is trusted and signed with. `UsageError` for a signer that checks nothing: it would vouch for anything.

    Whoever ``begins`` a channel does so with the root key, which is then the one that is trusted.
    """
    signer = sign if sign is None or isinstance(sign, PrivateKey) else read_private(sign)
    trusted = as_trust(trust)
    if signer is not None and trusted is None:
        if not begins:
            hint = "Name the root's public key with trust=… (--trust)."
            raise UsageError("who signs versions must check those that they follow", hint=hint)
        trusted = Trust(str(signer.public))
    return Signing(trusted, signer)


@dataclass(frozen=True)
class Seen:
    """What a reader has seen of a channel, and does not go behind."""

    channel: str | None = None
    keyring: Keyring | None = None
    version: int = -1
    """The newest version whose manifest was checked; -1 for none."""
    manifest: str | None = None
    """The SHA-256 of that manifest, if it was read."""
    time: float | None = None
    """When it was committed, by the writer's clock."""


def seen_to_json(root: PublicKey, seen: Seen) -> bytes:
    fields = {
        "channel": seen.channel,
        "keyring": seen.keyring.to_json().decode() if seen.keyring else None,
        "manifest": seen.manifest,
        "root": str(root),
        "time": seen.time,
        "version": seen.version,
    }
    return to_json("trust", fields)


def seen_from_json(data: bytes) -> tuple[PublicKey, Seen]:
    """The root key and what was seen; `FormatError` for a record that is damaged."""
    return from_json(data, "trust", {"channel", "keyring", "manifest", "root", "time", "version"}, _seen)


def _seen(fields: dict[str, Any]) -> tuple[PublicKey, Seen]:
    channel, ring, manifest, time, version = (
        fields[name] for name in ("channel", "keyring", "manifest", "time", "version")
    )
    good = all(value is None or isinstance(value, str) for value in (channel, ring, manifest))
    good = good and (time is None or type(time) in (int, float)) and type(version) is int and version >= -1
    if not good or not isinstance(fields["root"], str) or (ring is not None and channel is None):
        raise FormatError("what was seen of the channel is damaged")
    try:
        root = PublicKey.parse(fields["root"])
        keyring = load_keyring(ring.encode(), root, channel) if ring is not None else None
    except (UsageError, TrustError):
        raise FormatError("what was seen of the channel is damaged") from None
    return root, Seen(channel, keyring, version, manifest, time)
