"""Restore a channel's own record, which nothing can be read without, from the copy that each anchor has."""

from __future__ import annotations

from contextlib import suppress

from weightcast.chain import read_record
from weightcast.errors import ChannelError, FormatError, MissingError
from weightcast.keys import ANCHORS, CHANNEL, CHANNEL_COPY, MANIFESTS, read_anchor_key, read_manifest_key
from weightcast.manifest import channel_from_json, manifest_from_json
from weightcast.store.base import Store


def repair(store: Store) -> str | None:
    """Put a damaged or missing ``channel.json`` right; returns the key it was restored from, None if it is whole.

    The id that the manifests carry is a digest of the right record: a copy is taken only if it is that one.
    """
    wanted = _id_of_manifests(store)
    if _id_of(store, CHANNEL) == wanted:
        return None
    for listed in store.list(ANCHORS):
        place = read_anchor_key(listed.key)
        if place is not None and place.name == CHANNEL_COPY and _id_of(store, listed.key) == wanted:
            store.put(CHANNEL, read_record(store, listed.key))
            return listed.key
    hint = "Start over with `weightcast reset URL --yes`, then `weightcast init URL CHECKPOINT`."
    raise ChannelError("no anchor holds a whole copy of the channel's record", file=store.url, hint=hint)


def _id_of_manifests(store: Store) -> str:
    """The channel that the newest readable manifest belongs to."""
    keys = [listed.key for listed in store.list(MANIFESTS) if read_manifest_key(listed.key)]
    for key in reversed(keys):
        with suppress(MissingError, FormatError):
            return manifest_from_json(read_record(store, key)).channel
    hint = "Check the address, or make a channel with `weightcast init URL CHECKPOINT`."
    raise ChannelError("there is no version here to repair a channel for", file=store.url, hint=hint)


def _id_of(store: Store, key: str) -> str | None:
    """The id of a channel's record; None where it is missing or damaged."""
    with suppress(MissingError, FormatError):
        return channel_from_json(read_record(store, key)).id
    return None
