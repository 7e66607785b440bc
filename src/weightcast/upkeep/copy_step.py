"""Bringing what leads to one version from a bucket to another: every object is checked on the way, and none is large
in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.edge import Edge, edge_of, squash_object
from weightcast.channel.keys import CHANNEL_COPY, parent
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.disk.durable import Report, silent
from weightcast.errors import FormatError, MissingError, UnreachableError, WeightcastError
from weightcast.follow.bad_edges import BadEdges
from weightcast.store.download import fetch
from weightcast.upkeep.copy_plan import Step

_OBJECTS_AT_ONCE, _PARTS_AT_ONCE = 8, 2
"""Each object holds two parts of 16 MiB in memory at most."""

_MOST_LOOKS = 4
"""Times that an anchor's folder is listed until it is whole."""


class StoppedError(Exception):
    """Ends a transfer that is no longer needed."""


@dataclass
class Brought:
    """A step whose objects are in the copy."""

    step: Step
    commit: tuple[str, bytes, Manifest] | None = None
    """Key, bytes and content of the version's manifest, which is not in the copy yet."""
    edges: list[Edge] = field(default_factory=list)
    nbytes: int = 0
    failed: list[tuple[Edge | None, WeightcastError]] = field(default_factory=list)
    """What is damaged at the source."""


class Carrier:
    """Carries objects from a channel to its copy, through files in a folder."""

    def __init__(
        self, source: Chain, copy: Chain, record: bytes, scratch: Path, report: Report = silent, *, mark: str = ""
    ):
        """``record`` is the channel's own. ``mark`` begins the names of its files, so that carriers share a folder."""
        self._source, self._copy, self._record = source, copy, record
        self._scratch, self._mark, self._report = scratch, mark, report
        self._pool = ThreadPoolExecutor(_OBJECTS_AT_ONCE, thread_name_prefix="weightcast-object")
        self._there: Mapping[str, int] = {}
        self._done = self._total = 0
        self.stopped = False
        """Ends the transfers that run, at their next part; they can be resumed."""

    def expect(self, there: Mapping[str, int], total: int) -> None:
        """Deltas that an interrupted copy has left, with their sizes, and how many bytes are to come."""
        self._there, self._done, self._total = there, 0, total

    def close(self) -> None:
        self.stopped = True
        self._pool.shutdown(cancel_futures=True)

    def bring(self, step: Step, bad: BadEdges) -> Brought:
        """Bring all that leads to a version but ``bad`` edges; leave out what was collected at the source meanwhile."""
        brought, manifest, edges = Brought(step), None, list(step.edges)
        if step.commits:
            try:
                key, data = self._source.read_manifest(step.version)
                manifest = self._source.parse_manifest(step.version, key, data)
            except MissingError as error:
                self._refuse_missing_bucket(error)
            except FormatError as error:
                brought.failed.append((None, error))
            else:
                brought.commit = key, data, manifest
                own = _committed_edge(manifest)
                edges += [own] if own.key not in {edge.key for edge in edges} else []
        for edge in edges:
            if edge.key in bad:
                continue
            try:
                brought.nbytes += self._bring_edge(edge, manifest)
                brought.edges.append(edge)
            except FormatError as error:
                brought.failed.append((edge, error))
            except MissingError as error:
                self._refuse_missing_bucket(error)
                if self._is_there_still(edge):
                    brought.failed.append((edge, error))
                elif edge.kind == "delta":
                    brought.commit = None
        return brought

    def _is_there_still(self, edge: Edge) -> bool:
        """Whether the source still names an edge of which an object is missing: it was not collected then."""
        try:
            if edge.kind == "delta":
                self._source.read_manifest(edge.result)
            elif edge.base is None:
                read_record(self._source.store, edge.record)
            else:
                return False  # nothing names a squash but its own key
        except MissingError as error:
            self._refuse_missing_bucket(error)
            return False
        return True

    # -- objects -------------------------------------------------------------------------------------------------------

    def _bring_edge(self, edge: Edge, manifest: Manifest | None) -> int:
        """Bring the objects of an edge; returns how many bytes were moved."""
        if edge.base is None:
            return self._bring_anchor(edge, manifest)
        if edge.kind == "squash":
            return self._bring_objects([squash_object(edge)], self._there)
        assert manifest is not None
        return self._bring_objects(manifest.objects, self._there)

    def _bring_anchor(self, edge: Edge, manifest: Manifest | None) -> int:
        """Bring the files of an anchor, then its record."""
        data = read_record(self._source.store, edge.record)
        anchor = self._source.parse_anchor(edge.record, data, manifest)
        store, moved = self._copy.store, len(data)
        for _ in range(_MOST_LOOKS):
            there = {listed.key: listed.size for listed in store.list(edge.key)}
            lacking = [ref for ref in anchor.files if there.get(ref.key) != ref.size]
            if edge.record in there and not lacking:
                return moved
            # Files without a record are orphans, which a collector may have deleted if this took long: look again.
            moved += self._bring_objects(lacking, {})
            store.put(edge.key + CHANNEL_COPY, self._record)
            store.put(edge.record, data)
        hint = "Check that nobody deletes objects there, and that its listings show what was written."
        raise UnreachableError("files of an anchor do not stay in the copy", url=store.url, key=edge.key, hint=hint)

    def _bring_objects(self, refs: Iterable[ObjectRef], there: Mapping[str, int]) -> int:
        return sum(self._pool.map(self._bring_object, [ref for ref in refs if there.get(ref.key) != ref.size]))

    def _bring_object(self, ref: ObjectRef) -> int:
        """Bring an object through a file, checked on the way, so that its size does not matter."""
        path = self._scratch / f"{self._mark}{hashlib.sha256(ref.key.encode()).hexdigest()}"
        at = 0

        def report(stage: str, done: int, total: int) -> None:
            nonlocal at
            if self.stopped:
                raise StoppedError
            self._done, at = self._done + done - at, done
            self._report("copy", min(self._done, self._total), self._total)

        store = self._source.store
        fetch(store, ref.key, ref.size, ref.sha256, path, parts=_PARTS_AT_ONCE, durable=False, report=report)
        try:
            self._copy.store.put(ref.key, path)
        finally:
            path.unlink(missing_ok=True)
        return ref.size

    def _refuse_missing_bucket(self, error: MissingError) -> None:
        """Raise, unless it is an object of the source that is missing."""
        if error.key is None or error.url != self._source.store.url:
            raise error


def _committed_edge(manifest: Manifest) -> Edge:
    """The delta that a manifest commits, or the anchor."""
    if manifest.base is not None:
        return edge_of(manifest)
    position = manifest.position
    return Edge("anchor", None, position.version, 0, parent(manifest.key), position.digest[:16])
