"""The agent: a mirror that follows a channel, and an engine that follows the mirror.

    poll → fetch, decode, verify (mirror) → stage (workers) → [pause → apply → finish → resume]

Everything outside the brackets happens while the engine serves. The agent brings an engine in any state to the mirror's
version; `plan` decides how. An update that breaks off leaves the engine paused until another one succeeds. A channel
that does not fit the engine is refused before anything is fetched or paused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from weightcast.channel.keys import Position
from weightcast.channel.policy import NEWEST, Pinned, Policy
from weightcast.engine.box_digests import fingerprint_of
from weightcast.engine.client import Engine
from weightcast.engine.fit import refuse_reload, teach, warn_of_gaps
from weightcast.engine.jobs import combine_digests, compare_files, live_digests, run_job
from weightcast.engine.messages import (
    ApplyUpdate,
    Distrust,
    JobRequest,
    SetPosition,
    StagePatches,
    StageWeights,
    Trust,
)
from weightcast.engine.messages import Staged as StagedOnWorker
from weightcast.engine.pause import Pause
from weightcast.engine.plan import Plan, plan_patch, plan_update
from weightcast.engine.proof import position_of
from weightcast.engine.state import EngineState, read_state
from weightcast.engine.update import EngineUpdate
from weightcast.errors import EngineError, MisfitError, StoreError, WeightcastError
from weightcast.follow.heartbeat_sender import HeartbeatSender, error_text
from weightcast.follow.loop import OnError, rounds
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.replica import Staged
from weightcast.follow.subscriber import Subscriber
from weightcast.follow.update import Phases
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorTable
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Store

_LONGEST = 30.0
"""Seconds between two attempts at most: an engine that restarts serves old weights until the agent reaches it."""

_MIXED = "updating"
"""The version that an engine names while its weights are a mix of versions."""

_log = logging.getLogger("weightcast")


@dataclass(frozen=True)
class _Ready:
    """An update that the workers can write: what a job staged, if any, and what is reloaded after it."""

    job: str | None
    reload: tuple[str, ...]
    changed: int = 0
    nbytes: int = 0
    reads_mirror: bool = True
    """Whether the workers read the mirror while they write."""


class Agent:
    """Keeps one engine at a channel's versions, through a mirror on the engine's host."""

    def __init__(
        self,
        channel: str | Store,
        engine: Engine,
        mirror: Path | str,
        *,
        policy: Policy = NEWEST,
        prove: bool = False,
        clear_cache: bool = True,
        replica: str | None = None,
        clock: Clock = CLOCK,
    ):
        """``prove`` digests all live parameters after every update, while the engine is still paused.

        With a ``replica`` name the agent sends heartbeats to the bucket, if it may write there.
        """
        self.engine = engine
        self.subscriber = Subscriber(channel, mirror, policy=policy, clock=clock)
        self.position: Position | None = None
        """The engine's, as far as the agent knows."""
        self.unproven: tuple[str, ...] = ()
        """Tensors whose live bits cannot be read back."""
        self.last: EngineUpdate | None = None
        self.trouble: WeightcastError | None = None
        """The error of the last round of `follow`, if it had one."""
        self.short: WeightcastError | None = None
        """Why the last round went to an older version than the policy wants, if it did."""
        self._policy, self._prove, self._clock = policy, prove, clock
        self._pause = Pause(engine, clear_cache)
        instance = MirrorFolder(Path(mirror)).instance
        self._heartbeats = HeartbeatSender(replica, instance, clock) if replica else None
        self._phases = Phases(clock)
        """Of the round that runs now, or ran last."""
        self._state: EngineState | None = None
        self._verified: tuple[str, ...] = ()
        """The worker processes whose reported position is believed; only with ``prove``."""
        self._stopped = threading.Event()

    @property
    def lag(self) -> int | None:
        """Versions from the live one to the newest that the mirror has; None if either is unknown."""
        newest, live = self.subscriber.position, self.position
        return max(0, newest.version - live.version) if newest and live else None

    @property
    def _table(self) -> TensorTable:
        return self.subscriber.chain.channel.table

    # -- a round -----------------------------------------------------------------------------------------------------

    def step(self) -> EngineUpdate | None:
        """Bring mirror and engine to the version that the policy wants; None if the engine is there already."""
        self._phases = Phases(self._clock)
        staged = state = self.short = None
        errors: list[WeightcastError] = []
        try:
            state = self._meet()
            self._pause.end_leftover(state, self._prove)
        except MisfitError:
            raise
        except EngineError as error:
            self.position = None
            errors.append(error)
        try:
            with self._phases.phase("fetch"):
                staged = self.subscriber.poll()
        except WeightcastError as error:
            errors.append(error)  # an engine that has restarted still gets what the mirror has
        update = self._follow_mirror(state, staged)
        self.short = staged.reason if staged is not None else None
        if errors:
            raise errors[-1]
        return update

    def _follow_mirror(self, state: EngineState | None, staged: Staged | None) -> EngineUpdate | None:
        try:
            ready = self._stage_patches(state, staged) if state and staged else None
        finally:
            if staged is not None:  # the mirror follows the channel even if the engine fails
                self.subscriber.apply(staged)
        target, fingerprint = self.subscriber.position, self.subscriber.mirror.fingerprint
        if state is None or target is None or fingerprint is None:
            return None
        if state.position is None and not state.changing:
            state = self._recognise(state, fingerprint, target)
        self._pause.end_leftover(state, self._prove)
        plan = plan_update(state, self._table, target)
        update = None
        if plan is not None:
            self.position = None
            ready = ready or self._stage(plan, state, fingerprint)
            update = self._bring(ready, target, fingerprint)
            self.last, self.unproven = update, update.unproven
        self.position, self._verified = target, state.instances
        return update

    # -- what the engine is ------------------------------------------------------------------------------------------

    def _meet(self) -> EngineState:
        state = read_state(self.engine, self._table, self._state)
        if not state.learned:
            with self._phases.phase("learn"):
                teach(self.engine, self.subscriber.chain.channel)
            state = read_state(self.engine, self._table)
            warn_of_gaps(state.fit)
        self._pause.ours = state.paused_by_agent
        if state.changing:
            self._pause.begin()  # a mix of versions must not be served
        self.position, self._state = state.position, state
        return replace(state, position=None) if self._prove and state.instances != self._verified else state

    def _recognise(self, state: EngineState, fingerprint: Fingerprint, target: Position) -> EngineState:
        """Find out by live digests which version an engine is at that does not say so, and which layouts are right."""
        fit = state.fit
        with self._phases.phase("recognise"):
            digests = live_digests(self.engine, self._table)
        same = {name for name, one in digests.items() if one.digest == fingerprint[name]}
        found = fingerprint_of(self._table, digests)
        position = target if len(same | fit.absent) == len(self._table) else None
        if position is None and found is not None:
            with suppress(StoreError):  # during an outage it is compared with the mirror instead
                position = position_of(found, self.subscriber.chain)
        trusted = digests.keys() - fit.absent if position else same | fit.trusted
        if position is None and not state.updates:
            with self._phases.phase("compare"):
                loaded, other = compare_files(self.engine)
            packed = other - fit.trusted  # a trusted one differs because it was changed since
            self.engine.ask(Distrust(packed, "the engine changes it after loading"))
            trusted = (trusted | loaded) - packed
        fit = replace(fit, trusted=frozenset(trusted))
        self.engine.ask(Trust(fit.trusted))
        if position is not None:
            self.engine.ask(SetPosition(position))
            self.engine.name_version(str(position.version))
        return replace(state, position=position, fit=fit)

    # -- stage -------------------------------------------------------------------------------------------------------

    def _stage_patches(self, state: EngineState, staged: Staged) -> _Ready | None:
        """Have the workers prepare what was fetched, if the engine is where it begins."""
        before = self.subscriber.mirror.fingerprint
        if before is None or staged.anchor is not None:
            return None
        plan = plan_patch(state, staged.start, before, staged.fingerprint)
        if plan is None:
            return None
        refuse_reload(plan.unreachable, state.fit.cannot_reload, self.engine.url)
        request = StagePatches(tuple(str(patch.path) for patch in staged.patches))
        return self._run_staging(request, plan, staged.fingerprint)

    def _stage(self, plan: Plan, state: EngineState, fingerprint: Fingerprint) -> _Ready:
        """Have the workers compare what they hold with the mirror; what cannot be compared is reloaded."""
        refuse_reload(plan.unreachable, state.fit.cannot_reload, self.engine.url)
        if not plan.compare:
            return _Ready(None, plan.reload)
        try:
            return self._run_staging(StageWeights(self._mirror_folder, plan.compare), plan, fingerprint)
        except _StagedWrongError:
            live_digests(self.engine, self._table)  # what the workers remember of themselves is wrong
            return self._run_staging(StageWeights(self._mirror_folder, plan.compare), plan, fingerprint)

    def _run_staging(self, request: JobRequest[StagedOnWorker], plan: Plan, fingerprint: Fingerprint) -> _Ready:
        """`EngineError` unless what the workers stage leads to the version's bits."""
        with self._phases.phase("stage"):
            results = run_job(self.engine, request)
        for name, found in combine_digests(self.engine, self._table, [one.digests for one in results]).items():
            if found.digest != fingerprint[name] and not found.rounded:
                problem = found.problem or "what is staged would not be the version's bits"
                hint = "Something else changed the engine's memory; the agent compares it with the mirror now."
                raise _StagedWrongError(problem, url=self.engine.url, tensor=name, hint=hint)
        changed, nbytes = sum(one.changed for one in results), sum(one.nbytes for one in results)
        reads_mirror = bool(plan.reload) or any(one.reads_mirror for one in results)
        return _Ready(request.job, plan.reload, changed, nbytes, reads_mirror)

    @property
    def _mirror_folder(self) -> str:
        return str(self.subscriber.mirror.folder.absolute())

    # -- apply -------------------------------------------------------------------------------------------------------

    def _bring(self, ready: _Ready, target: Position, fingerprint: Fingerprint) -> EngineUpdate:
        """Write what is ready; if that fails halfway, load everything again before the engine resumes."""
        unproven = self._write(ready, target, fingerprint)
        if unproven is None:
            self.engine.finish(_MIXED)
            _log.warning("the update failed; the engine stays paused while all of it is loaded again")
            everything = tuple(spec.name for spec in self._table)
            ready = replace(ready, job=None, reload=everything, reads_mirror=True)
            unproven = self._write(ready, target, fingerprint)
        if unproven is None:
            self.engine.finish(_MIXED)
            failed = read_state(self.engine, self._table).failed or "its live bits are not the version's"
            hint = "It stays paused. Restart it; the agent brings it to the newest version."
            raise EngineError(f"the engine cannot be updated: {failed}", url=self.engine.url, hint=hint)
        with self._phases.phase("resume"):
            self.engine.finish(str(target.version))
            self._pause.end()
        return EngineUpdate(target, ready.changed, ready.nbytes, len(ready.reload), unproven, self._phases.seconds)

    def _write(self, ready: _Ready, target: Position, fingerprint: Fingerprint) -> tuple[str, ...] | None:
        """Pause and write; the tensors that cannot be verified, or None if it failed. The engine stays paused."""
        if ready.reads_mirror:  # else the workers would wait in the pause for a fold that holds the readers' lock
            with self._phases.phase("stage"):
                self.subscriber.mirror.take_up_fold(wait=True)
        with self._phases.phase("pause"):
            self._pause.begin()
        with self._phases.phase("apply"):
            self.engine.update(ApplyUpdate(ready.job, target, self._mirror_folder, ready.reload))
            state = read_state(self.engine, self._table, self._state)
        if state.failed and not state.changing:  # nothing was written
            self.engine.finish(str(state.position.version) if state.position else None)
            self._pause.end()
            problem = f"the workers refuse what was staged: {state.failed}"
            raise EngineError(problem, url=self.engine.url, hint="The agent tries again.")
        if state.failed or state.changing or state.position != target:  # a worker may have missed the update
            return None
        with self._phases.phase("prove"):
            return self._read_back(ready, state, fingerprint)

    def _read_back(self, ready: _Ready, state: EngineState, fingerprint: Fingerprint) -> tuple[str, ...] | None:
        """Digest what was reloaded, or everything; a tensor that is right is trusted from now on."""
        if not ready.reload and not self._prove:
            return self.unproven
        fit = state.fit
        digests = live_digests(self.engine, self._table, None if self._prove else ready.reload)
        wrong = {name for name, one in digests.items() if one.digest != fingerprint[name]} - fit.absent
        if any(not digests[name].rounded for name in wrong & fit.trusted):
            self.engine.ask(SetPosition(None))
            return None
        self.engine.ask(Trust(frozenset(digests.keys() - wrong - fit.absent)))
        return tuple(sorted((set(self.unproven) - digests.keys()) | wrong))

    # -- follow ------------------------------------------------------------------------------------------------------

    def follow(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[EngineUpdate]:
        """Step until `stop`, and yield each update. An error ends it, unless ``on_error`` is given and returns.

        ``on_error`` also gets the reason if the newest version cannot be reached and the engine follows an older one.
        """
        return (update for update in self.rounds(every, on_error) if update is not None)

    def rounds(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[EngineUpdate | None]:
        """As `follow`, and yield None for a round that failed or found nothing."""

        def report(error: WeightcastError | None) -> None:
            if error is not None and on_error is not None:
                on_error(error)
            self.trouble = error
            self._beat(error)

        def step() -> EngineUpdate | None:
            update = self.step()
            report(self.short)
            return update

        handler = None if on_error is None else report
        return rounds(step, every=every, stopped=self._stopped, on_error=handler, clock=self._clock, longest=_LONGEST)

    def stop(self) -> None:
        """End `follow`, from any thread."""
        self._stopped.set()

    def _beat(self, error: WeightcastError | None) -> None:
        """Send a heartbeat if one is due."""
        if self._heartbeats is None or self.position is None or isinstance(error, StoreError):
            return
        held = isinstance(self._policy, Pinned)  # not a follower: trainers do not wait for it
        pause = None if held else self.last.pause if self.last else 0.0
        text = error_text(error) if error else None
        self._heartbeats.report(self.subscriber.chain, self.position, error=text, pause=pause, at_once=True)

    def close(self) -> None:
        """Resume the engine if an agent paused it and its weights are whole, and release the mirror."""
        self.stop()
        try:
            self._pause.leave(self._table)
            if self._heartbeats is not None:
                self._heartbeats.withdraw(self.subscriber.chain)
        finally:
            self.subscriber.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _StagedWrongError(EngineError):
    """What the workers prepared does not lead to the version's bits: nothing was written."""
