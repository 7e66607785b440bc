"""The log in the bucket: find the head, read versions, list the ways between them, commit (SPEC 11)."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from weightcast.channel.edge import Edge, edge_from_key, edge_of, leads_to_commit
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
    Position,
    anchor_folder,
    check_label,
    check_name,
    check_step,
    delta_key,
    is_plain_file,
    manifest_key,
    read_anchor_key,
    read_manifest_key,
    squash_key,
)
from weightcast.channel.records import (
    MAX_JSON,
    Anchor,
    Channel,
    Manifest,
    ObjectRef,
    Reference,
    anchor_from_json,
    anchor_to_json,
    channel_from_json,
    channel_to_json,
    head_from_json,
    head_to_json,
    manifest_from_json,
    manifest_to_json,
    readable,
)
from weightcast.disk.companions import is_wanted
from weightcast.disk.durable import Report, silent
from weightcast.errors import (
    AccessError,
    ChannelError,
    ConflictError,
    FormatError,
    MissingError,
    StoreError,
    UnsupportedError,
    UsageError,
    about,
)
from weightcast.format.spec import TensorTable
from weightcast.store.base import Data, Store, put_all
from weightcast.store.download import mark_of, summary, summed
from weightcast.store.probe import clock, honours_create
from weightcast.store.threads import begin

_MOST_PROBES = 10_000
"""Versions that are looked for one by one where listings do not show them."""

_RESUMABLE = 6 * 3600.0
"""Seconds by the store's clock: a file that an interrupted upload left is counted on no longer. A collector takes what
is older than its grace period, a day unless told otherwise, for rubbish.
"""

REPAIR = "`weightcast repair URL` restores it from an anchor."


class Chain:
    """A channel in a store. Holds no state but what never changes: any number may be open at once."""

    def __init__(self, store: Store, channel: Channel):
        self.store = store
        self.channel = channel
        self._mark = secrets.token_hex(8)
        """Tells our commits from those of another process that writes under the same name."""

    @classmethod
    def open(cls, store: Store) -> Chain:
        """The channel in ``store``; `ChannelError` where there is none."""
        data = _channel_record(store)
        with about(file=f"{store.url}/{CHANNEL}", hint=REPAIR):
            return cls(store, channel_from_json(data))

    @classmethod
    def create(cls, store: Store, table: TensorTable) -> Chain:
        """Begin a channel, or go on with one that was begun and never got its first version."""
        try:
            begun = cls.open(store)
        except ChannelError:
            begun = None
        if begun is not None:
            if begun.head() is None and begun.channel.table == table:
                return begun
            hint = "Publish to it, name another place, or start over with `weightcast reset URL`."
            raise ConflictError("there is a channel here already", file=store.url, hint=hint)
        fence = "create" if honours_create(store) else "list"
        channel = Channel(uuid.uuid4().hex, table, fence)
        data, lost = channel_to_json(channel), "another writer made a channel here"
        if fence == "create":
            _create(store, CHANNEL, data, lost)
        else:
            store.put(CHANNEL, data)
            if read_record(store, CHANNEL) != data:
                raise _conflict(store, lost)
        return cls(store, channel)

    # -- read --------------------------------------------------------------------------------------------------------

    def manifest(self, version: int) -> Manifest:
        """The commit of a version; `MissingError` if there is none, or none any more."""
        key = manifest_key(version)
        if self.channel.fence == "list":
            listed = self._commits_of(version)
            if not listed:
                raise MissingError(f"there is no version {version}", url=self.store.url, key=key, hint=_LIST_THEM)
            key = listed[0]
        data = read_record(self.store, key)
        with about(file=f"{self.store.url}/{key}", hint=_DAMAGED):
            manifest = manifest_from_json(data)
            if manifest.channel != self.channel.id:
                hint = "Begin again: `weightcast pull` into an empty folder, or open a new Subscriber."
                raise ChannelError("this version belongs to another channel: it was reset", hint=hint)
            if manifest.position.version != version:
                raise FormatError(f"the commit of version {version} says it is {manifest.position.version}")
            return manifest

    def after(self, version: int) -> Manifest | None:
        """The commit of the next version, if there is one: one small request."""
        try:
            return self.manifest(version + 1)
        except MissingError as error:
            if error.key is None:
                raise  # not the version but the bucket
            return None

    def head(self, known: int | None = None) -> Manifest | None:
        """The newest commit; None if there is none yet. ``known`` is a version that the caller has seen.

        Neither the hint nor a listing is trusted to be fresh: what follows them is probed.
        """
        hint = known if known is not None else self._hint()
        newest = self._newest_listed(hint or 0)
        if newest is None and hint:
            newest = self._newest_listed(0)
        found: Manifest | None = None
        for candidate in sorted({version for version in (hint, newest) if version is not None}, reverse=True):
            with suppress(MissingError):
                found = self.manifest(candidate)
                break
        for _ in range(_MOST_PROBES):
            following = self.after(found.position.version) if found else self.after(-1)
            if following is None:
                break
            found = following
        return found

    def versions(self, after: int = -1) -> Iterator[int]:
        """Committed versions behind ``after``, as a listing shows them."""
        last = after
        for version, _ in self._commits(after + 1):
            if version > last:
                last = version
                yield version

    def _commits(self, first: int, prefix: str = MANIFESTS) -> Iterator[tuple[int, str]]:
        """(version, key) from ``first`` on, by a listing; the first key of a version is the one that counts."""
        behind = manifest_key(first - 1, "~") if first > 0 else ""
        for listed in self.store.list(prefix, behind):
            found = read_manifest_key(listed.key)
            if found and self.is_commit(listed.key):
                yield found[0], listed.key

    def is_commit(self, key: str) -> bool:
        """Whether a key is named as this channel's fence names commits; readers ignore the other kind."""
        found = read_manifest_key(key)
        return found is not None and (found[1] is None) == (self.channel.fence == "create")

    def _commits_of(self, version: int) -> list[str]:
        """Keys of one version's commits, the one that counts first: a small listing, however long the chain is."""
        return [key for _, key in self._commits(version, manifest_key(version).removesuffix(".json"))]

    def _newest_listed(self, first: int) -> int | None:
        return max(self.versions(first - 1), default=None)

    def _hint(self) -> int | None:
        try:
            position = readable(read_record(self.store, HEAD), head_from_json)
        except (MissingError, FormatError):
            return None
        return position.version if position else None

    def edges(self, start: int | None, goal: int) -> list[Edge]:
        """Every way that may help from ``start`` (None: from nothing) to ``goal``, with its bytes, by listings."""
        anchors = self.anchor_edges()
        first = start if start is not None else min((edge.result for edge in anchors), default=0)
        committed = set(self.versions(first))
        deltas = [edge for edge in self.delta_edges(first, goal) if edge.result in committed]
        squashes = [edge for edge in self.squash_edges(first) if edge.result <= goal]
        listed = max(committed, default=first)
        if goal - listed <= _MOST_PROBES:
            deltas += self._unlisted(range(listed + 1, goal + 1))
        return self._agreed([edge for edge in anchors if first <= edge.result <= goal] + squashes + deltas)

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
        """Deltas that are committed though a listing did not show them."""
        for version in versions:
            with suppress(MissingError):
                manifest = self.manifest(version)
                if manifest.base is not None:
                    yield edge_of(manifest)

    def anchor_edges(self) -> list[Edge]:
        """Anchors whose record is there and whose files are in the bucket."""
        return self._anchors()[0]

    def references(self) -> list[Anchor]:
        """Anchors that are checkpoints somewhere else."""
        return [self.anchor(edge.record) for edge in self.reference_edges()]

    def reference_edges(self) -> list[Edge]:
        """The same as edges, for readers that can fetch them."""
        return self._anchors()[1]

    def _anchors(self) -> tuple[list[Edge], list[Edge]]:
        """By one listing: anchors with files, and those without."""
        sizes: dict[str, int] = {}
        records: list[AnchorFile] = []
        for listed in self.store.list(ANCHORS):
            place = read_anchor_key(listed.key)
            if place is not None and place.name == RECORD:
                records.append(place)
            elif place is not None and place.name != CHANNEL_COPY:
                sizes[place.folder] = sizes.get(place.folder, 0) + listed.size
        nbytes = self.channel.table.nbytes
        anchors = [
            Edge("anchor", None, at.version, sizes[at.folder], at.folder, at.digest)
            for at in records
            if at.folder in sizes
        ]
        references = [
            Edge("reference", None, at.version, nbytes, at.folder, at.digest)
            for at in records
            if at.folder not in sizes
        ]
        return anchors, references

    def delta_edges(self, first: int, goal: int) -> Iterator[Edge]:
        for listed in self.store.list(DELTAS, f"{DELTAS}{first:012d}~"):
            edge = edge_from_key(listed.key, listed.size)
            if edge and edge.result > goal:
                return
            if edge:
                yield edge

    def squash_edges(self, first: int) -> Iterator[Edge]:
        for listed in self.store.list(SQUASHES, f"{SQUASHES}{first:012d}"):
            edge = edge_from_key(listed.key, listed.size)
            if edge:
                yield edge

    def anchor(self, key: str, manifest: Manifest | None = None) -> Anchor:
        """The record of an anchor, by its key; the very one that ``manifest`` commits, if that is an anchor's."""
        data = read_record(self.store, key)
        with about(file=f"{self.store.url}/{key}"):
            if manifest is not None and manifest.object.key == key and summary(data)[0] != manifest.object.sha256:
                raise FormatError("this is not the record that was committed")
            anchor = anchor_from_json(data)
            if anchor.channel != self.channel.id or not all(ref.key.startswith(_parent(key)) for ref in anchor.files):
                raise FormatError("this anchor belongs to something else")
            return anchor

    def find(self, digest: str, head: Manifest) -> int | None:
        """The newest version whose digest this is, as far as the names of objects show it; None if there is none."""
        if digest == head.position.digest:
            return head.position.version
        anchors, references = self._anchors()
        edges = [*anchors, *references, *self.delta_edges(0, head.position.version), *self.squash_edges(0)]
        for version in sorted({edge.result for edge in edges if edge.digest == digest[:16]}, reverse=True):
            # A writer that was outrun leaves objects behind: only what is committed counts.
            with suppress(MissingError):
                if self.manifest(version).position.digest == digest:
                    return version
        return None

    # -- write -------------------------------------------------------------------------------------------------------

    def put_delta(self, position: Position, data: Data) -> ObjectRef:
        """Upload the patch of a version to be; nobody sees it before the commit."""
        sha256, size = summary(data)
        ref = ObjectRef(delta_key(position, sha256), size, sha256)
        self.store.put(ref.key, data)
        return ref

    def put_squash(self, base: int, position: Position, data: Path) -> Edge:
        """Upload a merged patch: its name says all that its readers must know, so this is its commit too."""
        sha256, size = summary(data)
        key = squash_key(base, position, sha256)
        self.store.put(key, data)
        return Edge("squash", base, position.version, size, key, position.digest[:16])

    def put_anchor(
        self,
        position: Position,
        files: Mapping[str, Path],
        report: Report = silent,
        refuse_changed: Callable[[], None] = lambda: None,
    ) -> ObjectRef:
        """Upload a checkpoint and its record; what a recent, interrupted attempt has brought is not sent again.

        ``refuse_changed`` raises if the files are no longer those that ``position`` was computed from: it is asked
        right before the record makes the anchor one. An anchor that is there with its record is uploaded anew, which
        mends it if it was damaged.
        """
        for name, path in files.items():
            if not is_wanted(name) or not is_plain_file(name) or name in (RECORD, CHANNEL_COPY):
                raise UsageError(f"an anchor cannot hold a file called {name}", file=str(path))
        folder = anchor_folder(position, mark_of(files))
        sums = begin(partial(summed, files))  # beside the upload: only the record needs them
        self._put_files(folder, files, self._resumable(folder), report)
        sums.wait()
        refs = [ObjectRef(folder + name, size, sha256) for name, (sha256, size) in sorted(sums.result().items())]
        refuse_changed()
        anchor = Anchor(self.channel.id, position, tuple(refs))
        record = self._put_record(folder, anchor)
        # Without its record it was an orphan, and may have been collected if that took long; now it is none any more.
        there = self._sizes(folder)
        self._put_files(folder, files, there, silent)
        if not {folder + RECORD, folder + CHANNEL_COPY} <= there.keys():
            self._put_record(folder, anchor)
        return record

    def _resumable(self, folder: str) -> dict[str, int]:
        """Sizes of the files in an anchor's folder that an upload may count on; what is older is sent again."""
        there = list(self.store.list(folder))
        if not there or any(listed.key == folder + RECORD for listed in there):
            return {}
        oldest = clock(self.store) - _RESUMABLE
        return {listed.key: listed.size for listed in there if listed.modified > oldest}

    def _sizes(self, folder: str) -> dict[str, int]:
        return {listed.key: listed.size for listed in self.store.list(folder)}

    def _put_files(self, folder: str, files: Mapping[str, Path], there: Mapping[str, int], report: Report) -> None:
        """Upload the files that are not ``there``."""
        sizes = {folder + name: path.stat().st_size for name, path in sorted(files.items())}
        left, total = {key: size for key, size in sizes.items() if there.get(key) != size}, sum(sizes.values())

        def told(key: str) -> None:
            left.pop(key, None)  # told again, if an attempt had to be made again
            report("upload", total - sum(left.values()), total)

        put_all(self.store, {key: files[key.removeprefix(folder)] for key in left}, told)

    def refer_anchor(self, position: Position, reference: Reference) -> ObjectRef:
        """An anchor that costs no upload: a public checkpoint, by name."""
        content = json.dumps([reference.repository, reference.revision])
        folder = anchor_folder(position, hashlib.sha256(content.encode()).hexdigest())
        return self._put_record(folder, Anchor(self.channel.id, position, (), reference))

    def _put_record(self, folder: str, anchor: Anchor) -> ObjectRef:
        data = anchor_to_json(anchor)
        self.store.put(folder + CHANNEL_COPY, channel_to_json(self.channel))
        self.store.put(folder + RECORD, data)
        sha256, size = summary(data)
        return ObjectRef(folder + RECORD, size, sha256)

    def draft(
        self,
        position: Position,
        base: Position | None,
        ref: ObjectRef,
        codec: str | None,
        changed: int,
        step: int | None,
        writer: str,
        label: str | None = None,
    ) -> Manifest:
        """A commit record as of now, for `commit`; `UsageError` for one that readers would refuse."""
        check_name(writer, "writer")
        step = check_step(step)
        now = round(time.time(), 3)
        return Manifest(self.channel.id, position, base, ref, codec, changed, step, now, writer, check_label(label))

    def commit(self, manifest: Manifest) -> None:
        """Make a version visible to all at once; `ConflictError` if another writer was first.

        A store's answer may be lost on the way, so a commit that is there already counts if it is ours to the byte.
        """
        data = manifest_to_json(manifest)
        version = manifest.position.version
        lost = f"another writer committed version {version} first"
        if self._is_stale(manifest):
            raise _conflict(self.store, lost)
        if self.channel.fence == "create":
            _create(self.store, manifest_key(version), data, lost)
        else:
            self._commit_listed(manifest, data, lost)
        with suppress(StoreError):  # a hint: the version is committed with or without it
            self.store.put(HEAD, head_to_json(manifest.position))

    def _commit_listed(self, manifest: Manifest, data: bytes, lost: str) -> None:
        """Where a store has no create-if-absent: write under our own name, and look who else is there.

        Of two who do that at once at least one sees the other, and withdraws; both may.
        """
        version = manifest.position.version
        own = manifest_key(version, f"{manifest.writer}-{self._mark}")
        for write in (False, True):
            if write:
                self.store.put(own, data)
            listed = self._commits_of(version)
            if any(key != own for key in listed):
                if write or own in listed:  # ours may be there from an attempt that broke off
                    self.store.delete(own)
                raise _conflict(self.store, lost)
        if read_record(self.store, own) != data:
            raise _conflict(self.store, lost)

    def _is_stale(self, manifest: Manifest) -> bool:
        """Whether the channel has gone on, or was started over, without the writer of ``manifest``.

        If it slept for long the manifest that should fence it off may have been collected, so that one alone is no
        proof: there must be none behind it, and the one before it must be its base.
        """
        version = manifest.position.version
        with suppress(MissingError):
            if self.manifest(version) == manifest:
                return False
        if next(self.versions(version), None) is not None:
            return True
        try:
            before = self.manifest(version - 1).position if version else None
        except MissingError as error:
            if error.key is None:
                raise  # not a version but the bucket
            return True
        return manifest.base is not None and before != manifest.base


