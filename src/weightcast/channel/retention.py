"""What is no longer needed: a pure function of what a bucket holds, and how old that is by the store's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from weightcast.channel.edge import Edge
from weightcast.channel.route import Reached, cheapest_edges


@dataclass(frozen=True)
class Retention:
    """How long things are kept, in seconds by the store's clock."""

    window: float = 7 * 86400.0
    """Replicas can reach versions younger than this, and continue from them."""
    grace: float = 86400.0
    """Nothing younger than this is deleted: a running upload looks like an orphan, a download needs its object."""
    patience: float = 28 * 86400.0
    """Nothing is kept for a replica whose version is older than this."""
    keep_last: int = 0
    """This many of the newest versions stay reachable."""
    keep_daily: int = 0
    """The newest version of each of this many last days that have one stays reachable; days are UTC."""
    keep_weekly: int = 0
    """The same for weeks, which begin on Monday."""


@dataclass(frozen=True)
class Kept:
    """An edge that the bucket holds, and how long it has been there."""

    edge: Edge
    age: float


@dataclass(frozen=True)
class Inventory:
    """What a bucket holds, by listings; ages by the store's clock."""

    head: int
    manifests: dict[int, float]
    """Version to age."""
    edges: tuple[Kept, ...]
    orphans: tuple[tuple[str, float], ...]
    """Keys of objects that no commit names, with their ages."""
    pins: frozenset[int]
    replicas: tuple[tuple[int, float], ...]
    """Version of each replica, and how long ago it reported it."""
    spent: tuple[Kept, ...] = ()
    """Deltas whose manifest is deleted: no edges any more, though a reader of that manifest may still fetch them."""
    tags: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Tagged versions and their names."""
    now: float = 0.0
    """The store's time, which ages are measured from: the calendar of `Retention.keep_daily` needs it."""


