"""The mirror on an engine's host: it follows beside, and leads where workers cannot decode."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from weightcast.channel.keys import Position
from weightcast.channel.policy import Policy
from weightcast.channel.trust import Trust
from weightcast.engine.beside import Beside
from weightcast.engine.client import Engine
from weightcast.engine.direct import NotDirectlyError
from weightcast.engine.engine_replica import StagedCoded
from weightcast.engine.fit import listed, refuse_reload
from weightcast.engine.jobs import live_digests
from weightcast.engine.left_over import stage_left_over
from weightcast.engine.messages import JobRequest, StagePatches, StageWeights
from weightcast.engine.messages import Staged as StagedOnWorker
from weightcast.engine.plan import Plan, plan_patch
from weightcast.engine.ready import Ready, StagedWrongError, ready_of
from weightcast.engine.state import EngineState
from weightcast.errors import EngineError, WeightcastError
from weightcast.events.emitter import OnEvent
from weightcast.follow.replica import Staged
from weightcast.follow.subscriber import Subscriber
from weightcast.format.digest import Fingerprint
from weightcast.format.workers import Workers
from weightcast.store.backoff import Clock
from weightcast.store.base import Store

_LOOK_EVERY = 30.0
"""Seconds between two looks after the mirror's files, while nothing is new."""


class Mirrored:
    """Keeps a mirror at a channel's versions, and has workers prepare what it holds."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        folder: Path,
        objects: Path,
        policy: Policy,
        clock: Clock,
        *,
        on_event: OnEvent = (),
        trust: Trust | None = None,
        sign: str | Path | None = None,
    ):
        """``objects`` is where the direct way keeps what it has fetched: the mirror need not fetch it again."""
        self.subscriber = Subscriber(
            store, folder, policy=policy, clock=clock, on_event=on_event, trust=trust, sign=sign
        )
        self.folder = str(folder.absolute())
        self._engine, self._clock = engine, clock
        self._left_over = objects.parent / "left-over"
        self._beside = Beside(self.subscriber, objects)
        self._look_at = clock.now()

    @property
    def position(self) -> Position | None:
        return self.subscriber.position

    @property
    def fingerprint(self) -> Fingerprint | None:
        return self.subscriber.mirror.fingerprint

    # -- beside --------------------------------------------------------------------------------------------------------

    def begin(self) -> WeightcastError | None:
        """Follow beside, once; what that failed with the last time, if it did."""
        error = self._beside.take_error()
        self._beside.begin()
        return error

    def keep(self, position: Position | None) -> None:
        """Nothing is new for an engine at ``position``: catch up with it, and now and then see to the files.

        Raises what the mirror last failed with.
        """
        error = self._beside.take_error()
        now = self._clock.now()
        if not self._beside.is_at(position) or now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._beside.begin()
        if error is not None:
            raise error

    def catch_up(self, position: Position | None) -> None:
        """Wait until the mirror holds ``position``; raises why it does not."""
        error = self._beside.wait()
        if self.position != position:
            if error is not None:
                raise error
            self.subscriber.sync()

    def bring_to(self, target: Position) -> None:
        """`EngineError` if the mirror does not come to ``target``, from which a paused engine is to be loaded."""
        self._beside.wait()
        if self.position != target:
            self.subscriber.sync()
        if self.position != target:
            problem = f"the mirror is at {self.position}, not at {target}"
            hint = "The engine stays paused; the agent brings both to the newest version now."
            raise EngineError(problem, url=self._engine.url, hint=hint)

    # -- lead ----------------------------------------------------------------------------------------------------------

    def poll(self) -> Staged | None:
        """Fetch, decode and verify the version that the policy wants."""
        self._beside.wait()  # what it failed with is met again
        return self.subscriber.poll()

    def stage_patches(self, state: EngineState, staged: Staged) -> Ready | None:
        """Have the workers prepare what was fetched, if the engine is where it begins."""
        before = self.fingerprint
        if before is None or staged.anchor is not None:
            return None
        plan = plan_patch(state, staged.start, before, staged.fingerprint)
        if plan is None:
            return None
        refuse_reload(plan.unreachable, state.fit.cannot_reload, self._engine.url)
        request = StagePatches(tuple(str(patch.path) for patch in staged.patches))
        return self._run(request, plan, staged.fingerprint)

    def stage(self, plan: Plan, state: EngineState) -> Ready:
        """Have the workers compare what they hold with the mirror; what cannot be compared is reloaded."""
        fingerprint = self.fingerprint
        assert fingerprint is not None, "else there is no version to bring the engine to"
        refuse_reload(plan.unreachable, state.fit.cannot_reload, self._engine.url)
        if not plan.compare:
            return Ready(None, plan.reload)
        try:
            return self._run(StageWeights(self.folder, plan.compare), plan, fingerprint)
        except StagedWrongError:
            live_digests(self._engine, fingerprint.table)  # what the workers remember of themselves is wrong
            return self._run(StageWeights(self.folder, plan.compare), plan, fingerprint)

    def _run(self, request: JobRequest[StagedOnWorker], plan: Plan, fingerprint: Fingerprint) -> Ready:
        """`EngineError` unless what the workers stage leads to the version's bits."""
        results = self._engine.run(request)
        return ready_of(self._engine, request, results, fingerprint, plan.reload)

    def stage_left_over(self, staged: StagedCoded, names: frozenset[str]) -> tuple[str, ...]:
        """Decode what a route changes in tensors that workers cannot decode; the files of staged patches."""
        self._beside.wait()
        weights, fingerprint = self.subscriber.mirror.base, self.fingerprint
        if weights is None or fingerprint is None or self.position != staged.start:
            raise NotDirectlyError(f"the workers cannot decode {listed(names)}, and the mirror is at another version")
        try:
            with closing(Workers(None)) as workers:
                return stage_left_over(weights, fingerprint, staged.versions, names, self._left_over, workers)
        except WeightcastError as error:  # of the object or of the mirror, which finds out which
            raise NotDirectlyError(error) from error

    def free_files(self) -> None:
        """Wait for a fold: workers that read the mirror in a pause would wait for it."""
        self.subscriber.mirror.take_up_fold(wait=True)

    def wait(self) -> None:
        """Wait until it does not follow beside."""
        self._beside.wait()

    def close(self) -> None:
        self._beside.wait()
        self.subscriber.close()
