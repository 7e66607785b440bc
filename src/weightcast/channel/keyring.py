"""The key list of a channel: which keys may sign what, as the root key says it (SPEC 15.2).

Each entry holds all keys that count from then on, and the SHA-256 of the entry before. A reader goes forward from the
newest entry that it knows, and never back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from weightcast.channel.keys import MAX_VERSION, keyring_key
from weightcast.channel.records import from_json, to_json
from weightcast.channel.signing import PrivateKey, PublicKey, is_key_id, is_signature, message
from weightcast.errors import FormatError, MissingError, TrustError, UsageError
from weightcast.store.base import Store

Role = Literal["writer", "cutter", "replica"]
"""A writer signs manifests and anchors, a cutter squashes and anchors, a replica heartbeats."""

ROLES: tuple[Role, ...] = get_args(Role)

MAX_KEYS = 1 << 12
_MAX_BYTES = 1 << 20
"""Of an entry: enough for so many keys."""


@dataclass(frozen=True)
class AllowedKey:
    """A key with one role, for the versions ``first`` to ``last``; without ``last``, for all from ``first`` on."""

    public: PublicKey
    role: Role
    first: int = 0
    last: int | None = None

    def covers(self, version: int) -> bool:
        return self.first <= version and (self.last is None or version <= self.last)


@dataclass(frozen=True)
class Keyring:
    """One entry of the list: all keys that count."""

    channel: str
    number: int
    previous: str | None
    """The SHA-256 of the entry before."""
    keys: tuple[AllowedKey, ...]
    signer: str | None = None
    signature: str | None = None

    def of(self, key_id: str) -> tuple[AllowedKey, ...]:
        """What the key with this id may do; nothing if it is not in the list."""
        return tuple(allowed for allowed in self.keys if allowed.public.id == key_id)

    def to_json(self) -> bytes:
        fields: dict[str, Any] = {
            "channel": self.channel,
            "keys": [[str(one.public), one.role, one.first, one.last] for one in self.keys],
            "number": self.number,
            "previous": self.previous,
        }
        return to_json(
            "keyring", fields | {k: v for k, v in (("signer", self.signer), ("signature", self.signature)) if v}
        )

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json()).hexdigest()

    def signed_bytes(self) -> bytes:
        return message("keyring", self.channel, replace(self, signature=None).to_json())

    def followed_by(self, keys: Iterable[AllowedKey], root: PrivateKey) -> Keyring:
        """The next entry, signed."""
        return _signed(Keyring(self.channel, self.number + 1, self.sha256, tuple(keys)), root)


def first_keyring(channel: str, keys: Iterable[AllowedKey], root: PrivateKey) -> Keyring:
    """The first entry of a channel's list, signed."""
    return _signed(Keyring(channel, 1, None, tuple(keys)), root)


def _signed(keyring: Keyring, root: PrivateKey) -> Keyring:
    _refuse_ambiguous(keyring.keys)
    named = replace(keyring, signer=root.public.id)
    return replace(named, signature=root.sign(named.signed_bytes()))


def _refuse_ambiguous(keys: Iterable[AllowedKey]) -> None:
    by_id: dict[str, PublicKey] = {}
    for one in keys:
        if by_id.setdefault(one.public.id, one.public) != one.public:
            raise UsageError("two keys have the same id", hint="Make another key.")


def load_keyring(data: bytes, root: PublicKey, channel: str) -> Keyring:
    """An entry that ``root`` has signed; `FormatError` or `TrustError` for anything else."""
    keyring = from_json(data, "keyring", {"channel", "keys", "number", "previous", "signer", "signature"}, _keyring)
    if keyring.channel != channel:
        raise TrustError("this key list is of another channel", reason="forged", hint=_LIST_HINT)
    if data != keyring.to_json() or keyring.signer != root.id:
        raise TrustError("this key list is not by the trusted key", reason="unknown key", hint=_LIST_HINT)
    assert keyring.signature is not None
    if not root.verifies(keyring.signature, keyring.signed_bytes()):
        raise TrustError("the signature of this key list is wrong", reason="forged", hint=_LIST_HINT)
    return keyring


_LIST_HINT = "Somebody else may write to this bucket. `weightcast key show URL --trust KEY` lists what it holds."


def read_keyring(store: Store, channel: str, root: PublicKey, known: Keyring | None) -> Keyring | None:
    """The newest entry after the one that is ``known``, each checked; None if there is none at all.

    Entries are found by asking for the next number, so a store that cannot list will do, and one that hides entries
    can only withhold news. `TrustError` for an entry that does not follow the one before.
    """
    while True:
        number = known.number + 1 if known else 1
        key = keyring_key(number)
        try:
            data = store.get(key, 0, _MAX_BYTES + 1)
        except MissingError as error:
            if error.key is None:
                raise
            return known
        file = f"{store.url}/{key}"
        try:
            if len(data) > _MAX_BYTES:
                raise FormatError(f"the key list is larger than {_MAX_BYTES:,} bytes")
            keyring = load_keyring(data, root, channel)
        except (FormatError, TrustError) as error:
            error.file = error.file or file
            raise
        if keyring.number != number or keyring.previous != (known.sha256 if known else None):
            problem = "this key list does not follow the one that was seen before"
            raise TrustError(problem, reason="fork", file=file, hint=_LIST_HINT)
        known = keyring


def _keyring(fields: dict[str, Any]) -> Keyring:
    channel, number, previous = fields["channel"], fields["number"], fields["previous"]
    rows, signer, signature = fields["keys"], fields["signer"], fields["signature"]
    good = isinstance(channel, str) and type(number) is int and 0 < number <= MAX_VERSION
    good = good and (previous is None or isinstance(previous, str)) and isinstance(rows, list) and len(rows) <= MAX_KEYS
    good = (
        good
        and isinstance(signer, str)
        and is_key_id(signer)
        and isinstance(signature, str)
        and is_signature(signature)
    )
    if not good:
        raise FormatError("the key list is impossible")
    return Keyring(channel, number, previous, tuple(map(_allowed, rows)), signer, signature)


def _is_version(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_VERSION


def _allowed(row: Any) -> AllowedKey:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str) or row[1] not in ROLES:
        raise FormatError("a key of the list is impossible")
    text, role, first, last = row
    if not _is_version(first) or not (last is None or _is_version(last)):
        raise FormatError("the versions of a key are impossible")
    try:
        public = PublicKey.parse(text)
    except UsageError:
        raise FormatError("a key of the list is impossible") from None
    if str(public) != text:
        raise FormatError("a key of the list is impossible")
    return AllowedKey(public, role, first, last)
