"""A channel in several buckets: its home, and copies of it that are nearer to the reader.

A copy that answers and has what is asked for is read, in the order in which copies are named; else the home is. What a
reader gets is exact all the same: objects and manifests never change, are checked wherever they come from, and a
version that was seen once is missing only if the home says so. So a copy that lags costs time, and never leads back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.chain_reader import read_hint
from weightcast.channel.keys import (
    ANCHORS,
    CHANNEL,
    DELTAS,
    HEAD,
    INDEX,
    KEYRING,
    MANIFESTS,
    RECORD,
    SQUASHES,
    TAGS,
    manifest_key,
    read_manifest_key,
)
from weightcast.channel.records import MAX_JSON, Anchor, Manifest, head_from_json, load_record
from weightcast.errors import FormatError, MissingError, StoreError, UsageError
from weightcast.store import open_store
from weightcast.store.backoff import CLOCK, Backoff, Clock
from weightcast.store.base import Data, Listed, Store
from weightcast.store.retry import hasty

_COMPARE_EVERY = 30.0
"""Seconds between two looks at the home, while a copy is read. A copy that has nothing new in that time although the
home has is not read until it has caught up."""

_BEGINNING = 4096
"""Bytes of the channel's record that are compared then: as a rule its id is among them, the tensors are not."""

_FROM_COPIES = (MANIFESTS, DELTAS, SQUASHES, ANCHORS, TAGS, HEAD, INDEX)
"""What copies have; all else is the home's: heartbeats, pins, the lease."""

_HINTS = (HEAD, INDEX)

_log = logging.getLogger("weightcast")


@dataclass(eq=False)
class _Copy:
    store: Store
    backoff: Backoff
    until: float = float("-inf")
    """It is not asked before this time."""
    wanted: int = -1
    """The version that it must have, or a later one, before it is read again."""
    is_known: bool = False
    """Whether it is known to be a copy of this channel, and reachable, since it was asked last."""
    is_away: bool = False


