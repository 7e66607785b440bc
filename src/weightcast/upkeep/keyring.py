"""Changing a channel's key list: each change is the next entry, signed by the root."""

from __future__ import annotations

from collections.abc import Iterable

from weightcast.channel.chain import Chain
from weightcast.channel.keyring import AllowedKey, Keyring, Role, first_keyring
from weightcast.channel.keys import keyring_key
from weightcast.channel.signing import PrivateKey, PublicKey
from weightcast.errors import ConflictError, UsageError


def allowed_keys(chain: Chain) -> tuple[AllowedKey, ...]:
    """The keys that count now, as the newest entry says; the chain must have a trusted key."""
    assert chain.guard is not None
    ring = chain.guard.seen.keyring
    return ring.keys if ring else ()


def add_key(chain: Chain, public: PublicKey, roles: Iterable[Role], first: int = 0) -> Keyring:
    """Allow a key to sign in these roles for versions from ``first`` on."""
    root = _root_of(chain)
    if public == root.public:
        raise UsageError("the root key may sign all that there is", hint="Add the public key of another.")
    keys = allowed_keys(chain)
    new = [AllowedKey(public, role, first) for role in roles]
    same = {(one.public, one.role) for one in new}
    return _put(chain, [one for one in keys if (one.public, one.role) not in same] + new, root)


def revoke_key(chain: Chain, public_id: str, last: int | None = None) -> Keyring:
    """Take a key's word no more, for versions after ``last``; without it, for none at all."""
    root = _root_of(chain)
    keys = allowed_keys(chain)
    if not any(one.public.id == public_id for one in keys):
        hint = f"`weightcast key show {chain.store.url} --trust KEY` lists them."
        raise UsageError(f"no key of the list is {public_id[:100]}", file=chain.store.url, hint=hint)
    left: list[AllowedKey] = []
    for one in keys:
        if one.public.id != public_id:
            left.append(one)
        elif last is not None and one.first <= last:
            end = last if one.last is None else min(last, one.last)
            left.append(AllowedKey(one.public, one.role, one.first, end))
    return _put(chain, left, root)


def _root_of(chain: Chain) -> PrivateKey:
    signer = chain.signing.signer
    if signer is None or not chain.signing.is_root:
        raise UsageError("only the root key changes the list", file=chain.store.url, hint="Name it with --sign.")
    return signer


def _put(chain: Chain, keys: list[AllowedKey], root: PrivateKey) -> Keyring:
    assert chain.guard is not None
    before = chain.guard.seen.keyring
    keyring = before.followed_by(keys, root) if before else first_keyring(chain.channel.id, keys, root)
    key, data = keyring_key(keyring.number), keyring.to_json()
    if chain.channel.fence == "create":
        if not chain.store.create(key, data) and chain.store.get(key, 0, len(data) + 1) != data:
            raise ConflictError("another key list was written just now", file=chain.store.url, hint="Try again.")
    else:
        chain.store.put(key, data)
    chain.guard.refresh()
    return keyring
