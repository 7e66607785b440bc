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
    return signed_with_bytes(record, channel, private)[0]


def signed_with_bytes(record: S, channel: str, private: PrivateKey) -> tuple[S, bytes]:
    """The same, and its canonical JSON, made from the bytes that were signed: a large record is written once."""
    named = replace(record, signer=private.public.id, signature=None)
    bare = _canonical(named)
    signature = private.sign(_covered(named, channel, bare))
    made = replace(named, signature=signature)
    return made, _with_signature(bare, made)


def signed_bytes(record: Channel | Manifest | Anchor | Heartbeat, channel: str) -> bytes:
    """What the signature of a record covers: its canonical JSON without the signature."""
    return _covered(record, channel, _canonical(replace(record, signature=None)))


def _canonical(record: Channel | Manifest | Anchor | Heartbeat) -> bytes:
    return channel_to_json(record) if isinstance(record, Channel) else dump_record(record)


def _covered(record: Channel | Manifest | Anchor | Heartbeat, channel: str, bare: bytes) -> bytes:
    return message(type(record).__name__.lower(), channel, bare)


def without_signature(data: bytes, record: Manifest) -> bytes | None:
    """The bytes of a manifest without its signature; None if that is not where a writer puts it.

    So a signature over what is returned is one over ``data``, whose JSON need not be written again to be compared. A
    text of the record cannot hold the field: its quotation marks would be escaped.
    """
    field, signer = _signature_field(record), _signer_field(record)
    at = data.rfind(field + signer)
    return data[:at] + data[at + len(field) :] if at >= 0 else None


def _with_signature(bare: bytes, record: Channel | Manifest | Anchor | Heartbeat) -> bytes:
    """Canonical JSON of a record from that without its signature, which sorts right before the signer."""
    at = bare.rindex(_signer_field(record))
    return bare[:at] + _signature_field(record) + bare[at:]


def _signature_field(record: Channel | Manifest | Anchor | Heartbeat) -> bytes:
    return f'"signature":"{record.signature}",'.encode()


def _signer_field(record: Channel | Manifest | Anchor | Heartbeat) -> bytes:
    return f'"signer":"{record.signer}"'.encode()


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