class Nearest:
    """A channel's bucket, read from copies as far as they have what is needed; every write goes to the home."""

    def __init__(self, home: Store, copies: Sequence[Store], clock: Clock = CLOCK):
        """``copies`` in the order in which they are to be read. Each should fail quickly (`hasty`)."""
        self.home = home
        self._copies = [_Copy(store, Backoff(1.0)) for store in copies]
        self._quick_home = hasty(home)
        self._clock = clock
        self._guard = threading.Lock()
        self._record: bytes | None = None
        """The channel's own record, which each copy must have."""
        self._newest = -1
        """The newest version that is known to exist."""
        self._compared_at = clock.now()
        self._lagging_at: int | None = None
        """The newest version at the last look at the home, if the home had a newer one."""

    @property
    def url(self) -> str:
        return self.home.url

    @property
    def sources(self) -> list[Store]:
        """Each bucket by itself, the home first: for an object that came damaged."""
        return [self.home, *(copy.store for copy in self._copies)]

    def at_home(self, key: str) -> bytes | None:
        """A record as its home has it, for one that a copy has wrong; None if the home does not answer."""
        with suppress(StoreError):
            return self._quick_home.get(key, 0, MAX_JSON)
        return None

    def expect(self, version: int) -> None:
        """The reader holds this version, so it exists, whatever a copy says."""
        with self._guard:
            self._newest = max(self._newest, version)

    # -- a store -------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key == CHANNEL:
            return self._get_channel(start, length)
        if key.startswith(KEYRING):
            return self._get_keyring(key, start, length)
        if not key.startswith(_FROM_COPIES):
            return self.home.get(key, start, length)
        found = read_manifest_key(key)
        version = found[0] if found else None
        if version is not None:
            self._compare()
        for copy in self._readable():
            try:
                data = copy.store.get(key, start, length)
            except MissingError as error:
                if error.key is None:
                    self._leave(copy, error)
                elif key in _HINTS or (version is not None and version > self._newest):
                    raise  # not new here yet: the home would say so sooner, and then have to serve it, too
            except StoreError as error:
                self._leave(copy, error)
            else:
                if start or _is_sound(key, data):
                    return self._seen(version, data)
        return self._seen(version, self.home.get(key, start, length))

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        if not prefix.startswith(_FROM_COPIES):
            return self.home.list(prefix, after)
        return self._list(prefix, after)

    def put(self, key: str, data: Data) -> None:
        self.home.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        return self.home.create(key, data)

    def delete(self, key: str) -> None:
        self.home.delete(key)

    def _list(self, prefix: str, after: str) -> Iterator[Listed]:
        if prefix.startswith(MANIFESTS):
            self._compare()
        found = read_manifest_key(f"{prefix}.json")  # where the commits of one version are listed
        is_known = found is not None and found[0] <= self._newest
        for copy in self._readable():
            before = after
            try:
                for listed in copy.store.list(prefix, after):
                    yield listed
                    after = listed.key
                if after != before or not is_known:
                    return
            except StoreError as error:
                self._leave(copy, error)
        yield from self.home.list(prefix, after)

    def _get_channel(self, start: int, length: int | None) -> bytes:
        """The record by the home, if it answers; the first one that is read decides what the copies must have."""
        first = self._record is None
        try:
            self._become(self._quick_home.get(CHANNEL, 0, MAX_JSON + 1))
        except StoreError as error:
            if isinstance(error, MissingError) and error.key is not None:
                raise
            for copy in self._copies if first else ():
                with suppress(StoreError):
                    self._become(copy.store.get(CHANNEL, 0, MAX_JSON + 1))
                    break
        if self._record is None:
            self._become(self.home.get(CHANNEL, 0, MAX_JSON + 1))
        assert self._record is not None
        if first:
            self._refuse_others()
            with suppress(StoreError):  # else the copies are all there is
                self.expect(_newest_in(self._quick_home))
        return self._record[start:] if length is None else self._record[start : start + length]

    def _refuse_others(self) -> None:
        """`UsageError` if a copy that answers is of another channel."""
        for copy in self._copies:
            try:
                copy.is_known = copy.store.get(CHANNEL, 0, MAX_JSON + 1) == self._record
            except StoreError as error:
                self._leave(copy, error)
            else:
                if not copy.is_known:
                    hint = f"`weightcast copy {self.url} URL` makes one, in a bucket or folder of its own."
                    raise UsageError(f"this is not a copy of {self.url}", file=copy.store.url, hint=hint)

    def _get_keyring(self, key: str, start: int, length: int | None) -> bytes:
        """An entry of the list of keys by the home, since a copy that lags would hide what was revoked.

        While the home is away, copies are asked: each entry is signed, and manifests say which one they need.
        """
        try:
            return self._quick_home.get(key, start, length)
        except StoreError as error:
            if isinstance(error, MissingError) and error.key is not None:
                raise
            away = error
        missing = None
        for copy in self._readable():
            try:
                return copy.store.get(key, start, length)
            except StoreError as error:
                if isinstance(error, MissingError) and error.key is not None:
                    missing = error  # this copy may lag, and another one not
                else:
                    self._leave(copy, error)
        raise missing or away

    # -- which copies are read -----------------------------------------------------------------------------------------

    def _readable(self) -> Iterator[_Copy]:
        """The copies to ask, in order."""
        for copy in self._copies:
            if self._clock.now() >= copy.until and (copy.is_known or self._is_back(copy)):
                yield copy

    def _is_back(self, copy: _Copy) -> bool:
        """Whether a copy that was left can be read again: it answers, is of this channel, and has caught up."""
        try:
            if copy.store.get(CHANNEL, 0, MAX_JSON + 1) != self._record:
                raise StoreError("another channel is there", url=copy.store.url)
            if copy.wanted >= 0 and not _has_after(copy.store, copy.wanted - 1):
                raise StoreError(f"version {copy.wanted} is not there yet", url=copy.store.url)
        except StoreError as error:
            self._leave(copy, error)
            return False
        with self._guard:
            was_away, copy.is_known, copy.is_away = copy.is_away, True, False
            copy.backoff.succeeded()
        if was_away:
            _log.info("reading from %s again", copy.store.url)
        return True

    def _leave(self, copy: _Copy, error: StoreError, more: int = 0) -> None:
        """Do not ask a copy for a while; it must then have what is the newest version now, or ``more`` than that.

        Not what is the newest then: where versions come fast, a copy lacks the last one at almost any moment.
        """
        with self._guard:
            if self._clock.now() < copy.until:
                return  # another thread was told the same
            was_away, copy.is_known, copy.is_away = copy.is_away, False, True
            copy.until = self._clock.now() + copy.backoff.failed()
            copy.wanted = self._newest + more
        if not was_away:
            _log.warning("not reading from %s for now: %s", copy.store.url, error)

    def _compare(self) -> None:
        """Now and then look at the home: whether it still is the same channel, and whether the copy that is read lags.

        A reader of a copy whose copying has ended would otherwise stay where it is for ever, and not know it.
        """
        with self._guard:
            now = self._clock.now()
            if now - self._compared_at < _COMPARE_EVERY:
                return
            self._compared_at = now
        copy = next(self._readable(), None)
        if copy is None:
            return
        with suppress(StoreError):  # only a look: while the home is away, the copy is all there is
            if self._quick_home.get(CHANNEL, 0, _BEGINNING) != (self._record or b"")[:_BEGINNING]:
                self._become(self._quick_home.get(CHANNEL, 0, MAX_JSON + 1))
            newest = self._newest
            is_behind = _has_after(self._quick_home, newest)
            if is_behind and newest == self._lagging_at:
                self._leave(copy, StoreError(f"it has nothing after version {newest}", url=copy.store.url), 1)
            self._lagging_at = newest if is_behind else None

    def _become(self, record: bytes) -> None:
        """The channel's record, as its home has it; where that is another one, the channel was reset."""
        with self._guard:
            if record == self._record:
                return
            if self._record is not None:
                self._newest = -1
                for copy in self._copies:
                    copy.is_known, copy.wanted = False, -1
            self._record = record

    def _seen(self, version: int | None, data: bytes) -> bytes:
        if version is not None and version > self._newest:
            with self._guard:
                self._newest = max(self._newest, version)
        return data


