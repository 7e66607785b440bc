"""Looks at a channel again and again, and writes what it sees into a journal. It writes nothing to the channel.

Everything is bounded: the newest versions are known one by one, older ones in groups by their sizes in a listing, and
what tensors changed is read of the newest alone. A channel with many versions costs a look no more requests than one
with few, but for the pages of listings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

from weightcast.channel.chain import Chain
from weightcast.channel.keys import manifest_key
from weightcast.channel.lease import lease
from weightcast.channel.records import Manifest
from weightcast.errors import ChannelError, FormatError, MissingError, TrustError, WeightcastError
from weightcast.store.backoff import CLOCK, Clock
from weightcast.view.event_tail import EventTail
from weightcast.view.heat import Axes
from weightcast.view.journal import Journal, short
from weightcast.view.listings import Listings
from weightcast.view.objects import Read, read_patch
from weightcast.view.replica_watch import ReplicaWatch

RECENT = 500
"""Versions that are shown one by one."""
HEAT = 32
"""Versions of which is read what tensors changed."""

_MANIFESTS, _PATCHES = 64, 8
"""How many are read in one look."""
_MOST_OBJECTS = 1024
"""Objects of a version that are checked."""
_AT_ONCE = 8
_RELIST = 30.0
"""Seconds after which everything is listed again, though no version came."""


class Observer:
    """One channel, watched. `look` is called by one thread."""

    def __init__(
        self, open_chain: Callable[[], Chain], chain: Chain, events: EventTail | None = None, clock: Clock = CLOCK
    ):
        """``chain`` is opened already; ``open_chain`` opens it again if it was reset."""
        self.journal = Journal(clock.wall)
        self._open, self._clock, self._events = open_chain, clock, events
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weightcast-view")
        self._since: float | None = None
        self.trouble: WeightcastError | None = None
        """Why the last look failed; None if it did not."""
        self._begin(chain)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, chain: Chain) -> None:
        self._chain, self._axes = chain, Axes.of(chain.channel.table)
        self._head: Manifest | None = None
        self._manifests: dict[int, Manifest | None] = {}
        self._sizes: dict[int, int | None] = {}
        """Of deltas with all their objects, of which a manifest may be kept with the first alone."""
        self._damaged, self._damaged_head = dict[str, str](), dict[str, str]()
        self._reads: dict[int, Read] = {}
        self._listed_at = 0.0
        self._listings = Listings(chain, self.journal)
        self._told: set[str] = set()
        self._replicas = ReplicaWatch(self.journal)
        table = chain.channel.table
        trusted = {"id": chain.channel.id, "url": short(chain.store.url), "signed": chain.guard is not None}
        model = {"tensors": len(table), "elements": table.elements, "bytes": table.nbytes}
        self.journal.put("channel", {**trusted, **model})
        self.journal.put("axes", self._axes.as_json())
        self.journal.put("limits", {"recent": RECENT, "heat": HEAT})

    def look(self) -> bool:
        """Look once. Whether there is more to read; what a channel that is away had stays."""
        try:
            more = self._look()
        except WeightcastError as error:
            self.trouble = error
            if self._since is None:
                self._since = self._clock.wall()
                self.journal.tell("bad", f"cannot be read: {short(str(error))}", "channel")
            self.journal.put("away", {"since": round(self._since, 3), "error": short(str(error))})
            return False
        finally:
            self.journal.looked()
        if self._since is not None:
            self.journal.tell("good", "can be read again", "channel")
        self._since = self.trouble = None
        self.journal.put("away", None)
        return more

    def _look(self) -> bool:
        try:
            head = self._find_head()
        except (ChannelError, TrustError):
            if not self._is_reset():
                raise
            return True
        before = self._head.position.version if self._head else -1
        if self._went_back(head):
            self._watch_anew(self._chain, "has other versions than before: it is read anew")
            return True
        self._head = head
        self._write_head()
        backlog = False
        if head is not None:
            newest = head.position.version
            if newest != before or self._clock.now() - self._listed_at > _RELIST:
                self._forget_damaged()
                self._read_manifests(newest)
                self._listings.look(_oldest(newest), self._manifests)
                self._listed_at = self._clock.now()
            if before >= 0:  # not in the first look, after which a page can be drawn
                self._listings.look_at_older(_oldest(newest))
            backlog = self._read_manifests(newest) | self._read_patches(newest) | self._listings.lacks_older
            self._write_findings()
        self._replicas.look(self._chain, self._pool, head.position.version if head else None, self._manifests.get)
        arrivals, source = self._replicas.arrivals(), "heartbeats"
        if self._events is not None:
            backlog |= self._events.read(self._chain.channel.id)
            self.journal.put("phases", self._events.as_json())
            told = self._events.arrivals(self._manifests.get)
            arrivals, source = (told, "events") if told else (arrivals, source)
        self.journal.put("arrivals", {"source": source, "rows": arrivals})
        return backlog

    def _is_reset(self) -> bool:
        """Whether another channel is at the address; then that one is watched."""
        chain = self._open()
        if chain.channel.id == self._chain.channel.id:
            return False
        self._watch_anew(chain, "was reset: this is another one")
        return True

    def _went_back(self, head: Manifest | None) -> bool:
        """Whether the newest commit that was seen is no longer there, damaged or replaced."""
        if self._head is None:
            return False
        known = self._head.position.version
        return head is None or head.position.version < known or (head.position.version == known and head != self._head)

    def _watch_anew(self, chain: Chain, why: str) -> None:
        self.journal.begin_again()
        self._begin(chain)
        self.journal.tell("warn", why, "channel")

    # -- versions ------------------------------------------------------------------------------------------------------

    def _find_head(self) -> Manifest | None:
        """The newest commit that can be read."""
        known = self._head.position.version if self._head else None
        self._damaged_head = {}
        try:
            return self._chain.head(known)
        except (ChannelError, FormatError) as error:
            newest = max(self._chain.versions((known or 0) - 1), default=None)
            if newest is None:
                raise
            self._damaged_head[manifest_key(newest)] = error.problem
            for version in range(newest - 1, max(-1, newest - 10), -1):
                manifest = self._manifest(version)
                if manifest is not None:
                    return manifest
            raise

    def _write_head(self) -> None:
        head, began = self._head, lease(self._chain)
        position = {"version": head.position.version, "digest": head.position.digest} if head else {}
        more = {"step": head.step, "label": short(head.label), "time": head.time} if head else {}
        self.journal.put("head", position | more if head else None)
        writer = {"name": short(began.writer), "host": short(began.host), "time": began.time} if began else None
        self.journal.put("writer", writer)

    def _manifest(self, version: int) -> Manifest | None:
        """A commit; None for one that was collected or is damaged."""
        try:
            return self._chain.manifest(version)
        except MissingError as error:
            if error.key is None:
                raise  # the bucket is missing
        except (ChannelError, FormatError, TrustError) as error:
            self._damaged[manifest_key(version)] = error.problem
        return None

    def _read_manifests(self, newest: int) -> bool:
        """Read some that are not known yet, the newest first; whether there are more."""
        oldest = _oldest(newest)
        unknown = [version for version in range(newest, oldest - 1, -1) if version not in self._manifests]
        for version, manifest in zip(
            unknown[:_MANIFESTS], self._pool.map(self._manifest, unknown[:_MANIFESTS]), strict=True
        ):
            # Of a sharded training with thousands of ranks, or a lie, not all objects are remembered and checked.
            self._manifests[version] = manifest and replace(manifest, objects=manifest.objects[:_MOST_OBJECTS])
            self._sizes[version] = manifest.nbytes if manifest is not None and manifest.base is not None else None
            self.journal.put_row("versions", version, _row(manifest))
        for version in [version for version in self._manifests if version < oldest]:
            del self._manifests[version]
            self._listings.add_older(version, self._sizes.pop(version))
        self.journal.keep_rows("versions", oldest)
        return len(unknown) > _MANIFESTS

    def _forget_damaged(self) -> None:
        """Read what was damaged again: it may have been repaired."""
        for version in [version for version, read in self._reads.items() if read.problems]:
            del self._reads[version]
        for version in [version for version in self._manifests if manifest_key(version) in self._damaged]:
            del self._manifests[version]
        self._damaged.clear()

    # -- patches -------------------------------------------------------------------------------------------------------

    def _read_patches(self, newest: int) -> bool:
        """Read what some versions changed, the newest first; whether there are more."""
        candidates = [
            manifest
            for version in range(newest, max(-1, newest - HEAT), -1)
            if (manifest := self._manifests.get(version)) is not None and manifest.base is not None
        ]
        unread = [manifest for manifest in candidates if manifest.position.version not in self._reads]
        for manifest, read in zip(unread[:_PATCHES], self._pool.map(self._read_patch, unread[:_PATCHES]), strict=True):
            version = manifest.position.version
            self._reads[version] = read
            column = self._axes.column(read.changed) if read.changed is not None else None
            self.journal.put_row("heat", version, {"shares": column, "unread": read.unread})
        for version in [version for version in self._reads if version <= newest - HEAT]:
            del self._reads[version]
        self.journal.keep_rows("heat", max(0, newest - HEAT + 1))
        return len(unread) > _PATCHES

    def _read_patch(self, manifest: Manifest) -> Read:
        read = read_patch(self._chain.store, manifest)
        if read.problems and self._manifest(manifest.position.version) is None:
            return Read(unread="it was collected")
        unknown = next((name for name in read.changed or () if name not in self._axes.places), None)
        if unknown is None:
            return read
        problem = f"it names a tensor that the channel does not have: {short(unknown)}"
        return Read(None, problem, read.checked, read.nbytes, ((manifest.key, problem),))

    def _write_findings(self) -> None:
        found = dict(self._findings())
        for key in found.keys() - self._told:
            self.journal.tell("bad", f"is damaged: {short(found[key])}", key)
        self._told |= found.keys()
        rows = [[short(key), short(problem)] for key, problem in islice(found.items(), 50)]
        read = self._reads.values()
        self.journal.put(
            "checks",
            {
                "findings": rows,
                "total": len(found),
                "manifests": sum(manifest is not None for manifest in self._manifests.values()),
                "objects": sum(one.checked for one in read),
                "bytes": sum(one.nbytes for one in read),
            },
        )

    def _findings(self) -> Iterator[tuple[str, str]]:
        """What is wrong, by key."""
        yield from self._damaged_head.items()
        yield from self._damaged.items()
        yield from self._listings.findings()
        for read in self._reads.values():
            yield from read.problems


def _oldest(newest: int) -> int:
    """The oldest version that is shown by itself."""
    return max(0, newest - RECENT + 1)


def _row(manifest: Manifest | None) -> dict[str, Any] | None:
    """What a page shows of a version; None for one of which nothing is known."""
    if manifest is None:
        return None
    return {
        "bytes": manifest.nbytes,
        "changed": manifest.changed,
        "step": manifest.step,
        "time": manifest.time,
        "codec": manifest.codec,
        "writer": short(manifest.writer),
        "label": short(manifest.label),
        "anchor": manifest.base is None,
    }
