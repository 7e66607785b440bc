"""Following a channel: poll (find, fetch, decode, verify, stage), and, when it suits the caller, apply."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.nearest import nearest
from weightcast.channel.policy import NEWEST, Policy
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route
from weightcast.channel.trust import Seen, Trust, as_trust, signing_of
from weightcast.disk.durable import Report, disk_errors, silent
from weightcast.errors import BusyError, SpaceError, StoreError, UsageError, WeightcastError
from weightcast.events.emitter import Emitter, OnEvent
from weightcast.events.phases import Phases
from weightcast.follow.bad_edges import CHEAP, BadEdges
from weightcast.follow.fetch import BadEdgeError, forget_downloads
from weightcast.follow.finder import Finder
from weightcast.follow.heartbeat_sender import HeartbeatSender, error_text
from weightcast.follow.loop import OnError, rounds
from weightcast.follow.memory_replica import MemoryReplica
from weightcast.follow.mirror import FOLD_EVERY, PATIENCE, Mirror
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_trust import WRITE_EVERY, TrustRecord, trust_in
from weightcast.follow.planner import NoIntactRouteError, Planner
from weightcast.follow.replica import Replica, Staged, position_of
from weightcast.follow.update import Update
from weightcast.format.diff import refuse_other_table
from weightcast.format.tensors import Target, Weights, is_module, refuse_no_weights
from weightcast.format.workers import Workers
from weightcast.store import open_store
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Store

if TYPE_CHECKING:
    import torch

_FOLD_IDLE = 30.0
"""Seconds without a new version until a mirror's files are brought up to date: sooner they would be written for every
version of a training run whose steps are slow."""

_CLOSING = 2.0
"""Seconds that `close` waits for readers of a mirror's files."""

_log = logging.getLogger("weightcast")


