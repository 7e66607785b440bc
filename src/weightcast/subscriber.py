"""Following a channel: poll → plan → fetch → decode → verify → stage, and, when it suits the caller, apply."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from weightcast.bits import Target, refuse_no_weights
from weightcast.chain import Chain, edge_of
from weightcast.detect import refuse_other_table
from weightcast.errors import (
    AccessError,
    ChannelError,
    FormatError,
    MissingError,
    SpaceError,
    StoreError,
    UnsupportedError,
    UsageError,
    WeightcastError,
)
from weightcast.fetch import BadEdgeError, forget_downloads, stage_route
from weightcast.files import Report, noticing_full, silent
from weightcast.holder import Holder, MemoryHolder, Staged, position_of
from weightcast.keys import Position, check_name
from weightcast.manifest import Channel, Heartbeat, Manifest
from weightcast.mirror import Mirror
from weightcast.notes import beat
from weightcast.plan import Route, cheapest_route
from weightcast.policy import Newest, Policy
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.workers import Workers

_LOOK_FURTHER = 32
"""Idle polls until the head is looked up anew: what follows us may have been collected, or the channel reset."""

_BEAT_EVERY, _BEAT_MOST = 30.0, 5.0
"""Seconds between two heartbeats when nothing is new, and when a version was taken."""

NEWEST = Newest()

Trouble = Callable[[WeightcastError], None]


class Subscriber:
    """Keeps weights at a channel's versions: arrays in memory, or a mirror in a folder.

    `poll` does all the work and touches nothing; `apply` only writes what was staged. `follow` does both for ever.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        holds: Target | Path | str,
        policy: Policy = NEWEST,
        *,
        replica: str | None = None,
        threads: int | None = None,
        report: Report = silent,
    ):
        """``channel`` is a URL; ``holds`` is a target in memory, or the folder of a mirror.

        With a ``replica`` name, heartbeats are left in the bucket, as far as that is permitted.
        """
        self._policy = policy
        self._holds = holds
        self._replica = check_name(replica, "replica") if replica else None
        self._report = report
        self._chain = Chain.open(open_store(channel) if isinstance(channel, (str, Path)) else channel)
        self._workers = Workers(threads)
        self._stopped = threading.Event()
        self._idle = _LOOK_FURTHER
        self._last_beat = -_BEAT_EVERY
        self._told: Position | None = None
        try:
            self._holder = self._hold(self._chain.channel)
        except BaseException:
            self._workers.close()
            raise

    def _hold(self, channel: Channel) -> Holder:
        if isinstance(self._holds, (str, Path)):
            url = self._chain.store.url
            return Mirror(self._holds, channel.id, channel.table, self._workers, self._report, url=url)
        refuse_no_weights(self._holds)
        refuse_other_table(channel.table, self._holds.table)
        return MemoryHolder(self._holds, self._workers)

    @property
    def policy(self) -> Policy:
        """Which version to go to; another may be given at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy, self._idle = policy, _LOOK_FURTHER

    @property
    def chain(self) -> Chain:
        return self._chain

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def position(self) -> Position | None:
        """Where the weights stand; None if they are no version of the channel, or not found out yet."""
        return position_of(self._holder)

    # -- poll --------------------------------------------------------------------------------------------------------

    def poll(self) -> Staged | None:
        """Look for the version that the policy wants, and stage all that leads there; None if there is nothing to do.

        What is held is not touched. A damaged, missing or lying object is planned around.
        """
        goal = self._goal()
        if goal is None:
            self._beat()
            return None
        with noticing_full(self._holder.workshop):
            return self._reach(goal)

    def _goal(self) -> Manifest | None:
        """The commit to go to; None to stay."""
        head = self._look()
        at = self._holder.version
        newest = head.position.version if head else at
        version = self.policy.goal(at, newest) if newest is not None else None
        if version is None or version == at:
            return None
        if head is not None and version == newest:
            return head
        try:
            return self._chain.manifest(version)
        except MissingError:
            # Collected: those who want every version go on with the next that is left.
            left = next(self._chain.versions(version), None)
            if left is None or at is None or version < at:
                raise
            return self._chain.manifest(left)

    def plan(self) -> Route:
        """The cheapest route to where the policy wants to go; nothing is fetched."""
        goal = self._goal()
        return self._route(goal.position.version, set(), None) if goal else ()

    def _look(self) -> Manifest | None:
        """The head, as far as it is of interest; None where nothing is new. One small request when idle."""
        try:
            at = self._holder.version
            return self._look_anew() if at is None or self._idle >= _LOOK_FURTHER else self._look_ahead(at)
        except ChannelError:
            if not self._follow_reset():
                raise
            return self._look_anew()

    def _look_ahead(self, at: int) -> Manifest | None:
        following = self._chain.after(at)
        if following is None:
            self._idle += 1
            return None
        self._idle = 0
        beyond = self._chain.after(at + 1)
        return following if beyond is None else self._chain.head(known=at + 2)

    def _look_anew(self) -> Manifest | None:
        self._idle = 0
        if self._holder.standing is None:
            self._holder.examine()
        else:
            self._holder.glance()
        head = self._chain.head()
        if head is None or self._is_not_of(head):
            self._follow_reset()
            head = self._chain.head()
            if head is not None and self._is_not_of(head):
                self._holder.locate(None)
        if head is not None and self._holder.version is None and self._holder.standing is not None:
            self._holder.locate(self._chain.find(self._holder.standing.position, head))
        return head

    def _is_not_of(self, head: Manifest) -> bool:
        """Whether the channel does not hold our version, or another under its number: it was put back, or reset."""
        at = self.position
        if at is None or at.version < head.position.version:
            return False  # what leads on from here says whether it begins at our bits
        try:
            return at != head.position and self._chain.manifest(at.version).position != at
        except MissingError as error:
            if error.key is None:
                raise
            return True

    def _follow_reset(self) -> bool:
        """Take up the channel that was begun in the place of ours, if so; what is held may well be a version of it."""
        chain = Chain.open(self._chain.store)
        if chain.channel.id == self._chain.channel.id:
            return False
        refuse_other_table(self._chain.channel.table, chain.channel.table)
        self._holder.close()
        self._holder = self._hold(chain.channel)
        self._chain = chain
        return True

    def _reach(self, goal: Manifest) -> Staged:
        avoid: set[str] = set()
        trouble: WeightcastError | None = None
        examined = False
        quick = self._next_step(goal)
        route = quick or self._route(goal.position.version, avoid, None)
        while True:
            try:
                return stage_route(self._chain, self._holder, route, goal, self._workers, self._report)
            except SpaceError:
                if route is not quick:
                    raise  # else its size is but the word of a manifest: see what the bucket says
            except BadEdgeError as bad:
                trouble = trouble or bad.error
                avoid.add(bad.edge.key)
                if not examined and not isinstance(bad.error, MissingError) and self._holder.standing is not None:
                    examined = True
                    if self._is_elsewhere():
                        self._look_anew()
                        avoid.clear()
            route = self._route(goal.position.version, avoid, trouble)

    def _is_elsewhere(self) -> bool:
        """Whether what is held is not the version it is thought to be; then that is forgotten."""
        at = self.position
        with suppress(MissingError, FormatError):
            if at is not None and self._chain.manifest(at.version).position != at:
                self._holder.locate(None)
                return True
        return not self._holder.examine()

    def _next_step(self, goal: Manifest) -> Route | None:
        """The delta that leads from here to ``goal``, where that is all there is to do: no need to list anything."""
        at = self.position
        return (edge_of(goal),) if at is not None and goal.base == at else None

    def _route(self, goal: int, avoid: set[str], trouble: WeightcastError | None) -> Route:
        start = self._holder.version
        if start is not None and start > goal:
            start = None
        # If nothing leads on from here, an anchor from before may, with a squash that passes by.
        for first in dict.fromkeys((start, None)):
            edges = [edge for edge in self._chain.edges(first, goal) if edge.key not in avoid]
            route = cheapest_route(edges, start, goal)
            if route is not None:
                return route
        route = self._route_from_elsewhere(goal, avoid)
        if route is None:
            raise self._no_way(start, goal, trouble) from trouble
        return route

    def _route_from_elsewhere(self, goal: int, avoid: set[str]) -> Route | None:
        """The cheapest that begins at a checkpoint which the channel only names; None if there is none to be had."""
        named = [edge for edge in self._chain.reference_edges() if edge.result <= goal and edge.key not in avoid]
        if not named:
            return None
        edges = self._chain.edges(min(edge.result for edge in named), goal)
        return cheapest_route([*named, *(edge for edge in edges if edge.key not in avoid)], None, goal)

    def _no_way(self, start: int | None, goal: int, trouble: WeightcastError | None) -> WeightcastError:
        url = self._chain.store.url
        elsewhere = isinstance(trouble, StoreError) and trouble.url != url
        if trouble is not None and not elsewhere:
            found = str(trouble).rstrip(".")
            hint = (
                f"First: {found}. `weightcast verify {url} --deep` names all; `weightcast publish --anchor` mends it."
            )
            return ChannelError(f"version {goal} cannot be reached: all ways there are damaged", file=url, hint=hint)
        for anchor in self._chain.references():
            if anchor.reference is not None:
                name = f"{anchor.reference.repository} at {anchor.reference.revision}"
                hint = f"Download {name} into the replica's folder first: it is version {anchor.position.version}."
                why = f": {trouble.problem}" if trouble is not None else ""
                return ChannelError(f"version {goal} begins at a checkpoint that is not here{why}", file=url, hint=hint)
        whence = "nothing" if start is None else f"version {start}"
        hint = "What led there was collected, or never arrived; `weightcast publish --anchor` mends it."
        return ChannelError(f"no way leads from {whence} to version {goal}", file=url, hint=hint)

    # -- apply -------------------------------------------------------------------------------------------------------

    def apply(self, staged: Staged) -> Position:
        """Write what the last `poll` staged; returns where the weights stand now."""
        if self.position not in (None, staged.start) or not staged.is_there:
            hint = "Poll again."
            raise UsageError(f"this was staged for version {staged.start}, and is old", hint=hint)
        with noticing_full(self._holder.workshop):
            self._holder.take(staged)
        forget_downloads(self._holder)
        self._idle = 0
        self._beat(every=_BEAT_MOST)
        return staged.position

    def fold(self, wait: bool = True) -> bool:
        """Bring a mirror's files up to the version it holds; False if others read them and ``wait`` is not wanted."""
        return self._holder.fold(wait)

    def follow(self, every: float = 1.0, trouble: Trouble | None = None) -> Iterator[Position]:
        """Poll and apply until `stop`, giving out each position reached.

        An error ends it, unless ``trouble`` is given: that is told, and the weights stay as they are until it is over.
        """
        failures = 0
        while not self._stopped.is_set():
            try:
                staged = self.poll()
                position = self.apply(staged) if staged else None
                failures = 0
            except WeightcastError as error:
                if trouble is None:
                    raise
                trouble(error)
                if not isinstance(error, StoreError):  # whom should we tell?
                    self._beat(error)
                failures, position = failures + 1, None
            if position is not None:
                yield position
            else:
                self._stopped.wait(min(every * 2**failures, max(every, 60.0)) * random.uniform(0.8, 1.2))

    def stop(self) -> None:
        """End `follow`, from any thread."""
        self._stopped.set()

    def _beat(self, error: WeightcastError | None = None, every: float = _BEAT_EVERY) -> None:
        """Tell how we do, rarely; a bucket that does not let us is not asked again."""
        now, position = time.monotonic(), self.position
        if self._replica is None or position is None or (now - self._last_beat < every and error is None):
            return
        self._last_beat, self._told = now, position
        try:
            text = re.sub(r"\s+", " ", str(error))[:500] if error else None
            beat(self._chain, Heartbeat(self._replica, position, time.time(), text))
        except (AccessError, UnsupportedError):
            self._replica = None
        except StoreError:
            self._told = None  # nobody misses one heartbeat; the next may get through

    def close(self) -> None:
        self.stop()
        if self.position != self._told:
            self._beat(every=0.0)
        self._holder.close()
        self._workers.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def default_replica() -> str:
    """This host's name, as a replica's."""
    return re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname()).strip("-.")[:100] or "replica"
