"""Which way to go, which ways to make, where a policy wants to go: pure functions against plain re-tellings of them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.channel.edge import Edge, EdgeKind
from weightcast.channel.policy import AtLeast, Every, Newest, Pinned
from weightcast.channel.route import cheapest_route, reachable, route_bytes, squashes_due
from weightcast.errors import UsageError


@st.composite
def graphs(draw: st.DrawFn) -> list[Edge]:
    """Any mixture of anchors, deltas and squashes, several for the same versions too."""
    edges = []
    for i in range(draw(st.integers(0, 30))):
        result = draw(st.integers(0, 12))
        base = draw(st.one_of(st.none(), st.integers(0, result - 1))) if result else None
        kind: EdgeKind = "anchor" if base is None else "squash"
        edges.append(Edge(kind, base, result, draw(st.integers(0, 50)), f"object-{i}"))
    return edges


def cheapest_cost(edges: list[Edge], start: int | None, goal: int) -> tuple[int, int] | None:
    """The same by trying everything."""

    @cache
    def cost(at: int) -> tuple[int, int] | None:
        if at == start:
            return 0, 0
        ways = []
        for edge in (edge for edge in edges if edge.result == at):
            before = (0, 0) if edge.base is None else cost(edge.base)
            if before is not None:
                ways.append((before[0] + edge.nbytes, before[1] + 1))
        return min(ways, default=None)

    return cost(goal)


@given(graphs(), st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 12))
def test_no_route_is_cheaper(edges: list[Edge], start: int | None, goal: int) -> None:
    route = cheapest_route(edges, start, goal)
    expected = cheapest_cost(edges, start, goal)
    if route is None:
        assert expected is None
    else:
        assert (route_bytes(route), len(route)) == expected


@given(graphs(), st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 12))
def test_route_begins_at_the_start_or_an_anchor_and_leads_to_the_goal(
    edges: list[Edge], start: int | None, goal: int
) -> None:
    route = cheapest_route(edges, start, goal)
    if route:
        assert route[0].base in (start, None)
        assert route[-1].result == goal
        assert all(before.result == after.base for before, after in pairwise(route))


@given(graphs())
def test_reachable_versions_are_those_with_a_route(edges: list[Edge]) -> None:
    found = reachable(edges)
    assert found == {goal for goal in range(13) if cheapest_route(edges, None, goal)}


def test_route_to_the_current_version_is_empty() -> None:
    assert cheapest_route([], 5, 5) == ()


def test_route_of_fewest_objects_wins_among_equal_bytes() -> None:
    edges = [Edge("delta", 0, 1, 5, "a"), Edge("delta", 1, 2, 5, "b"), Edge("squash", 0, 2, 10, "both")]
    route = cheapest_route(edges, 0, 2)
    assert route is not None
    assert [edge.key for edge in route] == ["both"]


def test_anchor_is_taken_where_it_is_cheaper_than_deltas() -> None:
    edges = [Edge("delta", 0, 1, 100, "delta"), Edge("anchor", None, 1, 99, "anchor")]
    route = cheapest_route(edges, 0, 1)
    assert route is not None
    assert [edge.key for edge in route] == ["anchor"]


def test_hundred_thousand_versions_are_planned_in_a_moment() -> None:
    edges = [Edge("anchor", None, 0, 10**9, "anchor"), *(Edge("delta", v, v + 1, 10, f"{v}") for v in range(100_000))]
    route = cheapest_route(edges, None, 100_000)
    assert route is not None
    assert len(route) == 100_001


def test_squashes_are_cut_at_multiples_once_all_their_versions_are_there() -> None:
    assert list(squashes_due(0, 7, set(), (8, 64))) == []
    assert list(squashes_due(0, 8, set(), (8, 64))) == [(0, 8)]
    assert list(squashes_due(0, 17, {(0, 8)}, (8, 64))) == [(8, 16)]
    assert list(squashes_due(3, 24, set(), (8,))) == [(8, 16), (16, 24)]


def test_wide_squash_comes_after_the_narrow_ones_it_is_made_from() -> None:
    due = list(squashes_due(0, 64, set(), (8, 64)))
    assert due[-1] == (0, 64)
    assert due[:-1] == [(v, v + 8) for v in range(0, 64, 8)]


@given(st.integers(1, 3000))
def test_with_all_squashes_any_head_is_few_objects_away(head: int) -> None:
    levels = (8, 64, 512)
    edges = [Edge("delta", v, v + 1, 1, f"{v}") for v in range(head)]
    edges += [Edge("squash", a, b, 0, f"{a}-{b}") for a, b in squashes_due(0, head, set(), levels)]
    route = cheapest_route(edges, 0, head)
    assert route is not None
    assert len(route) <= head // 512 + 7 + 7 + 7


@pytest.mark.parametrize(
    ("policy", "at", "head", "goal"),
    [
        (Newest(), None, 5, 5),
        (Newest(), 3, 5, 5),
        (Newest(), 5, 5, None),
        (Newest(), 6, 5, None),
        (Every(), None, 5, 5),
        (Every(), 3, 5, 4),
        (Every(), 5, 5, None),
        (Pinned(3), None, 5, 3),
        (Pinned(3), 5, 5, 3),
        (Pinned(3), 3, 5, None),
        (AtLeast(4), None, 5, 5),
        (AtLeast(4), 4, 5, None),
        (AtLeast(4), 3, 5, 5),
        (AtLeast(6), 3, 5, None),
    ],
)
def test_policies_choose_these_versions(
    policy: Newest | Every | Pinned | AtLeast, at: int | None, head: int, goal: int
) -> None:
    assert policy.goal(at, head) == goal


def test_future_version_cannot_be_pinned() -> None:
    with pytest.raises(UsageError, match="no version 9 yet: the newest is 5"):
        Pinned(9).goal(3, 5)