class Subscriber:
    """Keeps weights at a channel's versions: arrays or a torch model in memory, or a mirror in a folder.

    `poll` does all the work and changes nothing; `apply` only writes what was staged. `sync` does both once, `follow`
    until it is stopped.

    >>> weights, mine = (wc.Arrays({"w": np.full(4, value, np.float32)}) for value in (1, 0))
    >>> head = wc.init("channel", weights)
    >>> with wc.Subscriber("channel", mine) as subscriber:
    ...     update = subscriber.sync()
    >>> update.position == head.position
    True
    >>> wc.fingerprint(mine) == wc.fingerprint(weights)
    True
    """

    def __init__(
        self,
        channel: str | Path | Store,
        holds: Target | torch.nn.Module | Path | str,
        policy: Policy = NEWEST,
        *,
        near: Sequence[str | Path | Store] = (),
        replica: str | None = None,
        threads: int | None = None,
        report: Report = silent,
        fold: bool = True,
        fold_every: int = FOLD_EVERY,
        patience: float = PATIENCE,
        clock: Clock = CLOCK,
        on_event: OnEvent = (),
        trust: Trust | str | None = None,
        sign: str | Path | None = None,
    ):
        """``channel`` is a URL; ``holds`` are arrays, a torch model, another target in memory, or a mirror's folder.

        ``near`` are copies of the channel (`weightcast copy`) that are nearer, in the order in which to read them. The
        channel itself is read where none of them answers, and where they lack what is needed.

        With a ``replica`` name, heartbeats are sent to the bucket, as far as that is permitted. ``on_event`` gets an
        `Event` for each phase of a version: a `Sink`, or several.

        For mirrors: the log is folded into the files every ``fold_every`` versions, and with ``fold`` also when nothing
        is new and at the end; without it updates cost less where nothing loads the files. Updates go on during a fold;
        the next call raises what it failed with. A change of the files waits ``patience`` seconds for their readers.

        With ``trust``, the root's public key, all that could lead to weights must be signed: `TrustError` otherwise. A
        mirror records the key: from then on it is trusted there without being named again. ``sign`` names the private
        key of this replica, a file or `env:NAME`, for its heartbeats.
        """
        self._policy = policy
        self._report = report
        self._folds = fold
        self._clock = clock
        self._bad = BadEdges(clock)
        self._examined = False
        self._command: tuple[int | None, str | None] = None, None
        """The version for which the replica's command last succeeded, and what is wrong with it."""
        self._stopped = threading.Event()
        self._applied = clock.now()
        self._unapplied: Staged | None = None
        """Staged by `sync`, and still to be applied once the readers of the mirror's files are done."""
        self._phases = Phases(clock)
        self._seconds: Mapping[str, float] = {}
        """Of the last version that was applied, by phase."""
        self._emitter = Emitter(on_event, "replica", replica)
        place = MirrorFolder(Path(holds)) if isinstance(holds, (str, Path)) else None
        chain = _open_chain(channel, near, place, as_trust(trust), sign, clock)
        self._workers = Workers(threads)
        try:
            self._heartbeats = HeartbeatSender(replica, place.instance if place else None, clock) if replica else None
            # Not a method of ours: such a cycle would keep the weights in memory until the garbage collector runs.
            opener = partial(_open_replica, holds, self._workers, report, fold_every, patience)
            self._finder = Finder(chain, opener)
        except BaseException:
            self._workers.close()
            raise
        self._trust_record = TrustRecord(place) if place is not None and chain.guard is not None else None
        try:
            if chain.guard is not None and self._replica.version is not None:
                chain.guard.hold(self._replica.version)
            self._remember()
        except BaseException:
            self._replica.close()
            self._workers.close()
            raise

    @property
    def policy(self) -> Policy:
        """Which version to go to; it may be replaced at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy, self._unapplied = policy, None
        self._finder.list_next()

    @property
    def chain(self) -> Chain:
        """Internal: the channel; another one after a reset."""
        return self._finder.chain

    @property
    def weights(self) -> Weights | None:
        """The weights that are held; None for a mirror that has none yet."""
        return self._replica.weights

    @property
    def mirror(self) -> Mirror:
        """Internal: the mirror; `UsageError` if the weights are held in memory."""
        if not isinstance(self._replica, Mirror):
            raise UsageError("this subscriber holds arrays, not a mirror")
        return self._replica

    @property
    def position(self) -> Position | None:
        """The position of the weights; None if they are not a version of the channel, or not examined yet."""
        return position_of(self._replica)

    @property
    def _replica(self) -> Replica:
        return self._finder.replica

    # -- poll ----------------------------------------------------------------------------------------------------------

    def poll(self) -> Staged | None:
        """Find the version that the policy wants, and stage the route to it; None if there is nothing to do.

        The weights are not changed. Objects that are damaged, missing or refused are avoided. If no intact route leads
        to the version that is wanted, the newest before it that the policy accepts is staged instead, and
        `Staged.short_of` says so; `NoRouteError` if there is none.
        """
        self._unapplied, self._phases = None, Phases(self._clock)
        with disk_errors(self._replica.workshop):
            self._replica.take_up_fold()
            with self._phases.phase("find"):
                goal = self._finder.goal(self._policy)
            if self.chain.guard is not None:
                self.chain.guard.refuse_old(time.time())
            self._remember(1 if goal is None else WRITE_EVERY)
            if goal is not None:
                staged = replace(self._reach(goal), seconds=self._phases.seconds)
                self._emit(staged, self._phases)
                return staged
            if self._folds and self._clock.now() - self._applied >= _FOLD_IDLE:
                self._replica.begin_fold()
        self._beat()
        return None

    def _reach(self, goal: Manifest) -> Staged:
        """Stage the route to ``goal``, or to the newest version before it that can be reached."""
        back = self._stage_back(goal)
        if back is not None:
            return back
        self._bad.begin()
        self._examined = False
        found, reason = goal, None
        while True:
            try:
                staged = self._stage(found)
            except NoIntactRouteError as end:
                reason = reason or end.error
                nearer = self._planner.newest_before(found.position.version, self._replica.version, self._policy)
                if nearer is None:
                    raise reason from end
                found = nearer
            else:
                return replace(staged, short_of=goal.position, reason=reason) if reason else staged

    def _stage_back(self, goal: Manifest) -> Staged | None:
        """A replica may have kept patches that lead to an older version; nothing in the bucket leads back."""
        at = self._replica.version
        if at is None or goal.position.version >= at or not self._replica.fold(wait=False):
            return None
        return self._replica.stage_back(goal.position)

    def _stage(self, goal: Manifest) -> Staged:
        quick = self._planner.next_delta(self.position, goal)
        route = quick or self._route(goal)
        while True:
            try:
                with self._phases.phase("fetch"):
                    staged = self._replica.stage(self.chain, route, goal, self._phases.enter)
            except SpaceError:
                if route is not quick:
                    raise  # else only a manifest says how large it is: a listing may say otherwise
            except BadEdgeError as bad:
                self._bad.add(bad.edge, bad.error)
                self._examine_once(bad.error)
            else:
                self._bad.succeeded(route)
                return staged
            route = self._route(goal)

    def _route(self, goal: Manifest) -> Route:
        with self._phases.phase("find"):
            return self._planner.route(self._replica.version, goal.position.version)

    @property
    def _planner(self) -> Planner:
        return Planner(self.chain, self._bad, anchors=self._replica.takes_anchors)

    def _examine_once(self, error: WeightcastError) -> None:
        """Examine our own weights, once a poll: if a patch does not fit, they may have been changed."""
        if self._examined or isinstance(error, CHEAP) or self._replica.fingerprint is None:
            return
        self._examined = True
        if self._finder.is_elsewhere():
            self._finder.list_head()
            self._bad.clear()

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self, staged: Staged) -> Position:
        """Write what the last `poll` staged; returns the position of the weights now."""
        if self.position not in (None, staged.start) or not staged.is_there:
            raise UsageError(f"this was staged for version {staged.start}, and is out of date", hint="Poll again.")
        phases = Phases(self._clock)
        with disk_errors(self._replica.workshop), phases.phase("apply"):
            self._replica.apply(staged)
            forget_downloads(self._replica)
        self._finder.applied()
        self._applied = self._clock.now()
        self._seconds = {**staged.seconds, **phases.seconds}
        self._emit(staged, phases)
        self._beat()
        return staged.position

    def _emit(self, staged: Staged, phases: Phases) -> None:
        position = staged.position
        spans = phases.spans({"fetch": staged.nbytes})
        self._emitter.emit(self.chain.channel.id, position.version, position.digest, spans)

    def fold(self, wait: bool = True) -> bool:
        """Bring a mirror's files up to the version it holds; False if others read them and ``wait`` is not set.

        A fold in the background is waited for. `BusyError` if others read the files for longer than the subscriber's
        patience.
        """
        return self._replica.fold(wait)

    def sync(self) -> Update | None:
        """Poll and apply: one update, or None if there is nothing to do.

        `BusyError` if others read a mirror's files for too long; the next call applies what was staged for this one.
        """
        staged = self._unapplied or self.poll()
        if staged is None:
            return None
        self._unapplied, policy = None, self._policy
        try:
            position = self.apply(staged)
        except BusyError:
            if self._policy is policy:  # else another thread has set one that may want another version
                self._unapplied = staged
            raise
        return Update(position, staged.start, staged.nbytes, self._seconds, staged.reason)

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
        self._command = version, problem
        self._beat()

    def _remember(self, every: int = 1) -> None:
        """Write down in the mirror what was seen of a channel that is signed."""
        if self._trust_record is not None and self.chain.guard is not None:
            self._trust_record.write(self.chain.guard, every)

    def _beat(self, error: WeightcastError | None = None, last: bool = False) -> None:
        """Send a heartbeat if we have a name and one is due."""
        position = self.position
        if self._heartbeats is not None and position is not None:
            ran, problem = self._command
            text = error_text(error) if error else problem
            self._heartbeats.report(self.chain, position, error=text, ran=ran, seconds=self._seconds, at_once=last)

    def close(self) -> None:
        """Bring a mirror's files up to the version it holds, unless others keep reading them, and release it.

        A log that is not folded then is folded when the mirror is opened next.
        """
        self.stop()
        try:
            self._beat(last=True)
            self._remember()
            if self._folds:
                self._replica.fold(patience=_CLOSING)
        except BusyError as error:
            _log.warning("the files lag the log: %s", error)
        finally:
            self._replica.close()
            self._workers.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except WeightcastError as late:
            if error is None:
                raise
            _log.warning("the files could not be brought up to date: %s", late)  # the block's own error comes first


def _open_chain(
    channel: str | Path | Store | Chain,
    near: Sequence[str | Path | Store],
    place: MirrorFolder | None,
    trust: Trust | None,
    sign: str | Path | None,
    clock: Clock,
) -> Chain:
    if isinstance(channel, Chain):  # internal: of another subscriber, which checks and remembers for both
        return channel
    seen: Seen | None = None
    if place is not None:
        trust, seen = trust_in(place, trust)
    return Chain.open(nearest(open_store(channel), near, clock), signing_of(trust, sign), seen)


def _open_replica(
    holds: Target | torch.nn.Module | Path | str,
    workers: Workers,
    report: Report,
    fold_every: int,
    patience: float,
    chain: Chain,
) -> Replica:
    identity, table = chain.channel.id, chain.channel.table
    if isinstance(holds, (str, Path)):
        url = chain.store.url
        return Mirror(holds, identity, table, workers, report, url=url, fold_every=fold_every, patience=patience)
    if isinstance(holds, Replica):  # internal: an engine is one of its own kind
        return holds
    if is_module(holds):
        from weightcast.torch import TorchTarget

        holds = TorchTarget(holds, workers)
    refuse_no_weights(holds)
    target = cast(Target, holds)
    refuse_other_table(table, target.table)
    return MemoryReplica(target, workers, report)
