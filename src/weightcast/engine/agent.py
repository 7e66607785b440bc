"""The agent: an engine that follows a channel, and a mirror beside it.

    fetch → decode, verify, stage (workers) → [pause → write → resume]        the mirror follows beside
    fetch, decode, verify (mirror) → stage (workers) → [pause → write → resume]       where workers cannot decode

Everything outside the brackets happens while the engine serves; what is inside happens in the engine's own process, in
one call (`control`). With a mirror the agent brings an engine in any state to the mirror's version; `plan` decides how.
Without one it follows an engine that holds a version, as far as workers can decode. An update that breaks off leaves
the engine paused until another one succeeds. A channel that does not fit the engine is refused before anything is
fetched or paused. The agent owns the engine while it runs: no other one can change it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.channel.policy import NEWEST, Pinned, Policy
from weightcast.channel.trust import Trust, as_trust
from weightcast.disk.durable import scratch
from weightcast.engine.client import Engine
from weightcast.engine.control import MIXED
from weightcast.engine.direct import Direct, LeftOver, NotDirectlyError
from weightcast.engine.engine_replica import StagedCoded
from weightcast.engine.fit import listed, teach, warn_of_gaps
from weightcast.engine.keep_alive import KeepAlive
from weightcast.engine.messages import Outcome, UpdateEngine
from weightcast.engine.mirrored import Mirrored
from weightcast.engine.plan import plan_update
from weightcast.engine.ready import Ready
from weightcast.engine.recognise import recognise
from weightcast.engine.rounds import EngineAgent
from weightcast.engine.state import EngineState, state_of
from weightcast.engine.update import PAUSED, EngineUpdate
from weightcast.errors import (
    EngineBusyError,
    EngineError,
    EngineGoneError,
    MisfitError,
    StoreError,
    WeightcastError,
)
from weightcast.events.emitter import Emitter, OnEvent
from weightcast.events.phases import Phases, Span
from weightcast.follow.heartbeat_sender import HeartbeatSender, default_replica, error_text
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.replica import Staged
from weightcast.follow.subscriber import Subscriber
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorTable
from weightcast.store import open_store
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Store

_FROM_AN_ANCHOR = "Restart it from a version of the channel, such as `weightcast pull URL FOLDER` makes."
_WITH_A_MIRROR = "Restart the engine from a newer version of the channel, or attach it with a mirror: --mirror FOLDER."

_log = logging.getLogger("weightcast")


class Agent(EngineAgent[EngineUpdate]):
    """Keeps one engine at a channel's versions, with a mirror on the engine's host."""

    def __init__(
        self,
        channel: str | Store,
        engine: Engine,
        mirror: Path | str | None,
        *,
        policy: Policy = NEWEST,
        prove: bool = False,
        clear_cache: bool = True,
        allow_partial: bool = False,
        replica: str | None = None,
        clock: Clock = CLOCK,
        on_event: OnEvent = (),
        trust: Trust | str | None = None,
        sign: str | Path | None = None,
    ):
        """``mirror`` is a folder on the engine's host. Without one, only an engine that holds a version of the channel
        can be followed, and only by what its workers can decode.

        ``prove`` digests all live parameters after every update, while the engine is still paused.

        A channel with tensors that have no place in the engine, or without some that the engine's checkpoint has, is
        refused unless ``allow_partial`` is set.

        With a ``replica`` name the agent sends heartbeats to the bucket, if it may write there. Other agents of the
        engine are told that name. ``on_event`` gets an `Event` for each phase of a version: a `Sink`, or several.

        With ``trust``, the root's public key, everything must be signed; the mirror records it (`Subscriber`).
        ``sign`` names the private key that signs the agent's heartbeats.
        """
        super().__init__(clock)
        self.engine = engine
        self.unproven: tuple[str, ...] = ()
        """Tensors whose live bits cannot be read back."""
        self.last: EngineUpdate | None = None
        self._policy, self._prove, self._clear_cache = policy, prove, clear_cache
        self._allow_partial = allow_partial
        self._name = replica or default_replica(Path(mirror) if mirror is not None else None)
        self._phases = Phases(clock)
        """Of the round that runs now, or ran last."""
        self._asked_at = clock.wall()
        """When the engine was last asked for an update, in seconds since 1970."""
        self._emitter = Emitter(on_event, "agent", replica)
        self._met = False
        """Whether the engine was ever ours."""
        self._state: EngineState | None = None
        self._verified: tuple[str, ...] = ()
        """The worker processes whose reported position is believed; only with ``prove``."""
        self._beating = threading.Lock()
        self._keep_alive = KeepAlive(engine.renew, self._beat)
        store = open_store(channel)
        instance = None
        fetched = self._emitter.relay("agent", without=("apply",))  # nothing is written on that side
        with ExitStack() as opening:
            self._mirror: Mirrored | None = None
            if mirror is None:
                folder = opening.enter_context(scratch())
                self._direct = Direct(
                    store,
                    engine,
                    folder,
                    policy,
                    clock,
                    on_event=fetched,
                    takes_anchors=False,
                    trust=as_trust(trust),
                    sign=sign,
                )
            else:
                place = MirrorFolder(Path(mirror))
                instance, folder = place.instance, place.inner / "engine"
                beside = self._emitter.relay("mirror")
                self._mirror = Mirrored(
                    store,
                    engine,
                    Path(mirror),
                    folder / "objects",
                    policy,
                    clock,
                    on_event=beside,
                    trust=as_trust(trust),
                    sign=sign,
                )
                opening.callback(self._mirror.close)
                # Of a channel that is signed both remember together what they have seen.
                chain = self._mirror.subscriber.chain
                source = store if chain.guard is None else chain
                self._direct = Direct(source, engine, folder, policy, clock, on_event=fetched)
            opening.callback(self._direct.close)
            if self._mirror is not None:
                opening.callback(self._mirror.wait)  # first: it uses what the direct way has fetched
            self._heartbeats = HeartbeatSender(replica, instance, clock) if replica else None
            self._opened = opening.pop_all()

    @property
    def subscriber(self) -> Subscriber:
        """What follows the channel: the mirror's, if there is a mirror."""
        return self._mirror.subscriber if self._mirror is not None else self._direct.subscriber

    @property
    def lag(self) -> int | None:
        """Versions from the live one to the newest that was fetched; None if either is unknown."""
        live = self.position
        newest = max((at.version for at in (self.subscriber.position, self._direct.position) if at), default=None)
        return None if newest is None or live is None else max(0, newest - live.version)

    @property
    def _table(self) -> TensorTable:
        return self.subscriber.chain.channel.table

    # -- a round -----------------------------------------------------------------------------------------------------

    def step(self) -> EngineUpdate | None:
        """Bring engine and mirror to the version that the policy wants; None if the engine is there already."""
        self._phases, self.short = Phases(self._clock), None
        state, error = None, None
        try:
            state = self._meet()
        except MisfitError:
            raise
        except EngineError as failed:
            self.position, error = None, failed
        if self._mirror is None:
            if state is None:
                assert error is not None
                raise error
            return self._step_without_mirror(state)
        if state is not None and self._is_held(state):
            try:
                return self._step_directly(state, self._mirror.stage_left_over)
            except NotDirectlyError as reason:
                _log.debug("through the mirror: %s", reason)
        return self._step_with_mirror(self._mirror, state, error)

    def _is_held(self, state: EngineState) -> bool:
        """Whether the engine is where the direct way begins."""
        return self._direct.position == state.position is not None and not state.changing

    def _step_with_mirror(
        self, mirror: Mirrored, state: EngineState | None, error: WeightcastError | None
    ) -> EngineUpdate | None:
        """Bring the mirror to the version, and then the engine, as far as it answers."""
        staged = None
        try:
            with self._phases.phase("fetch"):
                staged = mirror.poll()
        except WeightcastError as failed:
            error = failed  # an engine that has restarted still gets what the mirror has
        update = self._follow_mirror(mirror, state, staged)
        self.short = staged.reason if staged is not None else None
        if error is not None:
            raise error
        return update

    def _follow_mirror(self, mirror: Mirrored, state: EngineState | None, staged: Staged | None) -> EngineUpdate | None:
        ready = None
        try:
            if state is not None and staged is not None:
                with self._phases.phase("stage"):
                    ready = mirror.stage_patches(state, staged)
        finally:
            if staged is not None:  # the mirror follows the channel even if the engine fails
                mirror.subscriber.apply(staged)
        target, fingerprint = mirror.position, mirror.fingerprint
        if state is None or target is None or fingerprint is None:
            return None
        if state.position is None and not state.changing:
            chain = mirror.subscriber.chain
            state, _ = recognise(self.engine, state, chain, self._phases, (target, fingerprint))
        plan = plan_update(state, self._table, target)
        update = None
        if plan is not None:
            self.position = None
            if ready is None:
                with self._phases.phase("stage"):
                    ready = mirror.stage(plan, state)
            update = self._bring(ready, state, target, fingerprint)
        self.position, self._verified = target, state.instances
        self._direct.hold(target, fingerprint)
        return update

    # -- directly ----------------------------------------------------------------------------------------------------

    def _step_directly(self, state: EngineState, left_over: LeftOver) -> EngineUpdate | None:
        """Have the workers decode what leads to the version that the policy wants; None if the engine is there."""
        with self._phases.phase("fetch"):
            staged = self._direct.poll()
        if staged is None:
            if self._mirror is not None:
                self._mirror.keep(state.position)
            return None
        with self._phases.phase("stage"):
            ready = self._direct.stage(staged, state, left_over)
        self.position, self.short = None, staged.reason
        update = self._bring(ready, state, staged.position, staged.fingerprint)
        self.position, self._verified = staged.position, state.instances
        self._direct.reached(staged)
        if self._mirror is not None:
            self.short = self._mirror.begin() or self.short
        return update

    def _step_without_mirror(self, state: EngineState) -> EngineUpdate | None:
        """`EngineError` if the engine holds no version, or if its workers cannot be brought to the one wanted."""
        url = self.engine.url
        if state.changing:
            raise EngineError("the engine's weights are a mix of versions", url=url, hint=_FROM_AN_ANCHOR)
        try:
            if not self._is_held(state):
                self._direct.hold(None, None)
                state, found = recognise(self.engine, state, self.subscriber.chain, self._phases, None)
                if found is None:
                    names = listed(state.fit.absent | state.fit.unknown.keys()) or "it is held in another dtype"
                    raise NotDirectlyError(f"not all of the engine can be read: {names}")
                if state.position is None:
                    raise EngineError("the engine holds no version of the channel", url=url, hint=_FROM_AN_ANCHOR)
                self._direct.hold(state.position, found)
                self.position, self._verified = state.position, state.instances
            return self._step_directly(state, _nothing_is_left_over)
        except NotDirectlyError as reason:
            self._direct.hold(None, None)  # what the workers hold is looked at again
            if isinstance(reason.__cause__, EngineError):
                raise reason.__cause__ from None
            raise EngineError(f"without a mirror: {reason}", url=url, hint=_WITH_A_MIRROR) from reason

    def catch_up(self) -> None:
        """Wait until the mirror, which follows beside, holds the engine's version."""
        if self._mirror is not None:
            self._mirror.catch_up(self.position)

    # -- what the engine is ------------------------------------------------------------------------------------------

    def _meet(self) -> EngineState:
        report = self.engine.meet(self._name)
        self._met = True
        self._keep_alive.start()
        state = state_of(self.engine, report, self._table, self._state)
        if not state.learned:
            with self._phases.phase("learn"):
                channel, partial = self.subscriber.chain.channel, self._allow_partial
                teach(self.engine, channel, allow_absent=partial, allow_uncovered=partial)
            state = state_of(self.engine, self.engine.report(), self._table)
            warn_of_gaps(state.fit)
        if self._state is None or self._state.instances != state.instances:
            self.unproven = tuple(sorted(state.fit.unknown))
        self.position, self._state = state.position, state
        return replace(state, position=None) if self._prove and state.instances != self._verified else state

    # -- update ------------------------------------------------------------------------------------------------------

    def _bring(self, ready: Ready, state: EngineState, target: Position, fingerprint: Fingerprint) -> EngineUpdate:
        """Write what is ready; if that breaks off, load everything again before the engine goes on."""
        outcome, checked = self._update(ready, state, target, fingerprint)
        if outcome.result == "broken" and self._mirror is not None:
            _log.warning(
                "the update failed (%s); the engine stays paused while all of it is loaded again", outcome.problem
            )
            self._mirror.bring_to(target)
            everything = tuple(spec.name for spec in self._table)
            ready = replace(ready, job=None, reload=everything, reads_mirror=True)
            outcome, checked = self._update(ready, state, target, fingerprint)
        url = self.engine.url
        if outcome.result == "broken":
            hint = "It stays paused. Restart it; the agent brings it to the newest version."
            hint = f"It stays paused. {_FROM_AN_ANCHOR}" if self._mirror is None else hint
            raise EngineError(f"the engine cannot be updated: {outcome.problem}", url=url, hint=hint)
        if outcome.result == "refused":
            problem = f"the workers refuse what was staged: {outcome.problem}"
            raise EngineError(problem, url=url, hint="The agent tries again.")
        if tuple(one.instance for one in outcome.workers) != state.instances:
            raise EngineError("another engine has answered", url=url, hint="Give each engine an address of its own.")
        took = outcome.microseconds
        paused = {phase: took[phase] / 1e6 for phase in PAUSED if phase in took}  # an engine names no others
        for phase, seconds in paused.items():
            self._phases.seconds[phase] = self._phases.seconds.get(phase, 0.0) + seconds
        self.unproven = tuple(sorted((set(self.unproven) - checked) | outcome.wrong))
        reloaded, phases = len(ready.reload), self._phases.seconds
        self.last = EngineUpdate(target, ready.changed, ready.nbytes, reloaded, self.unproven, phases)
        self._emit(target, ready, paused)
        return self.last

    def _update(
        self, ready: Ready, state: EngineState, target: Position, fingerprint: Fingerprint
    ) -> tuple[Outcome, frozenset[str]]:
        """What came of one update, and the tensors that were read back in it."""
        if ready.reads_mirror and self._mirror is not None:
            with self._phases.phase("stage"):
                self._mirror.free_files()
        names = [spec.name for spec in self._table] if self._prove else ready.reload
        verify = {name: fingerprint[name] for name in names if name not in state.fit.absent}
        request = UpdateEngine(
            ready.job,
            target,
            self._mirror.folder if self._mirror is not None else None,
            ready.reload,
            verify,
            state.fit.trusted.intersection(verify),
            self._clear_cache,
        )
        self._asked_at = self._clock.wall()
        return self.engine.update(request), frozenset(verify)

    def _emit(self, target: Position, ready: Ready, paused: Mapping[str, float]) -> None:
        """Send what the agent did, but for what its followers have sent, and what the engine did in its pause."""
        channel, began = self.subscriber.chain.channel.id, self._asked_at
        own = [one for one in self._phases.spans({"stage": ready.nbytes}) if one.phase != "fetch"]
        self._emitter.emit(channel, target.version, target.digest, own)
        spans = []
        for phase, seconds in paused.items():  # the engine has a clock of its own
            spans.append(Span(phase, began, seconds))
            began += seconds
        self._emitter.emit(channel, target.version, target.digest, spans, role="engine")

    # -- heartbeats, close --------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat if one is due."""
        position, error, last = self.position, self.trouble, self.last
        if self._heartbeats is None or position is None or isinstance(error, StoreError):
            return
        held = isinstance(self._policy, Pinned)  # not a follower: trainers do not wait for it
        pause = None if held else last.pause if last else 0.0
        text = error_text(error) if error else None
        cuts = self._state.fit.cuts if self._state is not None else ()
        seconds = last.seconds if last else {}
        with self._beating:
            self._heartbeats.report(
                self.subscriber.chain, position, error=text, pause=pause, cuts=cuts, seconds=seconds, at_once=True
            )

    def close(self) -> None:
        """Give the engine back, whose pause ends if its weights are whole, and release the mirror."""
        self.stop()
        self._keep_alive.stop()
        try:
            self._leave()
            if self._heartbeats is not None:
                self._heartbeats.withdraw(self.subscriber.chain)
        finally:
            self._opened.close()

    def _leave(self) -> None:
        if not self._met:
            return
        url = self.engine.url
        remedy = "Start the agent again, which brings it to a version and resumes it, or restart the engine."
        try:
            left = self.engine.leave()
            if left.paused_by_update:
                _log.warning("%s stays paused: an update broke off, and its weights are mixed. %s", url, remedy)
            elif left.served == MIXED:
                problem = "an update broke off in a pause of somebody else, and its weights are mixed"
                _log.warning("do not resume %s: %s. %s", url, problem, remedy)
        except (EngineBusyError, EngineGoneError):
            return  # another agent looks after it, or there is nothing to look after
        except EngineError as error:
            _log.warning("%s may be left paused: %s. %s", url, error.problem, remedy)


def _nothing_is_left_over(staged: StagedCoded, names: frozenset[str]) -> tuple[str, ...]:
    """Without a mirror there is nothing to decode against."""
    raise NotDirectlyError(f"the workers hold a part of tensors that they cannot decode: {listed(names)}")
