"""Following a channel: poll → plan → fetch → decode → verify → stage, and, when it suits the caller, apply."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from weightcast.channel.chain import Chain
from weightcast.channel.edge import edge_of
from weightcast.channel.keys import Position
from weightcast.channel.policy import Newest, Policy, accepts
from weightcast.channel.records import Channel, Manifest
from weightcast.channel.route import Route, cheapest_route, reachable
from weightcast.disk.checkpoint import MIRROR
from weightcast.disk.durable import Report, disk_errors, silent
from weightcast.errors import (
    AccessError,
    BusyError,
    ChannelError,
    FormatError,
    MissingError,
    NoRouteError,
    SpaceError,
    StoreError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.avoid import Avoided
from weightcast.follow.fetch import BadEdgeError, forget_downloads, stage_route
from weightcast.follow.heartbeat import BEAT_EVERY, BEAT_MOST, Pulse, error_text
from weightcast.follow.holder import Holder, MemoryHolder, Staged, position_of
from weightcast.follow.loop import OnError, rounds
from weightcast.follow.mirror import INSTANCE, Mirror
from weightcast.follow.update import Phases, Update
from weightcast.format.diff import refuse_other_table
from weightcast.format.tensors import Target, refuse_no_weights
from weightcast.format.workers import Workers
from weightcast.store import open_store
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Store

_LOOK_FURTHER = 32
"""Idle polls until the head is looked up anew: what follows us may have been collected, or the channel reset."""

_FOLD_IDLE = 30.0
"""Seconds without a new version until a mirror's files are brought up to date: sooner they would be written for every
version of a training run whose steps are slow."""

_CLOSING = 2.0
"""Seconds that `close` waits for those who read a mirror's files."""

_log = logging.getLogger("weightcast")

NEWEST = Newest()


