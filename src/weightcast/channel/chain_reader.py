"""Reading a channel (SPEC 11): find the head, read commits, list the edges between versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Self, TypeVar

from weightcast.channel.edge import Edge, edge_from_key, edge_of, leads_to_commit
from weightcast.channel.guard import Guard
from weightcast.channel.keys import (
    ANCHORS,
    CHANNEL,
    CHANNEL_COPY,
    DELTAS,
    HEAD,
    MANIFESTS,
    RECORD,
    SQUASHES,
    AnchorFile,
    manifest_key,
    parent,
    read_anchor_key,
    read_manifest_key,
)
from weightcast.channel.records import (
    MAX_JSON,
    Anchor,
    Channel,
    Manifest,
    channel_from_json,
    head_from_json,
    load_record,
)
from weightcast.channel.trust import NO_SIGNING, Seen, Signing
from weightcast.errors import (
    AccessError,
    ChannelError,
    FormatError,
    MissingError,
    TrustError,
    UnsupportedError,
    about,
)
from weightcast.store.base import Listed, Store
from weightcast.store.download import summary

T = TypeVar("T")

_MOST_PROBES = 10_000
"""Versions that are probed one by one if listings do not show them."""

REPAIR = "`weightcast repair URL` restores it from an anchor."


_DAMAGED = "If it cannot be restored, delete that object: the version before it is the head again."
_LIST_THEM = "`weightcast log URL` lists the versions."


class ChainReader:
    """A channel in a store, to read. With a trusted key, nothing that it returns lacks a signature of that key's."""

    def __init__(self, store: Store, channel: Channel, signing: Signing = NO_SIGNING, guard: Guard | None = None):
        self.store = store
        self.channel = channel
        self.signing = signing
        """Internal: what is trusted and signed with."""
        self.guard = guard
        """Internal: what checks signatures; None if no key is trusted."""

    @classmethod
    def open(cls, store: Store, signing: Signing = NO_SIGNING, seen: Seen | None = None) -> Self:
        """The channel in ``store``; `ChannelError` if there is none, `TrustError` if it is not of the trusted key.

        ``seen`` is what the reader has seen of it before.
        """
        data = _channel_record(store)
        file = f"{store.url}/{CHANNEL}"
        with about(file=file, hint=REPAIR):
            channel = channel_from_json(data)
        if signing.trust is None:
            return cls(store, channel, signing)
        guard = Guard(store, signing.trust, seen)
        guard.enter(channel, file)
        return cls(store, channel, signing, guard)

    def opened_again(self) -> Self:
        """The channel that is in the store now, for a reader that has seen this one."""
        return type(self).open(self.store, self.signing, self.guard.seen if self.guard else None)

    def manifest(self, version: int) -> Manifest:
        """The commit of a version; `MissingError` if there is none, or it was collected."""
        key, data = self.read_manifest(version)
        try:
            return self.parse_manifest(version, key, data)
        except (TrustError, FormatError):
            at_home = _at_home(self.store, key)
            if at_home is None or at_home == data:
                raise
            return self.parse_manifest(version, key, at_home)

    def read_manifest(self, version: int) -> tuple[str, bytes]:
        """The key and the bytes of a version's commit; `MissingError` as for `manifest`."""
        key = manifest_key(version)
        if self.channel.fence == "list":
            listed = self._commits_of(version)
            if not listed:
                raise MissingError(f"there is no version {version}", url=self.store.url, key=key, hint=_LIST_THEM)
            key = listed[0]
        return key, read_record(self.store, key)

    def parse_manifest(self, version: int, key: str, data: bytes) -> Manifest:
        """The commit that these bytes are; `FormatError` or `ChannelError` if they are not one of that version."""
        with about(file=f"{self.store.url}/{key}", hint=_DAMAGED):
            manifest = load_record(Manifest, data)
            if manifest.channel != self.channel.id:
                hint = "Start over: `weightcast pull` into an empty folder, or open a new Subscriber."
                raise ChannelError("this version belongs to another channel: it was reset", hint=hint)
            if manifest.position.version != version:
                raise FormatError(f"the commit of version {version} says it is {manifest.position.version}")
        if self.guard is not None:
            self.guard.check_manifest(manifest, data)
        return manifest

    def after(self, version: int) -> Manifest | None:
        """The commit of the next version, or None: one small request."""
        try:
            return self.manifest(version + 1)
        except MissingError as error:
            if error.key is None:
                raise  # the bucket is missing, not the version
            return None

    def head(self, known: int | None = None) -> Manifest | None:
        """The newest commit; None if there is none yet. ``known`` is a version that the caller has seen.

        The hint and the listing may both be old, so later versions are probed.
        """
        hint = known if known is not None else self._hint()
        newest = max(self.versions((hint or 0) - 1), default=None)
        if newest is None and hint:
            newest = max(self.versions(), default=None)
        seen = self.guard.seen.version if self.guard is not None else -1  # a listing may be older than what was seen
        found: Manifest | None = None
        candidates = {version for version in (hint, newest, seen) if version is not None and version >= 0}
        for candidate in sorted(candidates, reverse=True):
            with suppress(MissingError):
                found = self.manifest(candidate)
                break
        for _ in range(_MOST_PROBES):
            following = self.after(found.position.version) if found else self.after(-1)
            if following is None:
                break
            found = following
        if self.guard is not None:
            self.guard.check_head(found, seen)
        return found

    def versions(self, after: int = -1) -> Iterator[int]:
        """Committed versions later than ``after``, by a listing."""
        start_after = manifest_key(after, "~") if after >= 0 else ""
        last = after
        for listed in self.store.list(MANIFESTS, start_after):
            version = self.version_of(listed.key)
            if version is not None and version > last:
                last = version
                yield version

    def version_of(self, key: str) -> int | None:
        """The version that a key commits under this channel's fence; None for other keys, which readers ignore."""
        version, writer = read_manifest_key(key) or (None, None)
        return version if (writer is None) == (self.channel.fence == "create") else None

    def _commits_of(self, version: int) -> list[str]:
        """Keys of one version's commits; the first counts. The listing is small, however long the chain is."""
        listing = self.store.list(manifest_key(version).removesuffix(".json"))
        return [listed.key for listed in listing if self.version_of(listed.key) is not None]

    def _hint(self) -> int | None:
        position = read_hint(self.store, HEAD, head_from_json)
        return position.version if position else None

    def edges(self, start: int | None, goal: int) -> list[Edge]:
        """Every edge that a route from ``start`` (None: from nothing) to ``goal`` may use, by listings."""
        if self.guard is not None:
            self.guard.refresh()
        anchors = self.anchor_edges()
        first = start if start is not None else min((edge.result for edge in anchors), default=0)
        committed = set(self.versions(first))
        deltas = [edge for edge in self.delta_edges(first, goal) if edge.result in committed]
        squashes = [edge for edge in self.squash_edges(first) if edge.result <= goal and self.accepts(edge)]
        listed = max(committed, default=first)
        if goal - listed <= _MOST_PROBES:
            deltas += self._unlisted(range(listed + 1, goal + 1))
        return self._agreed([edge for edge in anchors if first <= edge.result <= goal] + squashes + deltas)

    def accepts(self, edge: Edge) -> bool:
        """Whether a route may be planned with this edge, as far as the trusted key is concerned."""
        return self.guard is None or self.guard.accepts(edge)

    def _agreed(self, edges: list[Edge]) -> list[Edge]:
        """The edges that lead to what was committed. A manifest is read only where the keys of a version disagree."""
        digests: dict[int, set[str]] = {}
        for edge in edges:
            digests.setdefault(edge.result, set()).add(edge.digest)
        manifests: dict[int, Manifest] = {}
        for version in (version for version, found in digests.items() if len(found) > 1):
            with suppress(MissingError, FormatError, AccessError):
                manifests[version] = self.manifest(version)
        return [edge for edge in edges if edge.result not in manifests or leads_to_commit(edge, manifests[edge.result])]

    def _unlisted(self, versions: range) -> Iterator[Edge]:
        """Committed deltas that the listing did not show."""
        for version in versions:
            with suppress(MissingError):
                manifest = self.manifest(version)
                if manifest.base is not None:
                    yield edge_of(manifest)

    def anchor_edges(self) -> list[Edge]:
        """Anchors with a record whose files are in the bucket."""
        return [edge for edge in self._finished_anchors() if edge.kind == "anchor"]

    def reference_edges(self) -> list[Edge]:
        """Anchors with a record whose files are outside the bucket; not every reader can fetch them."""
        return [edge for edge in self._finished_anchors() if edge.kind == "reference"]

    def references(self) -> list[Anchor]:
        """The records of `reference_edges`, without those that the trusted key does not vouch for."""
        found = []
        for edge in self.reference_edges():
            with suppress(TrustError):
                found.append(self.anchor(edge.record))
        return found

    def _finished_anchors(self) -> list[Edge]:
        return [edge for edge, files in self.anchor_folders() if any(listed.key == edge.record for listed in files)]

    def anchor_folders(self) -> Iterator[tuple[Edge, list[Listed]]]:
        """Every anchor and reference with its objects, by one listing; unfinished ones have no record among them."""
        folders: dict[str, tuple[AnchorFile, list[Listed]]] = {}
        for listed in self.store.list(ANCHORS):
            place = read_anchor_key(listed.key)
            if place is not None:
                folders.setdefault(place.folder, (place, []))[1].append(listed)
        for folder, (at, files) in folders.items():
            sizes = [listed.size for listed in files if listed.key not in (folder + RECORD, folder + CHANNEL_COPY)]
            if sizes:
                yield Edge("anchor", None, at.version, sum(sizes), folder, at.digest), files
            else:
                yield Edge("reference", None, at.version, self.channel.table.nbytes, folder, at.digest), files

    def delta_edges(self, first: int, goal: int) -> Iterator[Edge]:
        for edge, _ in self.deltas(f"{DELTAS}{first:012d}~"):
            if edge.result > goal:
                return
            yield edge

    def deltas(self, start_after: str = "") -> Iterator[tuple[Edge, list[Listed]]]:
        """Every delta with its objects, by one listing, in which those of one delta stand together."""

        known = ((edge_from_key(one.key, one.size), one) for one in self.store.list(DELTAS, start_after))
        placed = ((edge, listed) for edge, listed in known if edge is not None)
        for _, together in groupby(placed, lambda one: one[0].key):
            edges, objects = zip(*together, strict=True)
            yield replace(edges[0], nbytes=sum(edge.nbytes for edge in edges)), list(objects)

    def squash_edges(self, first: int) -> Iterator[Edge]:
        for listed in self.store.list(SQUASHES, f"{SQUASHES}{first:012d}"):
            edge = edge_from_key(listed.key, listed.size)
            if edge:
                yield edge

    def anchor(self, key: str, manifest: Manifest | None = None) -> Anchor:
        """The record of an anchor, by its key; `FormatError` if ``manifest`` commits the key with other bytes.

        With a trusted key, one that ``manifest`` does not commit must be signed itself.
        """
        return self.parse_anchor(key, read_record(self.store, key), manifest)

    def parse_anchor(self, key: str, data: bytes, manifest: Manifest | None = None) -> Anchor:
        """The record that these bytes are, as for `anchor`."""
        with about(file=f"{self.store.url}/{key}"):
            if manifest is not None and manifest.key == key and summary(data)[0] != manifest.objects[0].sha256:
                raise FormatError("this is not the record that was committed")
            anchor = load_record(Anchor, data)
            if anchor.channel != self.channel.id or not all(ref.key.startswith(parent(key)) for ref in anchor.files):
                raise FormatError("this anchor belongs to another channel or folder")
        if self.guard is not None and not _is_at(read_anchor_key(key), anchor):
            raise FormatError("this anchor belongs to another folder", file=f"{self.store.url}/{key}")
        if self.guard is not None and (manifest is None or manifest.key != key):
            self.guard.check_anchor(anchor, f"{self.store.url}/{key}")
        return anchor

    def find(self, digest: str, head: Manifest) -> int | None:
        """The newest version with this digest, as far as keys show it; None if there is none."""
        if digest == head.position.digest:
            return head.position.version
        edges = [*self._finished_anchors(), *self.delta_edges(0, head.position.version), *self.squash_edges(0)]
        for version in sorted({edge.result for edge in edges if edge.digest == digest[:16]}, reverse=True):
            # Writers that lost a race leave objects: only committed ones count.
            with suppress(MissingError):
                if self.manifest(version).position.digest == digest:
                    return version
        return None


