"""The direct way of a version: its objects are fetched, and the engine's workers decode them.

What they cannot decode, since they hold too little of it, is decoded here, against the mirror, for those tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.policy import Policy
from weightcast.channel.trust import Trust
from weightcast.engine.client import Engine
from weightcast.engine.engine_replica import EngineReplica, NeedsMirrorError, StagedCoded
from weightcast.engine.fit import listed
from weightcast.engine.messages import StageCoded
from weightcast.engine.messages import Staged as StagedOnWorker
from weightcast.engine.plan import plan_patch
from weightcast.engine.ready import Ready, ready_of
from weightcast.engine.state import EngineState
from weightcast.errors import ChannelError, EngineBusyError, EngineError, EngineGoneError, SpaceError
from weightcast.events.emitter import OnEvent
from weightcast.follow.subscriber import Subscriber
from weightcast.format.digest import Fingerprint
from weightcast.store.backoff import Clock

_MOST_PASSED = 63
"""A trainer may begin to cut boxes for the workers at any version."""

LeftOver = Callable[[StagedCoded, frozenset[str]], tuple[str, ...]]
"""Decodes what a route changes in some tensors; the files of staged patches. `NotDirectlyError` if that cannot be."""


class NotDirectlyError(Exception):
    """The workers cannot be brought to this version by its objects alone: it has to come through the mirror."""


class Direct:
    """Follows a channel as the engine does, from where `hold` says that the engine is."""

    def __init__(
        self,
        channel: Any,
        engine: Engine,
        folder: Path,
        policy: Policy,
        clock: Clock,
        *,
        on_event: OnEvent = (),
        takes_anchors: bool = True,
        trust: Trust | None = None,
        sign: str | Path | None = None,
    ):
        """``channel`` is a store, or the chain of a mirror's subscriber: then both remember what either has seen.

        ``takes_anchors``: whether a route with an anchor is chosen where it is cheaper; no worker can decode it."""
        self._engine, self._replica = engine, EngineReplica(folder, takes_anchors=takes_anchors)
        engine_itself: Any = self._replica  # neither weights in memory nor a mirror
        self.subscriber = Subscriber(
            channel, engine_itself, policy=policy, clock=clock, on_event=on_event, trust=trust, sign=sign
        )
        self._undecoded: frozenset[str] = frozenset()
        """Tensors that a worker could not decode when that was tried last."""
        self._passed, self._pass = 0, 0
        """Versions with such tensors since then, and how many there are to be before it is tried again."""

    @property
    def position(self) -> Position | None:
        return self.subscriber.position

    @property
    def objects(self) -> Path:
        """Where the objects of the last version are."""
        return self._replica.objects

    def hold(self, position: Position | None, fingerprint: Fingerprint | None) -> None:
        """The engine is there; None if that is not known."""
        guard = self.subscriber.chain.guard
        if guard is not None and position is not None:
            guard.hold(position.version)
        self._replica.hold(position, fingerprint)

    def poll(self) -> StagedCoded | None:
        """Fetch what leads to the version that the policy wants; None if the engine is there."""
        try:
            staged = self.subscriber.poll()
        except (NeedsMirrorError, ChannelError, SpaceError) as error:
            raise NotDirectlyError(error) from error
        assert staged is None or isinstance(staged, StagedCoded)
        return staged

    def stage(self, staged: StagedCoded, state: EngineState, left_over: LeftOver) -> Ready:
        """Have the workers prepare it; `NotDirectlyError` if they cannot, and if it is not what it should be."""
        before = self._replica.fingerprint
        assert before is not None, "else nothing is staged"
        touched = before.differing(staged.fingerprint)
        plan = plan_patch(state, staged.start, before, staged.fingerprint)
        if plan is None or plan.unreachable:
            raise NotDirectlyError("there are tensors that only a reload can change")
        try:
            request, results = self._run(staged, touched, left_over)
            ready = ready_of(self._engine, request, results, staged.fingerprint, (), touched - state.fit.absent)
        except (EngineBusyError, EngineGoneError):
            raise
        except EngineError as error:  # a damaged object, or memory that was changed: the mirror finds out which
            raise NotDirectlyError(error) from error
        if ready.reads_mirror:
            raise NotDirectlyError("the workers have no room for what changes")
        return ready

    def _run(
        self, staged: StagedCoded, touched: frozenset[str], left_over: LeftOver
    ) -> tuple[StageCoded, Sequence[StagedOnWorker]]:
        """The workers decode what they can; the rest is decoded for them."""
        names = touched & self._undecoded if self._passed < self._pass else frozenset()
        request, results = self._ask(staged, names, left_over)
        undecoded = frozenset().union(*(one.undecoded for one in results))
        self._remember(touched, names, undecoded)
        if not undecoded:
            return request, results
        request, results = self._ask(staged, names | undecoded, left_over)
        if still := frozenset().union(*(one.undecoded for one in results)):
            raise NotDirectlyError(f"the workers have no room for {listed(still)}")
        return request, results

    def _ask(
        self, staged: StagedCoded, names: frozenset[str], left_over: LeftOver
    ) -> tuple[StageCoded, Sequence[StagedOnWorker]]:
        request = StageCoded(staged.versions, left_over(staged, names) if names else ())
        return request, self._engine.run(request)

    def _remember(self, touched: frozenset[str], names: frozenset[str], undecoded: frozenset[str]) -> None:
        """Of the tensors touched, ``names`` were decoded for the workers, which could not decode ``undecoded``."""
        tried = touched - names
        self._undecoded = (self._undecoded - tried) | undecoded
        if names:
            self._passed += 1
        elif undecoded:
            self._passed, self._pass = 0, min(2 * self._pass + 1, _MOST_PASSED)
        elif not self._undecoded:
            self._passed, self._pass = 0, 0

    def reached(self, staged: StagedCoded) -> None:
        """The engine is at what was staged."""
        self.subscriber.apply(staged)

    def close(self) -> None:
        self.subscriber.close()
