"""A replica may come late: from any of 1,000 versions the head is few requests and the fewest bytes away."""

import sys
from pathlib import Path

import hub
import pytest

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge
from weightcast.channel.route import cheapest_route, route_bytes

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import catchup

HEAD, PARAMS = 1000, 40_000
LAGS = (1, 2, 7, 8, 9, 63, 64, 65, 100, 400, 511, 512, 513, 700, 999, 1000)
FINDING_THE_WAY = 14
"""Requests besides objects and their manifests, however far behind: channel, head, where we stand, what there is."""

URL = "memory://late-join"


class Made:
    """The chain, the weights of some of its versions, and every way there is in it."""

    def __init__(self, states: Path):
        self.states = states
        starts = [HEAD - lag for lag in (*LAGS, *catchup.TARGETS)]
        catchup.generate(wc.open_store(URL), catchup.Training(PARAMS), HEAD, states, starts)
        self.edges = Chain.open(wc.open_store(URL)).edges(None, HEAD)
        self.sizes = catchup.Sizes.of(wc.open_store(URL), HEAD)

    def catch_up(self, lag: int | None) -> catchup.CatchUp:
        return catchup.catch_up(URL, self.states, lag, HEAD, self.sizes)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("late") / "states")


@pytest.fixture(scope="session")
def following() -> catchup.Following:
    return catchup.follow("memory://late-join-follow", PARAMS)


def cheapest_costs(edges: list[Edge], goal: int) -> dict[int | None, tuple[int, int]]:
    """(bytes, objects) to ``goal`` from every version that leads there, by brute force: backwards, version by version.

    Whoever holds a version may begin anew at an anchor.
    """
    costs: dict[int | None, tuple[int, int]] = {goal: (0, 0)}

    def leaving(base: int | None) -> list[tuple[int, int]]:
        found = [(edge.nbytes, costs[edge.result]) for edge in edges if edge.base == base and edge.result in costs]
        return [(nbytes + rest[0], 1 + rest[1]) for nbytes, rest in found]

    for version in range(goal - 1, -1, -1):
        costs[version] = min(leaving(version))
    costs[None] = min(leaving(None))
    return {version: min(cost, costs[None]) for version, cost in costs.items()}


def test_synthetic_weights_change_like_a_recorded_run(made: Made) -> None:
    found = catchup.densities(made.states, HEAD)
    assert {steps: found[steps] for steps in (1, 8, 24)} == pytest.approx({1: 0.011, 8: 0.06, 24: 0.125}, rel=0.15)


def test_first_version_reaches_the_head_in_few_requests(made: Made) -> None:
    c = made.catch_up(HEAD)
    assert c.exact
    assert c.downloads <= catchup.MOST_DOWNLOADS
    assert c.requests <= catchup.MOST_REQUESTS
    assert c.nbytes <= min(c.replay_bytes, c.anchor_bytes)


@pytest.mark.parametrize("lag", [*LAGS, None])
def test_head_is_reached_exactly_by_the_cheapest_route(made: Made, lag: int | None) -> None:
    c = made.catch_up(lag)
    start = None if lag is None else HEAD - lag
    route = cheapest_route(made.edges, start, HEAD)
    assert route is not None
    assert c.exact
    assert c.nbytes == route_bytes(route) == cheapest_costs(made.edges, HEAD)[start][0]
    assert c.nbytes <= min(c.replay_bytes, c.anchor_bytes)
    assert c.requests <= FINDING_THE_WAY + 2 * c.downloads


def test_no_route_from_anywhere_is_cheaper_than_the_planned_one(made: Made) -> None:
    costs = cheapest_costs(made.edges, HEAD)
    for start in (None, *range(HEAD + 1)):
        route = cheapest_route(made.edges, start, HEAD)
        assert route is not None
        assert (route_bytes(route), len(route)) == costs[start], start


def test_listing_is_counted_by_pages(made: Made) -> None:
    store, record = catchup.counted(URL)
    assert len(list(store.list("manifests/"))) == HEAD + 1
    assert record.requests == [("list", "manifests/")] * 2


def test_idle_poll_is_one_request(following: catchup.Following) -> None:
    assert following.idle_requests == 1
    assert following.idle_mean < 1.2


def test_new_version_costs_a_follower_three_requests(following: catchup.Following) -> None:
    assert following.version_requests == ("get manifests", "get manifests", "get deltas")


def test_delta_is_three_writes(following: catchup.Following) -> None:
    assert following.delta_writes == ("put deltas", "create manifests", "put head.json")


def test_late_replica_needs_as_few_requests_on_the_hub(tmp_path: Path) -> None:
    """Where listings know prefixes only, and commits go by them: as few requests, and an idle poll is one."""
    head = 20
    with hub.found(tmp_path / "hub") as hugging_face:
        url = hugging_face.make_bucket("late-join")
        catchup.generate(wc.open_store(url), catchup.Training(PARAMS), head, tmp_path / "states", (19, 12, 3))
        sizes = catchup.Sizes.of(wc.open_store(url), head)
        for lag in (1, 8, 17, 20, None):
            c = catchup.catch_up(url, tmp_path / "states", lag, head, sizes)
            assert c.exact
            assert c.nbytes <= min(c.replay_bytes, c.anchor_bytes)
            assert c.requests <= FINDING_THE_WAY + 3 * c.downloads
        following = catchup.follow(hugging_face.make_bucket("follow"), PARAMS, polls=10)
    assert following.idle_requests == 1
    assert following.version_requests == ("list manifests", "get manifests", "list manifests", "get deltas")
    assert following.delta_writes == ("put deltas", "put manifests", "put head.json")