_DAMAGED = "If it is damaged for good, delete that object: the version before it is the head again."
_LIST_THEM = "`weightcast log URL` lists those there are."


def read_record(store: Store, key: str) -> bytes:
    """A JSON object of a channel, of bounded size."""
    data = store.get(key, 0, MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise FormatError(f"the object is larger than {MAX_JSON:,} bytes", file=f"{store.url}/{key}")
    return data


def _channel_record(store: Store) -> bytes:
    """The bytes of ``channel.json``; `ChannelError` where there is no channel, `FormatError` where only it is lost."""
    try:
        return read_record(store, CHANNEL)
    except MissingError as error:
        missing = error
    if missing.key and _has_versions(store):
        with suppress(MissingError):  # the channel was begun between the two looks
            return read_record(store, CHANNEL)
        raise FormatError("the channel's record is missing", file=f"{store.url}/{CHANNEL}", hint=REPAIR)
    why, first = ("", "Check the address, or") if missing.key else (f": {missing.problem}", f"{missing.hint} Then")
    hint = f"{first} make a channel with `weightcast init URL CHECKPOINT`."
    raise ChannelError(f"there is no channel here{why}", file=store.url, hint=hint)


def _has_versions(store: Store) -> bool:
    """As far as it can be seen: a store over http lists nothing before its first version."""
    with suppress(MissingError, UnsupportedError):
        return any(read_manifest_key(listed.key) for listed in store.list(MANIFESTS))
    return False


def _create(store: Store, key: str, data: bytes, lost: str) -> None:
    if not store.create(key, data) and read_record(store, key) != data:
        raise _conflict(store, lost)


def _conflict(store: Store, lost: str) -> ConflictError:
    hint = "Only one may write. Stop the other, then restart this one: it goes on from the head."
    return ConflictError(lost, file=store.url, hint=hint)


def _parent(key: str) -> str:
    return key[: key.rindex("/") + 1]