class Subscriber:
    """Keeps weights at a channel's versions: arrays in memory, or a mirror in a folder.

    `poll` does all the work and changes nothing; `apply` only writes what was staged. `sync` does both once, `follow`
    until it is stopped.
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
        fold: bool = True,
        clock: Clock = CLOCK,
    ):
        """``channel`` is a URL; ``holds`` is a target in memory, or the folder of a mirror.

        With a ``replica`` name, heartbeats are left in the bucket, as far as that is permitted. ``fold`` brings a
        mirror's files up to date at the end and when nothing is new; without it only a long log does, which is cheaper
        where nobody loads the files.
        """
        self._policy = policy
        self._holds = holds
        self._report = report
        self._folds = fold
        self._clock = clock
        self._avoided = Avoided(clock)
        self._examined = False
        self._ran: int | None = None
        self._problem: str | None = None
        self._reported: tuple[Position, str | None, int | None] | None = None
        self._chain = Chain.open(open_store(channel) if isinstance(channel, (str, Path)) else channel)
        self._workers = Workers(threads)
        self._stopped = threading.Event()
        self._idle = _LOOK_FURTHER
        self._taken = clock.now()
        self._unapplied: Staged | None = None
        """Staged by `sync`, and still to be applied once those who read the mirror's files are done."""
        self._phases = Phases(clock)
        try:
            note = Path(holds) / MIRROR / INSTANCE if isinstance(holds, (str, Path)) else None
            self._pulse = Pulse(replica, note, clock) if replica else None
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
        self._policy, self._idle, self._unapplied = policy, _LOOK_FURTHER, None

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
        """Scan for the version that the policy wants, and stage all that leads there; None if there is nothing to do.

        What is held is not touched. A damaged, missing, refused or lying object is planned around. If no intact route
        leads to the version that is wanted, the newest before it that the policy accepts is staged instead, and
        `Staged.short_of` says so; `NoRouteError` if there is none.
        """
        self._unapplied, self._phases = None, Phases(self._clock)
        with disk_errors(self._holder.workshop):
            with self._phases.phase("find"):
                goal = self._goal()
            if goal is not None:
                return replace(self._reach(goal), seconds=self._phases.seconds)
            if self._folds and self._clock.now() - self._taken >= _FOLD_IDLE:
                self._holder.fold(wait=False)
        self._beat()
        return None

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
        if goal is None:
            return ()
        self._avoided.begin()
        try:
            return self._route(goal.position.version)
        except _NoWayError as end:
            raise end.error from end

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
        if self._holder.fingerprint is None:
            self._holder.examine()
        else:
            self._holder.glance()
        head = self._chain.head()
        if head is None or self._is_not_of(head):
            self._follow_reset()
            head = self._chain.head()
            if head is not None and self._is_not_of(head):
                self._holder.locate(None)
        if head is not None and self._holder.version is None and self._holder.fingerprint is not None:
            self._holder.locate(self._chain.find(self._holder.fingerprint.digest, head))
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
        """Stage the way to ``goal``, or to the newest version before it that can be reached."""
        back = self._way_back(goal)
        if back is not None:
            return back
        self._avoided.begin()
        self._examined = False
        found, reason = goal, None
        while True:
            try:
                staged = self._stage(found)
            except _NoWayError as end:
                reason = reason or end.error
                nearer = self._newest_before(found.position.version)
                if nearer is None:
                    raise reason from end
                found = nearer
            else:
                return replace(staged, short_of=goal.position, reason=reason) if reason else staged

    def _way_back(self, goal: Manifest) -> Staged | None:
        """To an older version the holder may have kept what leads there; nothing in the bucket leads back."""
        at = self._holder.version
        if at is None or goal.position.version >= at or not self._holder.fold(wait=False):
            return None
        return self._holder.way_back(goal.position)

    def _stage(self, goal: Manifest) -> Staged:
        quick = self._next_step(goal)
        route = quick or self._find_route(goal)
        while True:
            try:
                with self._phases.phase("fetch"):
                    staged = stage_route(self._chain, self._holder, route, goal, self._workers, self._report)
            except SpaceError:
                if route is not quick:
                    raise  # else its size is but the word of a manifest: see what the bucket says
            except BadEdgeError as bad:
                self._avoided.add(bad.edge, bad.error)
                self._check_ourselves(bad.error)
            else:
                self._avoided.succeeded(route)
                return staged
            route = self._find_route(goal)

    def _find_route(self, goal: Manifest) -> Route:
        with self._phases.phase("find"):
            return self._route(goal.position.version)

    def _check_ourselves(self, error: WeightcastError) -> None:
        """A patch that does not fit may mean that our own weights are not what we think; looked at once per poll."""
        if self._examined or isinstance(error, (MissingError, AccessError)) or self._holder.fingerprint is None:
            return
        self._examined = True
        if self._is_elsewhere():
            self._look_anew()
            self._avoided.clear()

    def _newest_before(self, version: int) -> Manifest | None:
        """The newest version before ``version``, and behind ours, that can be reached and the policy accepts."""
        at = self._holder.version
        edges = {edge.key: edge for edge in self._chain.edges(None, version) + self._chain.reference_edges()}
        if at is not None and at < version:
            edges |= {edge.key: edge for edge in self._chain.edges(at, version)}
        there = reachable((edge for edge in edges.values() if edge.key not in self._avoided), at)
        for candidate in sorted(there, reverse=True):
            if candidate >= version or not accepts(self._policy, at, candidate):
                continue
            with suppress(MissingError, FormatError, AccessError):
                return self._chain.manifest(candidate)
        return None

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
        if at is None or goal.base != at or goal.object.key in self._avoided:
            return None
        return (edge_of(goal),)

    def _route(self, goal: int) -> Route:
        start = self._holder.version
        if start is not None and start > goal:
            start = None
        # If nothing leads on from here, an anchor from before may, with a squash that passes by.
        for first in dict.fromkeys((start, None)):
            edges = [edge for edge in self._chain.edges(first, goal) if edge.key not in self._avoided]
            route = cheapest_route(edges, start, goal)
            if route is not None:
                return route
        route = self._route_from_elsewhere(goal)
        if route is None:
            raise _NoWayError(self._why_not(start, goal))
        return route

    def _route_from_elsewhere(self, goal: int) -> Route | None:
        """The cheapest that begins at a checkpoint which the channel only names; None if there is none to be had."""
        named = [
            edge for edge in self._chain.reference_edges() if edge.result <= goal and edge.key not in self._avoided
        ]
        if not named:
            return None
        edges = self._chain.edges(min(edge.result for edge in named), goal)
        return cheapest_route([*named, *(edge for edge in edges if edge.key not in self._avoided)], None, goal)

    def _why_not(self, start: int | None, goal: int) -> WeightcastError:
        """Why no route leads to ``goal``, with the remedy."""
        url, reason = self._chain.store.url, self._avoided.reason
        elsewhere = isinstance(reason, StoreError) and reason.url != url
        if isinstance(reason, AccessError) and not elsewhere:
            problem = f"version {goal} cannot be reached: {reason.problem}"
            return AccessError(problem, url=url, key=reason.key, hint=reason.hint)
        if reason is not None and not elsewhere:
            found = str(reason).rstrip(".")
            hint = (
                f"First: {found}. `weightcast verify {url} --deep` names all; `weightcast publish --anchor` mends it."
            )
            return NoRouteError(
                f"version {goal} cannot be reached: all ways there are damaged", file=url, hint=hint, reason=reason
            )
        for anchor in self._chain.references():
            if anchor.reference is not None:
                name = f"{anchor.reference.repository} at {anchor.reference.revision}"
                hint = f"Download {name} into the replica's folder first: it is version {anchor.position.version}."
                why = f": {reason.problem}" if reason is not None else ""
                problem = f"version {goal} begins at a checkpoint that is not here{why}"
                return NoRouteError(problem, file=url, hint=hint, reason=reason)
        whence = "nothing" if start is None else f"version {start}"
        hint = "What led there was collected, or never arrived; `weightcast publish --anchor` mends it."
        return NoRouteError(f"no way leads from {whence} to version {goal}", file=url, hint=hint)

    # -- apply -------------------------------------------------------------------------------------------------------

    def apply(self, staged: Staged) -> Position:
        """Write what the last `poll` staged; returns where the weights stand now."""
        if self.position not in (None, staged.start) or not staged.is_there:
            hint = "Poll again."
            raise UsageError(f"this was staged for version {staged.start}, and is old", hint=hint)
        with disk_errors(self._holder.workshop):
            self._holder.take(staged)
            forget_downloads(self._holder)
        self._idle, self._taken = 0, self._clock.now()
        self._beat()
        return staged.position

    def fold(self, wait: bool = True) -> bool:
        """Bring a mirror's files up to the version it holds; False if others read them and ``wait`` is not wanted.

        `BusyError` if they read them for longer than half a minute.
        """
        return self._holder.fold(wait)

    def sync(self) -> Update | None:
        """Poll and apply: one update, or None if there is nothing to do.

        `BusyError` if others read a mirror's files for too long; the next call applies what was staged for this one.
        """
        staged = self._unapplied or self.poll()
        if staged is None:
            return None
        self._unapplied = None
        phases = Phases(self._clock, dict(staged.seconds))
        try:
            with phases.phase("apply"):
                position = self.apply(staged)
        except BusyError:
            self._unapplied = staged
            raise
        return Update(position, staged.start, staged.nbytes, phases.seconds, staged.reason)

    def follow(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[Update]:
        """Sync until `stop`, yielding each update.

        An error ends it, unless ``on_error`` is given: that is called with the error, and the weights stay as they are
        until a later round succeeds.
        """
        return (update for update in self.rounds(every, on_error) if update is not None)

    def rounds(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[Update | None]:
        """As `follow`, but also yield None after each round without an update, before the pause that follows."""

        def failed(error: WeightcastError) -> None:
            assert on_error is not None
            on_error(error)
            if not isinstance(error, StoreError):  # else a heartbeat would not get through either
                self._beat(error)

        handler = None if on_error is None else failed
        return rounds(self.sync, every=every, stopped=self._stopped, on_error=handler, clock=self._clock)

    def stop(self) -> None:
        """End `follow`, from any thread."""
        self._stopped.set()

    def report_command(self, version: int | None, problem: str | None = None) -> None:
        """Say in heartbeats for which version the replica's command last succeeded, and what is wrong with it."""
        self._ran, self._problem = version, problem
        self._beat()

    def _beat(self, error: WeightcastError | None = None, last: bool = False) -> None:
        """Report to the bucket how we do, rarely, if we have a name there."""
        position = self.position
        if self._pulse is not None and position is not None:
            text = error_text(error) if error else self._problem
            news = position, text, self._ran
            every = BEAT_EVERY if news == self._reported else 0.0 if last else BEAT_MOST
            if self._pulse.beat(self._chain, position, error=text, ran=self._ran, every=every):
                self._reported = news

    def close(self) -> None:
        """Bring a mirror's files up to the version it holds, and let it go. Whoever reads them is not waited for long.

        A log that is not folded then is folded by whoever takes the mirror up next.
        """
        self.stop()
        try:
            self._beat(last=True)
            if self._folds and not self._holder.fold(wait=False):
                self._holder.fold(patience=_CLOSING)
        except BusyError as error:
            _log.warning("the files lag behind the log: %s", error)
        finally:
            self._holder.close()
            self._workers.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except WeightcastError as late:
            if error is None:
                raise
            _log.warning("the files could not be brought up to date: %s", late)  # what ended the block comes first


class _NoWayError(Exception):
    """No intact route leads to a version; ``error`` says why."""

    def __init__(self, error: WeightcastError):
        super().__init__(str(error))
        self.error = error


def default_replica(folder: Path | None = None) -> str:
    """A name for a replica: this host's, and a few digits that tell its folders apart."""
    host = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname()).strip("-.")[:80] or "replica"
    if folder is None:
        return host
    return f"{host}-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}"
