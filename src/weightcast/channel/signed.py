"""What the signature of each kind of object covers, and signing it (SPEC 15.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from weightcast.channel.keys import Position
from weightcast.channel.records import Anchor, Channel, Heartbeat, Manifest, channel_to_json, dump_record, to_json
from weightcast.channel.signing import PrivateKey, message

S = TypeVar("S", Channel, Manifest, Anchor, Heartbeat)
"""Records that hold their own signature."""


def signed(record: S, channel: str, private: PrivateKey) -> S:
    """The record with a signature over all the rest of it."""
    named = replace(record, signer=private.public.id, signature=None)
    return replace(named, signature=private.sign(signed_bytes(named, channel)))


def signed_bytes(record: Channel | Manifest | Anchor | Heartbeat, channel: str) -> bytes:
    """What the signature of a record covers: its canonical JSON without the signature."""
    bare = replace(record, signature=None)
    data = channel_to_json(bare) if isinstance(bare, Channel) else dump_record(bare)
    return message(type(record).__name__.lower(), channel, data)


def without_signature(data: bytes, signature: str) -> bytes:
    """Canonical JSON of a record without its signature, from that with it, which need not be written again.

    A text of the record cannot hold the field: its quotation marks would be escaped.
    """
    field = f'"signature":"{signature}",'.encode()
    return data.replace(field, b"", 1)


def squash_bytes(channel: str, base: int, result: int, digest: str, nbytes: int, sha256: str, signer: str) -> bytes:
    """What the signature in a squash's name covers. The object's header, which ``sha256`` binds, has both digests."""
    fields = {"base": base, "bytes": nbytes, "digest": digest, "result": result, "sha256": sha256, "signer": signer}
    return message("squash", channel, to_json("squash", fields))


def squash_signature(
    channel: str, base: int, position: Position, nbytes: int, sha256: str, private: PrivateKey
) -> tuple[str, str]:
    """The signer's id and signature, for the name of a squash."""
    signer = private.public.id
    data = squash_bytes(channel, base, position.version, position.digest[:16], nbytes, sha256, signer)
    return signer, private.sign(data)
