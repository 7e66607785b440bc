"""A collector keeps the cheapest route to every version that stays, and finds them all in one pass over the edges."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.channel.edge import Edge, EdgeKind
from weightcast.channel.keys import ANCHORS, DELTAS, SQUASHES
from weightcast.channel.retention import Inventory, Kept, Retention, collectable, horizon, kept_by_rule
from weightcast.channel.route import cheapest_route, reachable


def needed_route_by_route(inventory: Inventory, policy: Retention) -> tuple[set[str], set[int], dict[int, int]]:
    """Keys and versions to keep, and the first goal that needs a version: a route is computed for each goal."""
    oldest = horizon(inventory, policy)
    edges = [kept.edge for kept in inventory.edges]
    held = [edge for edge in edges if edge.kind != "reference"]
    anchors = [edge for edge in held if edge.base is None] or [edge for edge in edges if edge.base is None]
    newest_anchor = max((edge.result for edge in anchors), default=0)
    needed = {edge.key for edge in edges if edge.base is not None and edge.base >= oldest}
    needed |= {edge.key for edge in anchors if edge.result == newest_anchor}
    versions = {version for version in inventory.manifests if version >= oldest} | {newest_anchor}
    wanted = {inventory.head} | kept_by_rule(inventory, policy).keys()
    there = set[int]()
    goals: dict[int, int] = {}
    for goal in (oldest, *sorted(wanted), *sorted(versions)):
        if goal in there and goal not in wanted:
            continue
        route = cheapest_route(held, None, goal) or cheapest_route(edges, None, goal) or ()
        needed |= {edge.key for edge in route}
        versions |= {goal} | {edge.result for edge in route}
        for edge in route:
            goals.setdefault(edge.result, goal)
        there = reachable(edge for edge in edges if edge.key in needed)
    return needed, versions, goals


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """A channel with squashes, anchors and references anywhere, routes of equal cost, and gaps."""
    head = draw(st.integers(0, 24))
    version = st.integers(0, head)
    sizes = st.integers(1, 4)
    edges = [Edge("delta", v - 1, v, draw(sizes), f"{DELTAS}{v}") for v in range(1, head + 1)]
    for base, result in sorted({tuple(sorted(pair)) for pair in draw(st.lists(st.tuples(version, version)))}):
        if base < result:
            edges.append(Edge("squash", base, result, draw(sizes), f"{SQUASHES}{base}-{result}"))
    kinds: list[EdgeKind] = ["anchor", "reference"]
    for result in sorted(draw(st.sets(version, max_size=4)) | {0}):
        edges.append(Edge(draw(st.sampled_from(kinds)), None, result, 3, f"{ANCHORS}{result}/"))
    lost = draw(st.sets(st.sampled_from(range(len(edges))), max_size=2))
    pins = draw(st.frozensets(version, max_size=3))
    replicas = tuple((at, 0.0) for at in draw(st.sets(version, max_size=2)))
    kept = tuple(Kept(edge, float(head - edge.result)) for i, edge in enumerate(edges) if i not in lost)
    ages = {v: float(head - v) for v in range(head + 1)}
    tags = dict.fromkeys(draw(st.sets(version, max_size=2)), ("tag",))
    return Inventory(head, ages, kept, (), pins, replicas, tags=tags)


@settings(max_examples=400)
@given(inventories(), st.integers(0, 12), st.integers(0, 25), st.integers(0, 3))
def test_what_goes_is_the_same_as_with_one_route_per_version(
    inventory: Inventory, window: int, keep_last: int, grace: int
) -> None:
    policy = Retention(float(window), float(grace), float(window), keep_last)
    garbage = collectable(inventory, policy)
    if garbage.unreachable:
        edges = [kept.edge for kept in inventory.edges]
        assert not set(garbage.unreachable) & reachable(edges)
        assert (garbage.manifests, garbage.edges) == ((), ())
        return
    needed, versions, goals = needed_route_by_route(inventory, policy)
    ages = inventory.manifests
    gone = [v for v in sorted(ages) if v not in versions and ages[v] >= grace and v < inventory.head]
    assert list(garbage.manifests) == gone
    assert garbage.kept.keys() == ages.keys() - set(gone)
    for version, reasons in garbage.kept.items():
        for reason in reasons:
            if reason.startswith("on the route"):
                assert reason == f"on the route to version {goals[version]}"
    began_with_anchor = ages.keys() - {kept.edge.result for kept in inventory.edges if kept.edge.kind == "delta"}
    for kept in inventory.edges:
        edge = kept.edge
        object_of = edge.kind == "delta" or (edge.base is None and edge.result in began_with_anchor)
        goes = edge.key not in needed and kept.age >= grace and edge.result < inventory.head
        assert (edge in garbage.edges) == (goes and not (edge.result in garbage.kept and object_of))


class Counted(int):
    """A number of bytes that counts how often it is added to the cost of a route."""

    additions = 0

    def __radd__(self, other: int) -> int:
        Counted.additions += 1
        return other + int(self)


@pytest.mark.parametrize("rule", ["keep_last", "pins"])
def test_work_for_many_kept_versions_grows_with_the_edges_alone(rule: str) -> None:
    head, numbers = 500, random.Random(7)
    edges = [Edge("anchor", None, 0, Counted(1000), f"{ANCHORS}0/")]
    edges += [Edge("delta", v - 1, v, Counted(numbers.randrange(5, 15)), f"{DELTAS}{v}") for v in range(1, head + 1)]
    edges += [Edge("squash", v - 8, v, Counted(30), f"{SQUASHES}{v}") for v in range(8, head + 1, 8)]
    kept = tuple(Kept(edge, float(head - edge.result)) for edge in edges)
    pins = frozenset(range(0, head, 2) if rule == "pins" else ())
    inventory = Inventory(head, {v: float(head - v) for v in range(head + 1)}, kept, (), pins, ())
    Counted.additions = 0
    collectable(inventory, Retention(0.0, 0.0, 0.0, keep_last=head if rule == "keep_last" else 0))
    assert Counted.additions <= 4 * len(edges)
