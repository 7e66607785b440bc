"""What a copy lacks, and in which order it is brought there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightcast.channel.edge import Edge
from weightcast.channel.route import reachable
from weightcast.upkeep.copy_plan import Contents, Step, apart, missing


def squash(base: int, result: int) -> Edge:
    return Edge("squash", base, result, 10, f"squash {base} {result}")


def delta(version: int) -> Edge:
    return Edge("delta", version - 1, version, 1, f"delta {version}")


def anchor(version: int) -> Edge:
    return Edge("anchor", None, version, 100, f"anchor {version}")


versions = st.integers(0, 12)
edges = st.lists(
    st.builds(anchor, versions)
    | st.tuples(versions, versions).filter(lambda ends: ends[0] < ends[1]).map(lambda ends: squash(*ends)),
    max_size=8,
    unique=True,
)
contents = st.builds(Contents, st.frozensets(versions, max_size=8), edges.map(tuple))


def after(copy: Contents, steps: tuple[Step, ...]) -> Contents:
    """The copy once these steps were taken."""
    committed = {step.version for step in steps if step.commits}
    brought = tuple(edge for step in steps for edge in step.edges)
    return Contents(copy.versions | committed, copy.edges + brought)


@given(contents, st.integers(0, 20))
def test_version_is_committed_after_all_that_leads_to_it(source: Contents, count: int) -> None:
    steps = missing(source, Contents())
    copy = after(Contents(), steps[:count])
    assert {edge for edge in source.edges if edge.result <= copy.head} <= set(copy.edges)
    assert copy.versions == {version for version in source.versions if version <= copy.head}


@given(contents, st.integers(0, 20))
def test_interrupted_copy_is_completed_by_the_next_one(source: Contents, count: int) -> None:
    copy = after(Contents(), missing(source, Contents())[:count])
    copy = after(copy, missing(source, copy))
    assert copy.versions == source.versions
    assert {edge for edge in source.edges if edge.result > max(source.versions, default=-1)} <= set(copy.edges)
    assert missing(source, copy) == ()


@given(contents, contents)
def test_only_versions_beyond_the_head_are_added(source: Contents, copy: Contents) -> None:
    for step in missing(source, copy):
        assert not step.commits or step.version > copy.head
        assert not set(step.edges) & set(copy.edges)


def test_squash_cut_later_is_brought_and_what_the_copy_collected_is_not() -> None:
    source = Contents(frozenset(range(10)), (anchor(0), squash(0, 4), squash(4, 8)))
    copy = Contents(frozenset(range(4, 10)), (anchor(4),))
    assert missing(source, copy) == (Step(8, (squash(4, 8),), commits=False),)


def delta_steps(steps: tuple[Step, ...], missing_deltas: frozenset[int] = frozenset()) -> list[Edge]:
    return [delta(step.version) for step in steps if step.commits and step.version not in missing_deltas]


@given(contents, contents, st.frozensets(versions))
def test_anchors_that_are_set_apart_are_no_versions_only_way(
    source: Contents, copy: Contents, lost: frozenset[int]
) -> None:
    """Whatever deltas there are: the same versions can be read as if all had been brought together."""
    steps, held = missing(source, copy), reachable((*copy.edges, *map(delta, copy.versions)))
    deltas = delta_steps(steps, lost)
    first, later = apart(steps, deltas, held & copy.versions)
    assert [step.version for step in first if step.commits] == [step.version for step in steps if step.commits]
    assert {(step.version, edge) for step in (*first, *later) for edge in step.edges} == {
        (step.version, edge) for step in steps for edge in step.edges
    }
    assert not any(step.commits for step in later)
    assert all(edge.base is None for step in later for edge in step.edges)
    before = [*copy.edges, *map(delta, copy.versions), *deltas]
    brought = reachable([*before, *(edge for step in first for edge in step.edges)])
    assert brought == reachable([*before, *(edge for step in steps for edge in step.edges)])


def test_anchor_waits_for_no_version_and_no_version_for_it() -> None:
    source = Contents(frozenset(range(8)), (anchor(0), squash(0, 4), anchor(4), anchor(6)))
    steps = missing(source, Contents())
    first, later = apart(steps, [delta(version) for version in range(1, 8) if version != 6], ())
    assert [step.version for step in first] == list(range(8))
    assert [step.edges for step in first if step.edges] == [(anchor(0),), (squash(0, 4),), (anchor(6),)]
    assert later == (Step(4, (anchor(4),), commits=False),)
