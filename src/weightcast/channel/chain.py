"""Writing to a channel (SPEC 11): create it, upload patches and anchors, commit."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from weightcast.channel.chain_reader import ChainReader, read_record
from weightcast.channel.edge import Edge
from weightcast.channel.guard import Guard
from weightcast.channel.keys import (
    CHANNEL,
    CHANNEL_COPY,
    HEAD,
    MANIFESTS,
    RECORD,
    Position,
    anchor_folder,
    check_label,
    check_name,
    check_step,
    delta_key,
    is_plain_file,
    manifest_key,
    read_keyring_key,
    squash_key,
)
from weightcast.channel.records import (
    Anchor,
    Channel,
    Manifest,
    ObjectRef,
    Reference,
    channel_to_json,
    dump_record,
    head_to_json,
)
from weightcast.channel.signed import signed, signed_with_bytes, squash_signature
from weightcast.channel.trust import NO_SIGNING, Signing
from weightcast.disk.companions import wanted
from weightcast.disk.durable import Report, silent
from weightcast.errors import (
    ChannelError,
    ConflictError,
    MissingError,
    StoreError,
    UsageError,
)
from weightcast.format.spec import TensorTable
from weightcast.store.base import Data, Store, put_all
from weightcast.store.download import mark_of, summary, summed
from weightcast.store.probe import clock, honours_create
from weightcast.store.threads import begin

_RESUMABLE = 6 * 3600.0
"""Seconds by the store's clock: files that an interrupted upload left are sent again after this time. `gc` deletes
them after its grace period, which is a day by default.
"""


class Chain(ChainReader):
    """A channel in a store, to read and to write. It is stateless: any number may be open at once."""

    def __init__(self, store: Store, channel: Channel, signing: Signing = NO_SIGNING, guard: Guard | None = None):
        super().__init__(store, channel, signing, guard)
        self._mark = secrets.token_hex(8)
        """Distinguishes our commits from those of another process that writes under the same name."""

    @classmethod
    def create(cls, store: Store, table: TensorTable, signing: Signing = NO_SIGNING) -> Self:
        """Create a channel, or continue one that never got its first version; a signed one needs the root key."""
        try:
            begun = cls.open(store, signing)
        except ChannelError:
            begun = None
        if begun is not None:
            if begun.head() is None and begun.channel.table == table:
                return begun
            hint = "Publish to it, name another URL, or start over with `weightcast reset URL`."
            raise ConflictError("there is a channel here already", file=store.url, hint=hint)
        fence = "create" if honours_create(store) else "list"
        channel = Channel(uuid.uuid4().hex, table, fence)
        if signing.signer is not None:
            if not signing.is_root:
                hint = "Run `weightcast init URL CHECKPOINT --sign ROOT`, then `weightcast key add` for this key."
                raise UsageError("only the root key begins a signed channel", file=store.url, hint=hint)
            channel = signed(channel, channel.id, signing.signer)
        data, lost = channel_to_json(channel), "another writer created a channel here"
        if fence == "create":
            _create(store, CHANNEL, data, lost)
        else:
            store.put(CHANNEL, data)
            if read_record(store, CHANNEL) != data:
                raise _conflict(store, lost)
        return cls.open(store, signing) if signing.trust is not None else cls(store, channel)

    def put_delta(self, position: Position, data: Data, folder: str | None = None) -> ObjectRef:
        """Upload the patch of the next version, or one object of it; readers do not see it before the commit.

        Several objects of one version have a ``folder`` in common, named by 16 hexadecimal digits.
        """
        sha256, size = summary(data)
        ref = ObjectRef(delta_key(position, sha256, folder), size, sha256)
        self.store.put(ref.key, data)
        return ref

    def put_squash(self, base: int, position: Position, data: Path) -> Edge:
        """Upload a merged patch. Its key holds all that readers must know, so this also commits it."""
        self.refuse_without_signer()
        sha256, size = summary(data)
        signer, signature = self.signing.signer, None
        if signer is not None:
            signature = squash_signature(self.channel.id, base, position, size, sha256, signer)
        key = squash_key(base, position, sha256, signature)
        edge = Edge("squash", base, position.version, size, key, position.digest[:16])
        if self.guard is not None:
            self.guard.check_squash(edge)
        self.store.put(key, data)
        return edge

    def put_anchor(
        self,
        position: Position,
        files: Mapping[str, Path],
        report: Report = silent,
        refuse_changed: Callable[[], None] = lambda: None,
    ) -> ObjectRef:
        """Upload a checkpoint and its record; files that a recent, interrupted attempt uploaded are not sent again.

        ``refuse_changed`` raises if the files are no longer those that ``position`` was computed from; it is called
        right before the record is written, which completes the anchor. An anchor that is complete already is uploaded
        again, which repairs it if it was damaged.
        """
        self.refuse_without_signer()
        fit = wanted(files)
        for name, path in files.items():
            if name not in fit or not is_plain_file(name) or name in (RECORD, CHANNEL_COPY):
                raise UsageError(f"an anchor cannot hold a file called {name}", file=str(path))
        folder = anchor_folder(position, mark_of(files))
        sums = begin(partial(summed, files))  # in parallel to the upload: only the record needs them
        self._put_files(folder, files, self._resumable(folder), report)
        sums.wait()
        refs = [ObjectRef(folder + name, size, sha256) for name, (sha256, size) in sorted(sums.result().items())]
        refuse_changed()
        anchor = Anchor(self.channel.id, position, tuple(refs))
        record = self._put_record(folder, anchor)
        # Until it had its record it was an orphan, and `gc` may have deleted files of it if the upload took long.
        there = self._sizes(folder)
        self._put_files(folder, files, there, silent)
        if not {folder + RECORD, folder + CHANNEL_COPY} <= there.keys():
            self._put_record(folder, anchor)
        return record

    def put_anchor_file(self, position: Position, mark: str, name: str, path: Path) -> ObjectRef:
        """Upload one file of an anchor that several writers upload together; ``mark`` is what they agreed on."""
        if name not in wanted([name]) or not is_plain_file(name) or name in (RECORD, CHANNEL_COPY):
            raise UsageError(f"an anchor cannot hold a file called {name}", file=str(path))
        sha256, size = summary(path)
        ref = ObjectRef(anchor_folder(position, mark) + name, size, sha256)
        self.store.put(ref.key, path)
        return ref

    def complete_anchor(self, position: Position, mark: str, files: Sequence[ObjectRef]) -> ObjectRef:
        """Write the record of an anchor of boxes, whose files were uploaded one by one."""
        anchor = Anchor(self.channel.id, position, tuple(sorted(files, key=lambda ref: ref.key)), boxes=True)
        return self._put_record(anchor_folder(position, mark), anchor)

    def _resumable(self, folder: str) -> dict[str, int]:
        """Sizes of the files in an anchor's folder that need not be sent; older ones are sent again."""
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

        def uploaded(key: str) -> None:
            left.pop(key, None)  # a retry may report it twice
            report("upload", total - sum(left.values()), total)

        put_all(self.store, {key: files[key.removeprefix(folder)] for key in left}, uploaded)

    def refer_anchor(self, position: Position, reference: Reference, pins: Sequence[ObjectRef] = ()) -> ObjectRef:
        """Put an anchor that needs no upload: a reference to a public checkpoint, and its files if we sign."""
        content = json.dumps([reference.repository, reference.revision])
        folder = anchor_folder(position, hashlib.sha256(content.encode()).hexdigest())
        return self._put_record(folder, Anchor(self.channel.id, position, (), reference, tuple(pins)))

    def _put_record(self, folder: str, anchor: Anchor) -> ObjectRef:
        self.refuse_without_signer()
        if self.signing.signer is not None:
            anchor = signed(anchor, self.channel.id, self.signing.signer)
        if self.guard is not None:
            self.guard.check_anchor(anchor, f"{self.store.url}/{folder}{RECORD}")
        data = dump_record(anchor)
        self.store.put(folder + CHANNEL_COPY, channel_to_json(self.channel))
        self.store.put(folder + RECORD, data)
        sha256, size = summary(data)
        return ObjectRef(folder + RECORD, size, sha256)

    def draft(
        self,
        position: Position,
        base: Position | None,
        objects: ObjectRef | Sequence[ObjectRef],
        codec: str | None,
        changed: int,
        step: int | None,
        writer: str,
        label: str | None = None,
    ) -> Manifest:
        """A manifest with the current time, for `commit`; `UsageError` for one that readers would refuse."""
        check_name(writer, "writer")
        step = check_step(step)
        now = round(time.time(), 3)
        refs = (objects,) if isinstance(objects, ObjectRef) else tuple(objects)
        return Manifest(self.channel.id, position, base, refs, codec, changed, step, now, writer, check_label(label))

    def commit(self, manifest: Manifest) -> Manifest:
        """Make a version visible to all readers at once, and return it, signed where we sign.

        `ConflictError` if another writer was first. A store's answer may be lost, so a commit that is there already
        counts as ours if its bytes are the same.
        """
        self.refuse_without_signer()
        version = manifest.position.version
        lost = f"another writer committed version {version} first"
        found = self._fits(manifest.unsigned)
        if found is None:
            raise _conflict(self.store, lost)
        manifest, data = found
        if self.guard is not None:
            # Never commit what readers with a key would refuse. These bytes were signed just now, or checked when read.
            self.guard.check_signature(manifest, data, is_known=True)
        if self.channel.fence == "create":
            _create(self.store, manifest_key(version), data, lost)
        else:
            self._commit_listed(manifest, data, lost)
        if self.guard is not None:
            self.guard.remember(manifest, data)
        with suppress(StoreError):  # a hint: the version is committed with or without it
            self.store.put(HEAD, head_to_json(manifest.position))
        return manifest

    def refuse_without_signer(self) -> None:
        """`UsageError` where readers with a key would refuse whatever is written from here."""
        if self.channel.signature is not None and self.signing.signer is None:
            hint = "Name the private key with sign=… (--sign), and the root's public key with trust=… (--trust)."
            raise UsageError("this channel is signed", file=self.store.url, hint=hint)

    def _commit_listed(self, manifest: Manifest, data: bytes, lost: str) -> None:
        """For stores without create-if-absent: write under our own name, and list the commits of other writers.

        Of two writers at once at least one sees the other and withdraws; perhaps both do.
        """
        version = manifest.position.version
        own = manifest_key(version, f"{manifest.writer}-{self._mark}")
        for write in (False, True):
            if write:
                self.store.put(own, data)
            listed = self._commits_of(version)
            if any(key != own for key in listed):
                if write or own in listed:  # ours may be there from an interrupted attempt
                    self.store.delete(own)
                raise _conflict(self.store, lost)
        if read_record(self.store, own) != data:
            raise _conflict(self.store, lost)

    def _fits(self, manifest: Manifest) -> tuple[Manifest, bytes] | None:
        """The manifest and its bytes as it is committed, signed where we sign.

        None if the channel has moved on without its writer.

        If the writer was suspended for long, the manifest that should fence it may have been collected. So there must
        also be no later version, and the version before must be the base.
        """
        version = manifest.position.version
        with suppress(MissingError):
            found, data = self._read(version)
            if found.unsigned == manifest:
                return found, data
        if not self._is_last(version):
            return None
        before, data = None, b""
        try:
            if version > 0:
                before, data = self._read(version - 1)
        except MissingError as error:
            if error.key is None:
                raise  # the bucket is missing, not a version
            return None
        if manifest.base is not None and (before is None or before.position != manifest.base):
            return None
        signer = self.signing.signer
        if signer is None:
            return manifest, dump_record(manifest)
        previous = hashlib.sha256(data).hexdigest() if before is not None else None
        keyring = self.guard.keyring_number if self.guard is not None else 0
        return signed_with_bytes(replace(manifest, previous=previous, keyring=keyring), self.channel.id, signer)

    def _is_last(self, version: int) -> bool:
        """Whether no later version is there. The same listing shows whether our key may have been revoked since.

        No reader, and no other writer, would go past a commit of such a key.
        """
        keyring = 0
        for listed in self.store.list(MANIFESTS, manifest_key(version, "~")):
            if (self.version_of(listed.key) or 0) > version:
                return False
            keyring = max(keyring, read_keyring_key(listed.key) or 0)
        if self.guard is not None and keyring > self.guard.keyring_number:
            self.guard.refresh()
        return True

    def _read(self, version: int) -> tuple[Manifest, bytes]:
        """The commit of a version, and its bytes."""
        key, data = self.read_manifest(version)
        return self.parse_manifest(version, key, data), data


def _create(store: Store, key: str, data: bytes, lost: str) -> None:
    if not store.create(key, data) and read_record(store, key) != data:
        raise _conflict(store, lost)


def _conflict(store: Store, lost: str) -> ConflictError:
    hint = "Only one writer may publish at a time. Stop the other, then restart this one: it continues from the head."
    return ConflictError(lost, file=store.url, hint=hint)