def nearest(home: Store, copies: Sequence[str | Path | Store], clock: Clock = CLOCK) -> Store:
    """The channel's bucket, read from these copies of it first; just the bucket if there are none."""
    return Nearest(home, [hasty(open_store(copy)) for copy in copies], clock) if copies else home


def _has_after(store: Store, version: int) -> bool:
    """Whether a version later than this one is there. A listing alone may be old, as over http."""
    with suppress(MissingError):
        store.get(manifest_key(version + 1), 0, 1)
        return True
    return any(found > version for found in _versions(store, version))


def _newest_in(store: Store) -> int:
    """The newest version that the hint and a listing show; -1 if there is none."""
    hint = read_hint(store, HEAD, head_from_json)
    newest = hint.version if hint else -1
    return max(_versions(store, newest), default=newest)


def _versions(store: Store, after: int) -> Iterator[int]:
    """Versions from this one on, by a listing."""
    listing = store.list(MANIFESTS, manifest_key(after, "~") if after >= 0 else "")
    return (found[0] for found in (read_manifest_key(listed.key) for listed in listing) if found)


def _is_sound(key: str, data: bytes) -> bool:
    """Whether a record is one; objects are checked by their SHA-256, by whoever asked for them."""
    try:
        if key.startswith(MANIFESTS):
            load_record(Manifest, data)
        elif key.endswith(f"/{RECORD}"):
            load_record(Anchor, data)
    except FormatError:
        return False
    return True
