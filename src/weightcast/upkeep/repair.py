"""Restoring a channel's own record, without which nothing can be read, from the copy that each anchor has."""

from __future__ import annotations

from contextlib import suppress

from weightcast.channel.chain_reader import read_record
from weightcast.channel.keys import ANCHORS, CHANNEL, CHANNEL_COPY, MANIFESTS, read_anchor_key, read_manifest_key
from weightcast.channel.records import Manifest, channel_from_json, load_record
from weightcast.errors import ChannelError, FormatError, MissingError
from weightcast.store.base import Store


def repair(store: Store) -> str | None:
    """Restore a damaged or missing ``channel.json``; returns the key of the copy that was used, None if it is intact.

    The id in manifests is a digest of the right record: a copy is used only if a manifest has its id.
    """
    wanted = _ids_of_manifests(store)
    if _id_of(store, CHANNEL) in wanted:
        return None
    for listed in store.list(ANCHORS):
        place = read_anchor_key(listed.key)
        if place is not None and place.name == CHANNEL_COPY and _id_of(store, listed.key) in wanted:
            store.put(CHANNEL, read_record(store, listed.key))
            return listed.key
    hint = "Start over with `weightcast reset URL --yes`, then `weightcast init URL CHECKPOINT`."
    raise ChannelError("no anchor holds an intact copy of the channel's record", file=store.url, hint=hint)


def _ids_of_manifests(store: Store) -> set[str]:
    """The ids in all readable manifests: one, unless a stray object is among them."""
    found = set()
    for key in [listed.key for listed in store.list(MANIFESTS) if read_manifest_key(listed.key)]:
        with suppress(MissingError, FormatError):
            found.add(load_record(Manifest, read_record(store, key)).channel)
    if found:
        return found
    hint = "Check the address, or create a channel with `weightcast init URL CHECKPOINT`."
    raise ChannelError("there is no channel to repair: no manifest can be read", file=store.url, hint=hint)


def _id_of(store: Store, key: str) -> str | None:
    """The id of a channel's record; None if it is missing or damaged."""
    with suppress(MissingError, FormatError):
        return channel_from_json(read_record(store, key)).id
    return None
