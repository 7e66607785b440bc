"""What nobody needs any more: a pure function of what a bucket holds and how old that is by the store's clock."""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.keys import DELTAS
from weightcast.plan import Edge, cheapest_route


@dataclass(frozen=True)
class Retention:
    """How long things are kept, in seconds by the store's clock."""

    window: float = 7 * 86400.0
    """Versions younger than this can be reached, and left from, by everyone."""
    grace: float = 86400.0
    """Nothing younger than this is deleted: an upload in flight looks like an orphan, a download needs its object."""
    patience: float = 28 * 86400.0
    """A replica that lags further than this behind no longer holds anything back."""


@dataclass(frozen=True)
class Kept:
    """A way that the bucket holds, and how long it has been there."""

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
    """Keys of objects that no commit speaks of, with their ages."""
    pins: frozenset[int]
    replicas: tuple[tuple[int, float], ...]
    """Version of each replica, and how long ago it said so."""


@dataclass(frozen=True)
class Garbage:
    """What may go: manifests and orphans now, the objects of manifests a grace period later."""

    manifests: tuple[int, ...]
    edges: tuple[Edge, ...]
    orphans: tuple[str, ...]


def horizon(inventory: Inventory, policy: Retention) -> int:
    """The oldest version that everyone must be able to leave from."""
    young = [version for version, age in inventory.manifests.items() if age < policy.window]
    waited_for = [
        version
        for version, silence in inventory.replicas
        if silence < policy.window and inventory.manifests.get(version, policy.patience) < policy.patience
    ]
    return min([inventory.head, *young, *waited_for])


def collectable(inventory: Inventory, policy: Retention) -> Garbage:
    """What may be deleted so that every version from the horizon on, and every pin, can still be reached."""
    oldest = horizon(inventory, policy)
    edges = [kept.edge for kept in inventory.edges]
    needed = {edge.key for edge in edges if edge.base is not None and edge.base >= oldest}
    versions = {version for version in inventory.manifests if version >= oldest}
    for goal in {oldest, inventory.head} | inventory.pins:
        route = cheapest_route(edges, None, goal)
        if route is None:
            # Something is missing already: what is left may be all there is to mend it with.
            return Garbage((), (), _old(inventory, policy))
        needed |= {edge.key for edge in route}
        versions |= {goal} | {edge.result for edge in route}
    newest_anchor = max((edge.result for edge in edges if edge.base is None), default=0)
    needed |= {edge.key for edge in edges if edge.base is None and edge.result == newest_anchor}
    gone = tuple(
        kept.edge
        for kept in inventory.edges
        if kept.edge.key not in needed and kept.age >= policy.grace and kept.edge.result < inventory.head
    )
    doomed = {edge.result for edge in gone}
    manifests = tuple(
        version
        for version, age in sorted(inventory.manifests.items())
        if version not in versions and age >= policy.grace and version < inventory.head
    )
    # A manifest whose delta stays may go, a delta whose manifest stays may not.
    stays = {version for version in doomed if version in inventory.manifests and version not in manifests}
    gone = tuple(edge for edge in gone if edge.result not in stays or not edge.key.startswith(DELTAS))
    return Garbage(manifests, gone, _old(inventory, policy))


def _old(inventory: Inventory, policy: Retention) -> tuple[str, ...]:
    return tuple(key for key, age in inventory.orphans if age >= policy.grace)
