"""What listings say of a channel: sizes, squashes and anchors, and of old versions all that a page shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge
from weightcast.channel.keys import DELTAS
from weightcast.channel.records import Manifest
from weightcast.upkeep.findings import check_anchor, check_manifest
from weightcast.view.journal import Journal

_GROUPS = 256
"""Groups of old versions; of a channel that grows while it is watched up to twice as many."""
_EDGES = 400
"""The newest squashes, and anchors, that are shown."""
_CHECKED_ANCHORS = 4
_MOST_FINDINGS = 8
"""Of one anchor."""


class Listings:
    """What was listed of a channel, and what is wrong by it."""

    def __init__(self, chain: Chain, journal: Journal):
        self._chain, self._journal = chain, journal
        self._groups: dict[int, list[int]] | None = None
        self._width = 1
        self._wrong_sizes: dict[str, str] = {}
        self._anchors: dict[str, dict[str, str]] = {}
        self._seen: dict[str, set[str]] = {}

    @property
    def lacks_older(self) -> bool:
        """Whether `look_at_older` has something to do."""
        return self._groups is None or len(self._groups) > 2 * _GROUPS

    def findings(self) -> Iterator[tuple[str, str]]:
        """What is wrong, by key."""
        yield from self._wrong_sizes.items()
        for anchor in self._anchors.values():
            yield from anchor.items()

    def look(self, oldest: int, manifests: Mapping[int, Manifest | None]) -> None:
        """List what belongs to versions from ``oldest`` on, and compare it with what these manifests say."""
        sizes = {one.key: one.size for _, objects in self._chain.deltas(f"{DELTAS}{oldest:012d}") for one in objects}
        # Listed after the objects: what is collected meanwhile loses its manifest first.
        committed = set(self._chain.versions(oldest - 1))
        self._wrong_sizes = {
            finding.key: finding.problem
            for version, manifest in manifests.items()
            if manifest is not None and manifest.base is not None and version in committed
            for finding in check_manifest(manifest, sizes)
        }
        squashes = [edge for edge in self._chain.squash_edges(0) if self._chain.accepts(edge)]
        shown = sorted(squashes, key=lambda edge: edge.result)[-_EDGES:]
        self._tell_of_new("squash", shown)
        self._journal.put("squashes", [[edge.base, edge.result, edge.nbytes] for edge in shown])
        self._look_at_anchors(manifests)

    def _look_at_anchors(self, manifests: Mapping[int, Manifest | None]) -> None:
        folders = self._chain.anchor_folders()
        complete = [(edge, files) for edge, files in folders if any(one.key == edge.record for one in files)]
        complete = sorted(complete, key=lambda one: one[0].result)[-_EDGES:]
        for edge, files in complete[-_CHECKED_ANCHORS:]:
            if edge.key not in self._anchors or self._anchors[edge.key]:  # one that was damaged may be repaired
                sizes = {one.key: one.size for one in files}
                found = check_anchor(self._chain, edge, sizes, manifests.get(edge.result))
                self._anchors[edge.key] = {one.key: one.problem for one in islice(found, _MOST_FINDINGS)}
        self._tell_of_new("anchor", [edge for edge, _ in complete])
        anchors = [[edge.result, edge.nbytes, edge.kind == "reference"] for edge, _ in complete]
        self._journal.put("anchors", anchors)

    def _tell_of_new(self, kind: str, edges: list[Edge]) -> None:
        before = self._seen.get(kind)
        for edge in edges:
            if before is not None and edge.key not in before:
                which = f" of versions {edge.base} to {edge.result}" if edge.base is not None else f" at {edge.result}"
                self._journal.tell("", f"a new {kind}{which}")
        self._seen[kind] = {edge.key for edge in edges}

    # -- versions that are not shown one by one ------------------------------------------------------------------------

    def look_at_older(self, oldest: int) -> None:
        """List the versions before ``oldest`` in groups, if that was not done yet."""
        if not self.lacks_older:
            return
        self._width, self._groups = max(1, -(-oldest // _GROUPS)), {}
        for edge in self._chain.delta_edges(0, oldest - 1) if oldest else ():
            self._add(self._groups, edge.result, edge.nbytes)
        self._write_groups()

    def add_older(self, version: int, nbytes: int | None) -> None:
        """Count a version that is no longer shown by itself; ``nbytes`` is None for one that is no delta."""
        if self._groups is not None and nbytes is not None:
            self._add(self._groups, version, nbytes)
            self._write_groups()

    def _add(self, groups: dict[int, list[int]], version: int, nbytes: int) -> None:
        """A group has its first and last version, how many they are, their bytes in all, the least and the most."""
        group = groups.setdefault(version // self._width, [version, version, 0, 0, nbytes, nbytes])
        group[0], group[1] = min(group[0], version), max(group[1], version)
        group[2], group[3] = group[2] + 1, group[3] + nbytes
        group[4], group[5] = min(group[4], nbytes), max(group[5], nbytes)

    def _write_groups(self) -> None:
        self._journal.put("groups", [list(group) for _, group in sorted((self._groups or {}).items())])
