"""What a reader with a trusted key checks of everything it reads from a channel (SPEC 15.4)."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from weightcast.channel.edge import Edge
from weightcast.channel.keyring import Role, read_keyring
from weightcast.channel.keys import SQUASHES, manifest_key, read_squash_key
from weightcast.channel.records import Anchor, Channel, Heartbeat, Manifest
from weightcast.channel.signed import signed_bytes, squash_bytes, without_signature
from weightcast.channel.signing import PublicKey, message
from weightcast.channel.trust import Seen, Trust
from weightcast.errors import Distrust, TrustError
from weightcast.store.base import Store

_LINKS = 4096
"""Manifests whose place in the history is remembered."""

_SQUASHES = 1 << 16
"""Names of squashes whose signatures were checked."""

_UNSIGNED = (
    "Somebody else may write to this bucket. If the channel is not meant to be signed, read it without a trusted key."
)
_OTHER_KEY = "`weightcast key show URL --trust KEY` lists the keys of the channel; `weightcast key add` adds one."
_ACCEPT = "accept that once: `weightcast pull URL FOLDER --allow-rollback` (allow_rollback=True)."
_OLDER = f"If it was put back on purpose, {_ACCEPT}"
_TAMPERED = "Somebody else may write to this bucket. What is held stays as it is."


class Guard:
    """Checks signatures for one channel, and remembers what it has seen. Any number of threads may use it."""

    def __init__(self, store: Store, trust: Trust, seen: Seen | None = None):
        self.trust = trust
        self._store = store
        self._seen = seen or Seen()
        self._lock = threading.RLock()
        self._links: OrderedDict[int, tuple[str, str | None]] = OrderedDict()
        """Of manifests that were read: their own SHA-256, and that of the one before."""
        self._squashes: OrderedDict[str, bool] = OrderedDict()

    @property
    def seen(self) -> Seen:
        with self._lock:
            return self._seen

    @property
    def root(self) -> PublicKey:
        return self.trust.root

    @property
    def keyring_number(self) -> int:
        """The newest key list that is known; 0 for none."""
        ring = self.seen.keyring
        return ring.number if ring else 0

    # -- the channel's own record, and the key list --------------------------------------------------------------------

    def enter(self, channel: Channel, file: str) -> None:
        """Check the channel's own record, and read what is new of its key list; before anything else of it is read."""
        if channel.signature is None or channel.signer is None:
            raise self._distrust("the channel is not signed", "unsigned", file, hint=_UNSIGNED)
        if channel.signer != self.root.id:
            hint = "Check the key, and the address."
            raise self._distrust(
                "the channel is not of the trusted key", "unknown key", file, channel.signer, hint=hint
            )
        if not self.root.verifies(channel.signature, signed_bytes(channel, channel.id)):
            raise self._distrust("the signature of the channel's record is wrong", "forged", file, channel.signer)
        with self._lock:
            before = self._seen.channel
            if before not in (None, channel.id):
                if not self.trust.allow_rollback:
                    problem = "another channel of the same key is at this address"
                    hint = f"If it was started over on purpose, {_ACCEPT}"
                    raise self._distrust(problem, "rollback", file, channel.signer, hint=hint)
                self._seen = Seen()
                self._links.clear()
            self._seen = replace(self._seen, channel=channel.id)
        self.refresh()

    def refresh(self) -> None:
        """Read what is new of the key list: one small request, unless there is something."""
        with self._lock:
            assert self._seen.channel is not None
            keyring = read_keyring(self._store, self._seen.channel, self.root, self._seen.keyring)
            if keyring is not self._seen.keyring:
                self._seen = replace(self._seen, keyring=keyring)
                self._squashes.clear()

    def _signer(self, key: str, roles: Sequence[Role], version: int, file: str) -> PublicKey:
        """The key with this id, if it may sign for ``version`` in one of these roles. The root may sign all."""
        if key == self.root.id:
            return self.root
        with self._lock:
            ring = self._seen.keyring
        found = ring.of(key) if ring else ()
        if not found:
            raise self._distrust(f"it is signed by {key}, which the key list lacks", "unknown key", file, key)
        for allowed in found:
            if allowed.role in roles and allowed.covers(version):
                return allowed.public
        problem = f"the key {key} may not sign this as {' or '.join(roles)} of version {version}"
        raise self._distrust(problem, "not allowed", file, key, hint=_OTHER_KEY)

    def _fresh_signer(self, key: str, roles: Sequence[Role], version: int, file: str) -> PublicKey:
        """The same, but an unknown key is looked up in the bucket's newest list first."""
        try:
            return self._signer(key, roles, version, file)
        except TrustError as error:
            if error.reason != "unknown key":
                raise
        self.refresh()
        return self._signer(key, roles, version, file)

    def _verify(self, public: PublicKey, signature: str, data: bytes, file: str) -> None:
        if not public.verifies(signature, data):
            problem = "the signature is wrong: the bytes are not those that were signed"
            raise self._distrust(problem, "forged", file, public.id)

    def _distrust(
        self, problem: str, reason: Distrust, file: str, signer: str | None = None, *, hint: str | None = None
    ) -> TrustError:
        remedy = hint or (_OTHER_KEY if reason == "unknown key" else _TAMPERED)
        return TrustError(problem, reason=reason, file=file, signer=signer, hint=remedy)

    # -- manifests -----------------------------------------------------------------------------------------------------

    def check_manifest(self, manifest: Manifest, data: bytes) -> None:
        """Check the commit of a version, whose bytes are ``data``, and its place in the history that was seen."""
        sha256 = hashlib.sha256(data).hexdigest()
        with self._lock:
            known = self._links.get(manifest.position.version)
        is_known = known is not None and known[0] == sha256
        file = self.check_signature(manifest, data, is_known=is_known)
        self._link(manifest, sha256, file)

    def check_signature(self, manifest: Manifest, data: bytes, *, is_known: bool = False) -> str:
        """Check the commit of a version by itself; returns the address that errors name.

        Of bytes that are known, since their signature was checked before, only the signer is looked up again.
        """
        version = manifest.position.version
        file = f"{self._store.url}/{manifest_key(version)}"
        if manifest.signature is None or manifest.signer is None:
            raise self._distrust(f"version {version} is not signed", "unsigned", file, hint=_UNSIGNED)
        if (manifest.previous is None) != (version == 0):
            raise self._distrust("the manifest does not say what it follows", "forged", file, manifest.signer)
        if manifest.keyring > self.keyring_number:
            self.refresh()
        public = self._fresh_signer(manifest.signer, ["writer"], version, file)
        if not is_known:
            bare = without_signature(data, manifest)
            if bare is None:
                raise self._distrust("the manifest is not in canonical form", "forged", file, manifest.signer)
            self._verify(public, manifest.signature, message("manifest", manifest.channel, bare), file)
        if manifest.keyring > self.keyring_number:
            problem = f"the writer knew key list {manifest.keyring}, and the bucket shows {self.keyring_number}"
            raise self._distrust(problem, "rollback", file, manifest.signer)
        return file

    def remember(self, manifest: Manifest, data: bytes) -> None:
        """Take a version that was committed here for seen, so that the next one does not check it again."""
        file = f"{self._store.url}/{manifest_key(manifest.position.version)}"
        self._link(manifest, hashlib.sha256(data).hexdigest(), file)

    def _link(self, manifest: Manifest, sha256: str, file: str) -> None:
        """Refuse a manifest that is not of the history that was seen, and remember its place there."""
        version = manifest.position.version
        with self._lock:
            if not self._fits(manifest, sha256):
                if not self.trust.allow_rollback:
                    problem = f"version {version} is of another history than what was seen before"
                    raise self._distrust(problem, "fork", file, manifest.signer, hint=_OLDER)
                self._links.clear()
                self._seen = replace(self._seen, version=-1, manifest=None, time=None)
            self._links[version] = (sha256, manifest.previous)
            while len(self._links) > _LINKS:
                self._links.popitem(last=False)
            if version >= self._seen.version:
                self._seen = replace(self._seen, version=version, manifest=sha256, time=manifest.time)

    def _fits(self, manifest: Manifest, sha256: str) -> bool:
        version = manifest.position.version
        before, same, after = (self._links.get(version + step) for step in (-1, 0, 1))
        if self._seen.manifest is not None and version == self._seen.version + 1:
            before = before or (self._seen.manifest, None)
        if self._seen.manifest is not None and version == self._seen.version:
            same = same or (self._seen.manifest, None)
        return (
            (before is None or before[0] == manifest.previous)
            and (same is None or same[0] == sha256)
            and (after is None or after[1] == sha256)
        )

    def hold(self, version: int) -> None:
        """The reader holds ``version`` already: what was written down of what it has seen may be a little older."""
        with self._lock:
            if version > self._seen.version:
                self._seen = replace(self._seen, version=version, manifest=None, time=None)

    def check_head(self, head: Manifest | None, before: int) -> None:
        """Refuse a channel whose newest version is older than ``before``, the newest that was seen when the look began.

        What another thread has seen since may have come after the look.
        """
        found = head.position.version if head is not None else -1
        with self._lock:
            if found >= before:
                return
            if not self.trust.allow_rollback:
                problem = f"the newest version is {found}, but {before} was seen before"
                if head is None:
                    problem = f"there is no version, but {before} was seen before"
                raise self._distrust(problem, "rollback", self._store.url, hint=_OLDER)
            self._links = OrderedDict((v, link) for v, link in self._links.items() if v <= found)
            sha256 = self._links[found][0] if found in self._links else None
            self._seen = replace(self._seen, version=found, manifest=sha256, time=head.time if head else None)

    def refuse_old(self, now: float) -> None:
        """Refuse a channel in which nothing was committed for longer than the reader allows."""
        most, seen = self.trust.max_age, self.seen
        if most is None or seen.time is None or now - seen.time <= most:
            return
        problem = f"version {seen.version} is the newest, and {now - seen.time:,.0f} s old; {most:,.0f} s are allowed"
        hint = "Either the writer stopped, or somebody withholds what is new. Allow more with --max-age (max_age=…)."
        raise self._distrust(problem, "stale", self._store.url, hint=hint)

    # -- what no manifest names ----------------------------------------------------------------------------------------

    def check_anchor(self, anchor: Anchor, file: str) -> None:
        """Check the record of an anchor that no manifest at hand commits."""
        if anchor.signature is None or anchor.signer is None:
            raise self._distrust("this anchor is not signed", "unsigned", file, hint=_UNSIGNED)
        public = self._fresh_signer(anchor.signer, ["cutter", "writer"], anchor.position.version, file)
        self._verify(public, anchor.signature, signed_bytes(anchor, anchor.channel), file)

    def check_squash(self, edge: Edge) -> None:
        """Check the signature in a squash's name, over both versions, size and SHA-256."""
        file = f"{self._store.url}/{edge.key}"
        place = read_squash_key(edge.key)
        if place is None or place.signature is None:
            raise self._distrust("this squash is not signed", "unsigned", file, hint=_UNSIGNED)
        known = f"{edge.nbytes} {edge.key}"
        with self._lock:
            if known in self._squashes:
                return
            channel = self._seen.channel
        assert channel is not None
        key, signature = place.signature
        data = squash_bytes(channel, place.base, place.result, place.digest, edge.nbytes, place.sha256, key)
        # Not fresh: a listing may name any number of unknown keys, and planning reads the key list first.
        self._verify(self._signer(key, ["cutter"], place.result, file), signature, data, file)
        with self._lock:
            self._squashes[known] = True
            while len(self._squashes) > _SQUASHES:
                self._squashes.popitem(last=False)

    def accepts(self, edge: Edge) -> bool:
        """Whether a route may be planned with this edge: what else there is to check is checked once it is fetched."""
        if not edge.key.startswith(SQUASHES):
            return True
        try:
            self.check_squash(edge)
        except TrustError:
            return False
        return True

    def check_heartbeat(self, beat: Heartbeat, file: str) -> None:
        """Check the report of a replica."""
        if beat.signature is None or beat.signer is None:
            raise self._distrust("this heartbeat is not signed", "unsigned", file, hint=_UNSIGNED)
        channel = self.seen.channel
        assert channel is not None
        public = self._signer(beat.signer, ["replica"], beat.position.version, file)
        self._verify(public, beat.signature, signed_bytes(beat, channel), file)
