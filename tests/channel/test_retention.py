"""What may be deleted: whatever is kept must still lead everywhere it has to."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from weightcast.channel.edge import Edge
from weightcast.channel.keys import ANCHORS, DELTAS, SQUASHES
from weightcast.channel.retention import Inventory, Kept, Retention, collectable, horizon
from weightcast.channel.route import cheapest_route, reachable, squashes_due

DAY = 86400.0
POLICY = Retention(window=7 * DAY, grace=DAY, patience=28 * DAY)


def channel(
    head: int,
    anchors: tuple[int, ...] = (0,),
    every: float = DAY,
    levels: tuple[int, ...] = (8, 64),
    references: tuple[int, ...] = (),
) -> Inventory:
    """A version every so often, with all its squashes; the head is of now."""

    def age(version: int) -> float:
        return (head - version) * every

    edges = [Edge("delta", v - 1, v, 10, f"{DELTAS}{v}") for v in range(1, head + 1)]
    edges += [Edge("squash", a, b, 20, f"{SQUASHES}{a}-{b}") for a, b in squashes_due(0, head, set(), levels)]
    edges += [Edge("anchor", None, v, 1000, f"{ANCHORS}{v}/") for v in anchors]
    edges += [Edge("reference", None, v, 1000, f"{ANCHORS}{v}/") for v in references]
    kept = tuple(Kept(edge, age(edge.result)) for edge in edges)
    return Inventory(head, {v: age(v) for v in range(head + 1)}, kept, (), frozenset(), ())


def left(inventory: Inventory, policy: Retention = POLICY) -> list[Edge]:
    gone = set(collectable(inventory, policy).edges)
    return [kept.edge for kept in inventory.edges if kept.edge not in gone]


def test_young_channel_loses_nothing() -> None:
    garbage = collectable(channel(100, every=60.0), POLICY)
    assert (garbage.manifests, garbage.edges, garbage.orphans) == ((), (), ())


def test_replicas_within_the_window_can_continue_and_new_ones_can_start() -> None:
    inventory = channel(40, anchors=(0, 30))
    edges = left(inventory)
    for version in range(33, 41):
        assert cheapest_route([edge for edge in edges if edge.base is not None], version, 40) is not None
        assert version in reachable(edges)


def test_objects_before_the_anchor_in_use_are_deleted() -> None:
    inventory = channel(40, anchors=(0, 30))
    garbage = collectable(inventory, POLICY)
    assert f"{ANCHORS}0/" in {edge.key for edge in garbage.edges}
    assert f"{DELTAS}5" in {edge.key for edge in garbage.edges}
    assert 5 in garbage.manifests


def test_old_anchor_and_a_route_from_it_stay_without_a_newer_one() -> None:
    edges = left(channel(100))
    assert {edge.key for edge in edges if edge.base is None} == {f"{ANCHORS}0/"}
    assert 100 in reachable(edges)
    assert len(edges) < 40, "deltas that squashes replace were kept"


def test_newest_anchor_stays_even_if_unused() -> None:
    edges = left(channel(40, anchors=(0, 39)))
    assert f"{ANCHORS}39/" in {edge.key for edge in edges}


def test_reference_does_not_replace_an_anchor() -> None:
    """Not every replica can download the reference: what it could reach without it must stay reachable."""
    inventory = replace(channel(40, anchors=(6, 30), references=(0,)), pins=frozenset({8}))
    edges = [edge for edge in left(inventory) if edge.key != f"{ANCHORS}0/"]
    assert {8, 40} <= reachable(edges)
    assert f"{ANCHORS}6/" in {edge.key for edge in edges}


def test_channel_with_a_reference_shrinks_to_its_newest_anchor() -> None:
    here, elsewhere = (
        collectable(inventory, POLICY)
        for inventory in (channel(40, anchors=(0, 30)), channel(40, anchors=(30,), references=(0,)))
    )
    assert {edge.key for edge in elsewhere.edges} == {edge.key for edge in here.edges}
    assert f"{ANCHORS}0/" in {edge.key for edge in elsewhere.edges}
    assert replace(elsewhere, edges=()) == replace(here, edges=())


def test_reference_and_a_route_from_it_stay_without_an_anchor() -> None:
    edges = left(channel(100, anchors=(), references=(0,)))
    assert {edge.key for edge in edges if edge.base is None} == {f"{ANCHORS}0/"}
    assert 100 in reachable(edges)


def test_pin_keeps_its_version_reachable() -> None:
    inventory = replace(channel(40, anchors=(0, 30)), pins=frozenset({5}))
    assert 5 in reachable(left(inventory))
    assert 5 not in collectable(inventory, POLICY).manifests


def test_live_replica_keeps_its_version_for_a_limited_time() -> None:
    inventory = channel(40, anchors=(0, 30))
    assert horizon(replace(inventory, replicas=((20, 60.0),)), POLICY) == 20
    assert horizon(replace(inventory, replicas=((5, 60.0),)), POLICY) == 34, "it lags 35 days behind"
    assert horizon(replace(inventory, replicas=((20, 8 * DAY),)), POLICY) == 34, "it has been silent for a week"


def test_nothing_within_the_grace_period_is_deleted() -> None:
    inventory = channel(40, anchors=(0, 40), every=1.0)
    garbage = collectable(inventory, Retention(window=0, grace=DAY, patience=0))
    assert (garbage.manifests, garbage.edges) == ((), ())


def test_old_orphans_are_deleted() -> None:
    inventory = replace(channel(3), orphans=(("deltas/old", 2 * DAY), ("deltas/in-flight", 60.0)))
    assert collectable(inventory, POLICY).orphans == ("deltas/old",)


def test_damaged_channel_is_left_unchanged() -> None:
    inventory = channel(40)
    broken = replace(inventory, edges=tuple(kept for kept in inventory.edges if kept.edge.base is not None))
    garbage = collectable(broken, POLICY)
    assert (garbage.manifests, garbage.edges) == ((), ())


@st.composite
def inventories(draw: st.DrawFn) -> tuple[Inventory, Retention]:
    head = draw(st.integers(1, 80))
    anchors = tuple(sorted({0, *draw(st.lists(st.integers(0, head), max_size=3))}))
    inventory = channel(
        head, anchors, draw(st.sampled_from([60.0, 3600.0, DAY])), draw(st.sampled_from([(8,), (8, 64)]))
    )
    some = st.integers(0, head)
    replicas = draw(st.lists(st.tuples(some, st.sampled_from([60.0, 9 * DAY])), max_size=3))
    times = st.sampled_from([0.0, 3600.0, DAY, 7 * DAY])
    policy = Retention(draw(times), draw(times), draw(st.sampled_from([DAY, 28 * DAY])))
    return replace(inventory, pins=frozenset(draw(st.lists(some, max_size=2))), replicas=tuple(replicas)), policy


@given(inventories())
def test_head_window_and_pins_stay_reachable_after_any_collection(case: tuple[Inventory, Retention]) -> None:
    inventory, policy = case
    edges = left(inventory, policy)
    there = reachable(edges)
    oldest = horizon(inventory, policy)
    assert {inventory.head, oldest} | inventory.pins <= there
    onward = [edge for edge in edges if edge.base is not None]
    assert all(cheapest_route(onward, v, inventory.head) is not None for v in range(oldest, inventory.head + 1))


@given(inventories())
def test_delta_on_a_needed_route_keeps_its_manifest(case: tuple[Inventory, Retention]) -> None:
    inventory, policy = case
    garbage = collectable(inventory, policy)
    edges = left(inventory, policy)
    for goal in {inventory.head, horizon(inventory, policy)} | inventory.pins:
        for edge in cheapest_route(edges, None, goal) or ():
            if edge.kind == "delta":
                assert edge.result not in garbage.manifests


@given(inventories())
def test_collecting_again_at_once_finds_nothing_more(case: tuple[Inventory, Retention]) -> None:
    inventory, policy = case
    garbage = collectable(inventory, policy)
    rest = replace(
        inventory,
        manifests={v: age for v, age in inventory.manifests.items() if v not in garbage.manifests},
        edges=tuple(kept for kept in inventory.edges if kept.edge not in garbage.edges),
    )
    again = collectable(rest, policy)
    assert (again.manifests, again.edges) == ((), ())