def _is_at(place: AnchorFile | None, anchor: Anchor) -> bool:
    at = anchor.position
    return place is not None and (place.version, place.digest) == (at.version, at.digest[:16])


def read_record(store: Store, key: str, most: int = MAX_JSON) -> bytes:
    """The bytes of a record; `FormatError` if it has more than ``most``."""
    data = store.get(key, 0, most + 1)
    if len(data) > most:
        raise FormatError(f"the object is larger than {most:,} bytes", file=f"{store.url}/{key}")
    return data


def _at_home(store: Store, key: str) -> bytes | None:
    """A record that is not right, as the home has it; None if it came from there, or the home does not say."""
    from weightcast.channel.nearest import Nearest  # which reads hints as this module does

    return store.at_home(key) if isinstance(store, Nearest) else None


def read_hint(store: Store, key: str, parse: Callable[[bytes], T]) -> T | None:
    """A hint, parsed; None if it is missing or invalid, since hints are never needed."""
    try:
        return parse(read_record(store, key))
    except (MissingError, FormatError):
        return None


def _channel_record(store: Store) -> bytes:
    """The bytes of ``channel.json``; `ChannelError` if there is no channel, `FormatError` if only this is lost."""
    try:
        return read_record(store, CHANNEL)
    except MissingError as error:
        missing = error
    if missing.key and _has_versions(store):
        with suppress(MissingError):  # the channel was created between the two requests
            return read_record(store, CHANNEL)
        raise FormatError("the channel's record is missing", file=f"{store.url}/{CHANNEL}", hint=REPAIR)
    why, first = ("", "Check the address, or") if missing.key else (f": {missing.problem}", f"{missing.hint} Then")
    hint = f"{first} create a channel with `weightcast init URL CHECKPOINT`."
    raise ChannelError(f"there is no channel here{why}", file=store.url, hint=hint)


def _has_versions(store: Store) -> bool:
    """Whether a manifest can be listed; a store over http lists nothing before its first version."""
    with suppress(MissingError, UnsupportedError):
        return any(read_manifest_key(listed.key) for listed in store.list(MANIFESTS))
    return False
