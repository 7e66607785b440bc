"""Ed25519: public and private keys, and the bytes that a signature covers (SPEC 15.1).

`cryptography` is imported where a key is used: whoever trusts no key does not need it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weightcast.errors import UsageError

_PUBLIC = re.compile(r"ed25519:([0-9a-f]{64})")
_SIGNATURE = re.compile(r"[0-9A-Za-z_-]{86}", re.ASCII)
_KEY_ID = re.compile(r"[0-9a-f]{16}")

SIGNATURE_BYTES = 64


@dataclass(frozen=True)
class PublicKey:
    """Checks signatures. Its text, `ed25519:` and 64 hexadecimal digits, is what people and files hold."""

    raw: bytes

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """The key with this text; `UsageError` for anything else."""
        found = _PUBLIC.fullmatch(text.strip())
        if found is None:
            hint = "A public key is `ed25519:` and 64 hexadecimal digits; `weightcast key show FILE` prints it."
            raise UsageError("this is not a public key", hint=hint)
        return cls(bytes.fromhex(found[1]))

    @cached_property
    def id(self) -> str:
        """The first 16 hexadecimal digits of the key's SHA-256: what signed records name."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def verifies(self, signature: str, message: bytes) -> bool:
        """Whether ``signature`` is this key's, over these very bytes."""
        from cryptography.exceptions import InvalidSignature

        raw = decode_signature(signature)
        if raw is None:
            return False
        try:
            self._backend.verify(raw, message)
        except InvalidSignature:
            return False
        return True

    @cached_property
    def _backend(self) -> Any:
        return _ed25519().Ed25519PublicKey.from_public_bytes(self.raw)

    def __str__(self) -> str:
        return f"ed25519:{self.raw.hex()}"


class PrivateKey:
    """Signs. Its secret is in no text of it, and it cannot be pickled or copied into a record."""

    __slots__ = ("_backend", "public")

    def __init__(self, seed: bytes):
        """``seed`` are the 32 secret bytes."""
        if len(seed) != 32:
            raise UsageError("a private key has 32 bytes", hint="Make one with `weightcast key new FILE`.")
        module = _ed25519()
        self._backend = module.Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKey(self._backend.public_key().public_bytes_raw())

    @classmethod
    def new(cls) -> PrivateKey:
        """A new key, from the system's randomness."""
        return cls(os.urandom(32))

    def sign(self, message: bytes) -> str:
        return encode_signature(self._backend.sign(message))

    def secret(self) -> bytes:
        """The 32 secret bytes, for the file that keeps them and for nothing else."""
        raw: bytes = self._backend.private_bytes_raw()
        return raw

    def __repr__(self) -> str:
        return f"<private key of {self.public.id}>"

    def __reduce__(self) -> Any:
        raise TypeError("a private key is not pickled")


def message(kind: str, channel: str, record: bytes) -> bytes:
    """The bytes that are signed: a line that no other kind of record and no other channel begins with, the record."""
    return f"weightcast signature 1 {kind} {channel}\n".encode() + record


def encode_signature(raw: bytes) -> str:
    """URL-safe base64 without padding: 86 characters that may also stand in a key of a bucket."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode_signature(text: str) -> bytes | None:
    """The 64 bytes; None for a text that is not exactly what `encode_signature` writes."""
    if not _SIGNATURE.fullmatch(text):
        return None
    raw = base64.urlsafe_b64decode(text + "==")
    return raw if encode_signature(raw) == text else None


def is_signature(text: str) -> bool:
    return decode_signature(text) is not None


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        hint = "Run: pip install 'weightcast[sign]'"
        raise UsageError("this needs the package `cryptography`, which is not installed", hint=hint) from None
    return ed25519