@dataclass(frozen=True)
class Garbage:
    """What may be deleted: manifests and orphans now, the objects of manifests a grace period later."""

    manifests: tuple[int, ...]
    edges: tuple[Edge, ...]
    orphans: tuple[str, ...]
    unreachable: tuple[int, ...] = ()
    """Versions that must be reachable and are not: the channel is damaged, and only orphans may be deleted."""
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Every version that stays, with the reasons."""


def horizon(inventory: Inventory, policy: Retention) -> int:
    """The oldest version that replicas must be able to continue from."""
    young = [version for version, age in inventory.manifests.items() if age < policy.window]
    waited_for = [
        version
        for version, silence in inventory.replicas
        if silence < policy.window and inventory.manifests.get(version, policy.patience) < policy.patience
    ]
    return min([inventory.head, *young, *waited_for])


def kept_by_rule(inventory: Inventory, policy: Retention) -> dict[int, tuple[str, ...]]:
    """Versions that must stay reachable whatever their age, with the reasons: pins, tags, and the rules of ``policy``.

    The rules are those of `restic forget`: each picks versions on its own, newest first, and what any of them picks is
    kept. The day of a version is that on which the store received its manifest.
    """
    why: dict[int, tuple[str, ...]] = {}

    def keep(version: int, reason: str) -> None:
        why[version] = (*why.get(version, ()), reason)

    for version in inventory.pins:
        keep(version, "pinned")
    for version, names in inventory.tags.items():
        keep(version, f"tag {', '.join(names)}")
    newest_first = sorted(inventory.manifests, reverse=True)
    for version in newest_first[: policy.keep_last]:
        keep(version, f"last {policy.keep_last}")
    for most, period in ((policy.keep_daily, _day), (policy.keep_weekly, _week)):
        found: dict[str, int] = {}
        for version in newest_first:
            if len(found) >= most:
                break
            found.setdefault(period(inventory.now - inventory.manifests[version]), version)
        for name, version in found.items():
            keep(version, name)
    return why


def _day(when: float) -> str:
    return f"daily {datetime.fromtimestamp(when, UTC):%Y-%m-%d}"


def _week(when: float) -> str:
    return f"weekly {datetime.fromtimestamp(when, UTC):%G-W%V}"


def collectable(inventory: Inventory, policy: Retention) -> Garbage:
    """What may be deleted while every version to keep stays reachable: those from the horizon on,
    and those that a pin, a tag or a rule keeps (`kept_by_rule`).
    """
    rules = kept_by_rule(inventory, policy)
    oldest = horizon(inventory, policy)
    edges = [kept.edge for kept in inventory.edges]
    starts = [edge for edge in edges if edge.base is None]
    anchors = [edge for edge in starts if edge.kind == "anchor"] or starts
    newest_anchor = max((edge.result for edge in anchors), default=0)
    versions = {version for version in inventory.manifests if version >= oldest} | {newest_anchor}
    wanted = {oldest, inventory.head} | rules.keys()
    last = cheapest_edges(map(_priced, edges))
    unreachable = (wanted | versions) - last.keys()
    if unreachable:
        # Something is missing already: a repair may need everything that is left.
        everything = dict.fromkeys(inventory.manifests, ("the channel is damaged",))
        return Garbage((), (), _old(inventory, policy), tuple(sorted(unreachable)), everything)
    needed = [edge for edge in edges if edge.base is not None and edge.base >= oldest]
    needed += [edge for edge in anchors if edge.result == newest_anchor]
    reached = Reached()
    reached.add(needed)
    on_route: dict[int, int] = {}
    for goal in (oldest, *sorted(wanted), *sorted(versions)):
        if goal in wanted or goal not in reached.versions:
            route = _new_edges(last, goal, on_route)
            reached.add(route)
            needed += route
    versions |= on_route.keys()
    keys = {edge.key for edge in needed}
    manifests = tuple(
        version
        for version, age in sorted(inventory.manifests.items())
        if version not in versions and age >= policy.grace and version < inventory.head
    )
    # A manifest may be deleted before its object, never an object before its manifest.
    stays = inventory.manifests.keys() - set(manifests)
    begun = {edge.result for edge in edges} - {edge.result for edge in edges if edge.kind == "delta"}
    gone = tuple(
        kept.edge
        for kept in (*inventory.edges, *inventory.spent)
        if kept.edge.key not in keys
        and kept.age >= policy.grace
        and kept.edge.result < inventory.head
        and not (kept.edge.result in stays and _is_object_of_version(kept.edge, begun))
    )
    kept = {
        version: rules.get(version, ()) or _reason(inventory, policy, version, oldest, newest_anchor, on_route)
        for version in sorted(stays)
    }
    return Garbage(manifests, gone, _old(inventory, policy), kept=kept)


def _priced(edge: Edge) -> Edge:
    """A reference costs more than any route in the bucket: not everyone can begin at a checkpoint elsewhere."""
    return replace(edge, nbytes=edge.nbytes + (1 << 80)) if edge.kind == "reference" else edge


def _new_edges(last: Mapping[int, Edge], goal: int, on_route: dict[int, int]) -> list[Edge]:
    """The edges of the route to ``goal`` back to where an earlier one joins; enters its versions in ``on_route``."""
    route: list[Edge] = []
    at: int | None = goal
    while at is not None and at not in on_route:
        on_route[at] = goal
        route.append(last[at])
        at = last[at].base
    return route


def _reason(
    inventory: Inventory, policy: Retention, version: int, oldest: int, anchor: int, on_route: Mapping[int, int]
) -> tuple[str, ...]:
    """Why a version stays that no rule names."""
    if version == inventory.head:
        return ("newest version",)
    if version >= oldest:
        return ("in the window",) if inventory.manifests[version] < policy.window else ("a replica may be there",)
    if version == anchor:
        return ("newest anchor",)
    if version in on_route:
        return (f"on the route to version {on_route[version]}",)
    return ("in the grace period",)


def _is_object_of_version(edge: Edge, begun: set[int]) -> bool:
    """Whether a manifest may name it: a delta, or an anchor of a version that ``begun`` with one."""
    return edge.kind == "delta" or (edge.base is None and edge.result in begun)


def _old(inventory: Inventory, policy: Retention) -> tuple[str, ...]:
    return tuple(key for key, age in inventory.orphans if age >= policy.grace)
