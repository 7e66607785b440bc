"""What a store guarantees, found by trying it."""

from __future__ import annotations

import secrets
from contextlib import suppress

from weightcast.errors import StoreError, UnreachableError
from weightcast.store.base import Store

PROBES = "probe/"


def honours_create(store: Store) -> bool:
    """Whether a second `create` of a key fails and leaves the first one's bytes, as fencing writers requires.

    Some servers ignore the condition and overwrite. The calls are made one after the other.
    """
    key = PROBES + secrets.token_hex(16)
    try:
        store.create(key, b"first")  # False where a retry met its own first attempt
        return not store.create(key, b"second") and store.get(key) == b"first"
    finally:
        _forget(store, key)


def _forget(store: Store, key: str) -> None:
    """Delete a probe. Not every writer may delete, and a failure must not hide another: collectors remove the rest."""
    with suppress(StoreError):
        store.delete(key)


def clock(store: Store) -> float:
    """The time by the clock that sets ``modified`` of the store's objects, in seconds since 1970."""
    key = PROBES + secrets.token_hex(16)
    store.put(key, b"clock")
    try:
        for listed in store.list(key):
            return listed.modified
    finally:
        _forget(store, key)
    hint = "Try again; a store whose listings lag after writes is not supported."
    raise UnreachableError("an object just written is not listed", url=store.url, key=key, hint=hint)
