"""Choosing a route to a version: the cheapest of intact edges, or the reason why there is none."""

from __future__ import annotations

from contextlib import suppress

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge, edge_of
from weightcast.channel.keys import Position
from weightcast.channel.policy import Policy, accepts
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route, cheapest_route, reachable
from weightcast.errors import AccessError, FormatError, MissingError, NoRouteError, StoreError, WeightcastError
from weightcast.follow.bad_edges import BadEdges


class NoIntactRouteError(Exception):
    """No intact route leads to a version; ``error`` says why."""

    def __init__(self, error: WeightcastError):
        super().__init__(str(error))
        self.error = error


class Planner:
    """Plans by the listings of a channel, without the edges in ``bad``, and perhaps without anchors."""

    def __init__(self, chain: Chain, bad: BadEdges, *, anchors: bool = True):
        self._chain, self._bad, self._anchors = chain, bad, anchors

    def next_delta(self, at: Position | None, goal: Manifest) -> Route | None:
        """The delta from ``at`` to ``goal`` if that is the whole route: nothing needs to be listed."""
        if at is None or goal.base != at or goal.key in self._bad:
            return None
        return (edge_of(goal),)

    def route(self, at: int | None, goal: int) -> Route:
        """The cheapest route from version ``at`` (None: from nothing) to ``goal``; else `NoIntactRouteError`."""
        start = at if at is None or at <= goal else None
        # If nothing leads on from here, an older anchor may, with a squash across this version.
        for first in dict.fromkeys((start, None)):
            route = cheapest_route(self._good(self._chain.edges(first, goal)), start, goal)
            if route is not None:
                return route
        route = self._route_from_reference(goal)
        if route is None:
            raise NoIntactRouteError(self._why_not(start, goal))
        return route

    def _good(self, edges: list[Edge]) -> list[Edge]:
        return [edge for edge in edges if edge.key not in self._bad and (self._anchors or edge.base is not None)]

    def _route_from_reference(self, goal: int) -> Route | None:
        """The cheapest route that begins at a checkpoint outside the bucket."""
        references = [edge for edge in self._good(self._chain.reference_edges()) if edge.result <= goal]
        if not references:
            return None
        edges = self._chain.edges(min(edge.result for edge in references), goal)
        return cheapest_route([*references, *self._good(edges)], None, goal)

    def newest_before(self, version: int, at: int | None, policy: Policy) -> Manifest | None:
        """The newest version before ``version`` that can be reached and that ``policy`` accepts from ``at``."""
        edges = {edge.key: edge for edge in self._chain.edges(None, version) + self._chain.reference_edges()}
        if at is not None and at < version:
            edges |= {edge.key: edge for edge in self._chain.edges(at, version)}
        for candidate in sorted(reachable(self._good(list(edges.values())), at), reverse=True):
            if candidate >= version or not accepts(policy, at, candidate):
                continue
            with suppress(MissingError, FormatError, AccessError):
                return self._chain.manifest(candidate)
        return None

    def _why_not(self, start: int | None, goal: int) -> WeightcastError:
        """Why no route leads to ``goal``, with the remedy."""
        url, reason = self._chain.store.url, self._bad.reason
        elsewhere = isinstance(reason, StoreError) and reason.url != url
        if isinstance(reason, AccessError) and not elsewhere:
            problem = f"version {goal} cannot be reached: {reason.problem}"
            return AccessError(problem, url=url, key=reason.key, hint=reason.hint)
        if reason is not None and not elsewhere:
            problem = f"version {goal} cannot be reached: every route to it has damaged objects"
            remedy = f"`weightcast verify {url} --deep` lists all; `weightcast publish --anchor` repairs it."
            hint = f"First: {str(reason).rstrip('.')}. {remedy}"
            return NoRouteError(problem, file=url, hint=hint, reason=reason)
        for anchor in self._chain.references() if self._anchors else ():
            if anchor.reference is not None:
                name = f"{anchor.reference.repository} at {anchor.reference.revision}"
                hint = f"Download {name} into the replica's folder first: it is version {anchor.position.version}."
                why = f": {reason.problem}" if reason is not None else ""
                problem = f"version {goal} needs a checkpoint from outside the bucket{why}"
                return NoRouteError(problem, file=url, hint=hint, reason=reason)
        if not self._anchors:
            problem = f"version {goal} cannot be reached from here without an anchor"
            return NoRouteError(problem, file=url, hint="What follows the channel without files cannot load one.")
        origin = "nothing" if start is None else f"version {start}"
        hint = "Objects of the route were deleted, or never uploaded; `weightcast publish --anchor` repairs it."
        return NoRouteError(f"no route leads from {origin} to version {goal}", file=url, hint=hint)
