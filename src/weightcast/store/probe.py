"""What a store guarantees, found out by trying it."""

from __future__ import annotations

import secrets
from contextlib import suppress

from weightcast.errors import StoreError, UnreachableError
from weightcast.store.base import Store

PROBES = "probe/"


def honours_create(store: Store) -> bool:
    """Whether a second `create` of a name fails and leaves the first one's bytes, as it must to fence writers off.

    Some servers ignore the condition and overwrite. The calls are made one after the other.
    """
    key = PROBES + secrets.token_hex(16)
    try:
        store.create(key, b"first")  # False where a retry met its own first attempt
        return not store.create(key, b"second") and store.get(key) == b"first"
    finally:
        _forget(store, key)


def _forget(store: Store, key: str) -> None:
    """Not every writer may delete, and no failure to do so may hide another: collectors remove what is left."""
    with suppress(StoreError):
        store.delete(key)


def clock(store: Store) -> float:
    """The store's own time, in seconds since 1970: what the ``modified`` of its objects is measured by."""
    key = PROBES + secrets.token_hex(16)
    store.put(key, b"clock")
    try:
        for listed in store.list(key):
            return listed.modified
    finally:
        _forget(store, key)
    hint = "Try again; a store whose listings lag after writes is not supported."
    raise UnreachableError("an object just written is not listed", url=store.url, key=key, hint=hint)
